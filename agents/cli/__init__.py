"""The terminal: what a person reads and types, and escaping of text that is printed."""
