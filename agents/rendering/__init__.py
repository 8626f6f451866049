"""The parts of the renderer: a tokenizer's two ways, a chat template that has been tried out, and its suffixes."""
