"""Environments: what the agent acts in. Knows nothing of tokens, torch or models."""
