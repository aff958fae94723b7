"""From texts, chat messages and images to token ids, and back."""
