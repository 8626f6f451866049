"""The planner: what fits on how many GPUs, how fast a run is there, and what limits it.

`shape` counts a network's operations and bytes, `hardware` holds what a machine does in a second, `costs` divides one
by the other. `workload` says what episodes look like, `layout` which GPUs learn and which generate, `simulation` plays
the run event by event, `search` finds the fastest layout, `calibrate` measures a machine.
"""
