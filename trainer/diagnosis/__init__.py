"""What `python -m trainer.doctor` is made of: one file per subject, small inputs in, verdicts out."""
