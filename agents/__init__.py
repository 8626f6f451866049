"""Agents: turns environments and an engine into trajectories. Knows nothing of losses or optimizers."""

from envs.interrupts import end_quietly

end_quietly(__name__)
