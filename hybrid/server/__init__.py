"""The engine behind HTTP: OpenAI's and Anthropic's APIs, metrics, and a page."""
