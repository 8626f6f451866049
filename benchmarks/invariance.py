"""What must not change a step, measured: `python -m benchmarks.invariance`.

For each kind of architecture, a tiny network with random weights and twelve random streams in four groups, of one to
three turns, with images in prompts and in later turns where the network takes some. One step of all of them at once
is held against the same step taken otherwise: cut into other micro-batches, in another order, on 2 and 4 ranks with
uneven shares, with activations made again, weights or optimizer on the host, and with adapters against the merged
network (gradients by the chain rule). Everything is in float32, so what is left is rounding.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.report import RESULTS, commit, markdown, write_result
from tests.tiny_models import MODEL_TYPES
from tests.trainer.steps import (
    VARIANTS,
    Case,
    Difference,
    Stepped,
    Variant,
    adapters_and_merged,
    steps_on_ranks,
    take_variant,
)

RANKS = (1, 2, 4)
#: By architecture, kind of what differs, and what it is.
Found = dict[str, dict[str, dict[str, Difference]]]


def measure(cases: dict[str, Case], folder: Path) -> Found:
    """Take every step in every way."""
    expected: dict[str, Stepped] = {name: take_variant(case, Variant()) for name, case in cases.items()}
    found: Found = {name: {} for name in cases}
    for name, case in cases.items():
        for (kind, what), variant in VARIANTS.items():
            found[name].setdefault(kind, {})[what] = Difference.between(take_variant(case, variant), expected[name])
        found[name]["LoRA"] = {"adapters or merged": Difference.between(*adapters_and_merged(case))}
    for num_ranks in RANKS:
        for name, stepped in steps_on_ranks(cases, num_ranks, folder).items():
            kind = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
            found[name][kind] = {"uneven shares": Difference.between(stepped, expected[name])}
    return found


def largest(differences: Iterable[Difference]) -> Difference:
    """Return the largest of each figure."""
    rows = list(differences)
    return Difference(*(max(getattr(row, field) for row in rows) for field in asdict(rows[0])))


def main() -> None:
    """Run the command line."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    at, started = commit(), time.perf_counter()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: Case.write(Path(folder) / name, name) for name in MODEL_TYPES}
        found = measure(cases, Path(folder))
    kinds = list(found[MODEL_TYPES[0]])
    cells = [
        [name, *(f"{most.loss:.0e}, {most.gradient:.0e}" for kind in kinds for most in [largest(ways[kind].values())])]
        for name, ways in found.items()
    ]
    print("Largest relative difference of loss and of all gradients together:\n")
    print(markdown(("architecture", *kinds), cells))
    everything = largest(
        difference for ways in found.values() for kind in ways.values() for difference in kind.values()
    )
    print(f"\nThe gradient of one tensor that is furthest off: {everything.worst_gradient:.0e}")
    figures = {
        "dtype": "float32",
        "seeds": {"weights": 0, "streams": 0},
        "seconds": round(time.perf_counter() - started, 1),
        "largest": asdict(everything),
        "architectures": {
            name: {kind: {what: asdict(d) for what, d in rows.items()} for kind, rows in ways.items()}
            for name, ways in found.items()
        },
    }
    command = "python -m benchmarks.invariance"
    write_result(RESULTS / "invariance.json", command, figures, at, ("torch", "transformers", "peft"))


if __name__ == "__main__":
    main()
