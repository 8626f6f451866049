"""The checks of `agents.check_engine`."""
