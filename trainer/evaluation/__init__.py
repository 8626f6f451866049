"""Measures the accuracy of a policy on problems, with intervals."""
