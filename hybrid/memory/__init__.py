"""The memory of a cache: which pages and state slots are free, and the tensors behind them."""
