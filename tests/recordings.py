"""What tests read of runs and recordings: the plain lines, as any program sees them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a whole file, which may be one of gzip members."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def episodes_in(run: Path, *phases: str) -> list[dict[str, Any]]:
    """Return recorded episodes of phases ("train" where none is named) with fate, step and advantage of their outcome.

    Those of training stand in the order of their outcomes: of steps, groups and samples.
    """
    folder = run / "episodes"
    outcomes = {line["id"]: line for line in lines_of(folder / "outcomes.jsonl.gz")}
    places = {name: place for place, name in enumerate(outcomes)}
    found = [e for e in lines_of(folder / "episodes.jsonl.gz") if e["phase"] in (phases or ("train",))]
    none = {"fate": "", "advantage": None}
    return [{**none, **e, **outcomes.get(e["id"], {})} for e in sorted(found, key=lambda e: places.get(e["id"], 0))]
