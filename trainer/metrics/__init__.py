"""Metrics of each step: the log, the trackers and the console."""
