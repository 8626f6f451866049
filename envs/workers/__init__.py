"""Worker processes for code that may hang, crash or use too much memory; the program can kill them."""
