"""Settings of the commands: a tree of models, read from flags, environment variables and files."""
