"""From texts, chat messages and images to token ids, and from token ids to text."""
