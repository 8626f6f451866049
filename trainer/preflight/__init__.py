"""The doctor: checks a run before step 0, so that a run that would be wrong does not start.

`checks/` has one file per subject, with functions that return verdicts. Four classes call them on what a run is made
of: `ConfigChecks` on the configuration, `LearnerChecks` on a learner and recorded episodes, `PreparedChecks` on a
prepared run, and `EngineChecks` on a running engine. `CheckRun` of `envs.checks` makes a finding of each verdict.

To add a check: write a function in `checks/` that returns a `Verdict`; call it in a method of the class that has what
the check needs, and name it there; add its name to `report.CHECKS` and, if it takes less than a second and needs no
engine, to `quick.QUICK`; add a line to the list in `docs/doctor.md`.
"""
