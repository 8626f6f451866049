"""Agents: turns environments and an engine into trajectories. Knows nothing of losses or optimizers."""
