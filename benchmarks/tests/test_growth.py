"""The benchmark of growth: what it fits, and that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import growth


def test_the_slope_is_the_exponent_of_the_upper_half() -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    assert growth.slope(sizes, [50, 40, 30, *(3 * size**1.5 for size in sizes[3:])]) == pytest.approx(1.5)
    assert growth.slope((64, 256), (2, 8)) == pytest.approx(1)
    assert growth.slope((64,), (2,)) == growth.slope((1, 2), (0, 0)) == 0


def test_a_quadratic_part_is_steep_beside_a_linear_one() -> None:
    sizes = (1, 2, 4, 8)
    rows = [{"part": "good", "size": n, "seconds": 1 + n / 9, "mb": n, "expected": 1.0} for n in sizes]
    rows += [{"part": "bad", "size": n, "seconds": n * n, "mb": n, "expected": 1.0} for n in sizes]
    assert [(row["part"], row["is_steep"]) for row in growth.summary(rows)] == [("good", False), ("bad", True)]


@pytest.mark.parametrize(
    ("axis", "own"), [("images", "learner's step"), ("turns", "template check")], ids=["images", "turns"]
)
def test_every_part_of_an_axis_is_measured_and_drawn(axis: str, own: str, tmp_path: Path, monkeypatch) -> None:
    arguments = ["growth", "--axes", axis, "--most", "2", "--out", str(tmp_path), "--images", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    growth.main()
    written = json.loads((tmp_path / "growth.json").read_text())
    parts = {row["part"] for row in written["axes"][axis]}
    assert parts == {"agent loop", "recording", "packing", "reading", own}
    assert all(row["seconds"] > 0 for row in written["axes"][axis])
    assert (tmp_path / f"growth_{axis}.png").stat().st_size < 60_000
