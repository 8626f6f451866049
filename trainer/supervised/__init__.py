"""Supervised fine-tuning: conversations in, a model that says what the assistant says in them out."""
