"""Supervised fine-tuning: a model learns what the assistant says in conversations."""
