"""Writes the model card of a starter, from the report of its training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# TrueTurn starter

A Qwen3-VL network of {parameters:,} parameters that reads small geometry diagrams. `python -m trainer.starter` made all
of it: diagrams, texts, tokenizer, chat template and weights. It exists so that `python -m trainer.run --env geo3k` has
something to improve on a laptop. It knows nothing else, and nothing of Geometry3K went into it.

| | |
|---|---|
| Training | {seconds:,.0f} s on {device}, torch {torch}, seed {seed}; settings in `recipe.json` |
| Weights | bfloat16 safetensors, {megabytes:.1f} MB, SHA-256 `{sha256}` |

Each stage, with what the network then gets right of lessons on problems that no stage shows (split `validation`):
*reading* is the share of the numbers in the pictures that it writes right, given the text before; *exact* is the share
of lessons that it writes to the letter, without sampling.

{stages}
By family, before the last stage:

{families}
**Mixed habits, on purpose.** In the last stage few demonstrations reason before they answer, and half of those that are
told that their answer is wrong give up. The network has all of these habits at times. Reinforcement learning finds out
which of them pay.
"""


def write_card(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `README.md` into a checkpoint folder."""
    stages = report["stages"]
    taught = stages[-2:][0]  # before habits that seldom write what is taught
    rows = [
        (str(s["stage"]), f"{s['steps']:,}", f"{s['seconds']:,.0f}", f"{s['reading']:.3f}", f"{s['exact']:.3f}")
        for s in stages
    ]
    families = [
        (name, f"{taught['reading_by_family'][name]:.3f}", f"{exact:.3f}")
        for name, exact in taught["exact_by_family"].items()
        if name in taught["reading_by_family"]
    ]
    cells = {
        **report,
        "seed": report["recipe"]["seed"],
        "megabytes": (folder / "model.safetensors").stat().st_size / 1e6,
        "stages": _table(("stage", "steps", "seconds", "reading", "exact"), rows),
        "families": _table(("family", "reading", "exact"), families),
    }
    (folder / "README.md").write_text(CARD.format(**cells), encoding="utf-8")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
