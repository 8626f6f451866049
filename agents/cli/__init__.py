"""The terminal: what a person reads and types, and shortening of text that is printed."""
