"""The engine as a model of EleutherAI's lm-evaluation-harness (extra `lm-eval`)."""
