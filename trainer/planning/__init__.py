"""What a run takes, computed without running it: memory for `trainer.memory` and the doctor, speed for `trainer.plan`.

`memory` counts the bytes of a training step. `shape` counts a network's operations, `hardware` holds what a GPU does in
a second, `speed` divides one by the other, and `layouts` finds the fastest split of GPUs that fits.
"""
