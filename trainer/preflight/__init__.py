"""The doctor: checks a run before step 0, so that a run that would be wrong does not start.

`checks/` has one file per check, with functions that return verdicts. Four classes call them on what a run is made of:
`ConfigChecks` on the configuration alone, `PreparedChecks` on a prepared run, `EngineChecks` on a prepared run whose
engine runs, and `RecordedChecks` on a run that replays rollouts. `FindingLog` makes a finding of each verdict.

To add a check: write `checks/NAME.py` with a function that returns a `Verdict`; call it in a method of the class that
has what the check needs; add its name to `report.CHECKS`; call the method in `diagnosis` and, if it takes less
than a second and needs no engine, in `quick.QuickChecks`; add a line to the table in `docs/doctor.md`.
"""
