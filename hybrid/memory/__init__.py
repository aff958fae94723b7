"""Pages and state slots: which are free, and the tensors that they are."""
