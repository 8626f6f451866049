"""The trainer: turns trajectories into better weights."""
