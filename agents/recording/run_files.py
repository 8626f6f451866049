"""Names of the files in a run folder that the trainer writes and the viewer reads."""

from __future__ import annotations

#: The settings, written when a run starts; one line per step; the results, written when the run ends.
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
