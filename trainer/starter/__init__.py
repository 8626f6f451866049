"""The recipe of the bundled starter model: its architecture, its demonstrations and its training."""
