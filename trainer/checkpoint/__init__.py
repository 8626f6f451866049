"""The run folder, its checkpoints and what resuming needs."""
