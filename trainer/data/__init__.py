"""Trajectories become training samples, packed rows and micro-batches."""
