"""Rendering: chat messages to token ids by the model's own template and tokenizer, and images to patches."""
