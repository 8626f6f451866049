"""The checks of the doctor, one file each: functions that compare what a run has with what it should be.

They take plain values (tensors, configurations, trajectories) and return a `Verdict`.
"""
