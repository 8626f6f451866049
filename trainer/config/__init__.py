"""Every setting of the trainer's commands, with ready recipes."""
