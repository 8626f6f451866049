"""The command that measures all on two cores: its table, and what a part that fails leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cpu
from benchmarks.report import RESULTS, run_beside
from tests.paths import ROOT

SMALL: dict[str, Any] = {
    "laptop_step": {"results": {"one turn": {"TrueTurn": {"seconds": [9, 1, 2]}, "TRL": {"seconds": [5, 3, 4]}}}},
    "loop_peers": {
        "rows": [
            {"trainer": "TrueTurn", "at_once": 64, "cpu_us_per_turn": 90.4},
            {"trainer": "SkyRL", "at_once": 64, "cpu_us_per_turn": 361.6},
            {"trainer": "verl", "why": "no such version"},
        ]
    },
    "graders": {
        "graders": {
            "trueturn": {"all": {"num_pairs": 2000, "false_accepts": [], "false_rejects": ["a"]}},
            "math-verify": {"all": {"num_pairs": 2000, "false_accepts": ["b"], "false_rejects": ["c", "d", "e"]}},
        },
        "cost": {"kinds": [{"kind": "sums", "new_us_median": 1918.2, "again_us_median": 12.55}]},
    },
}


def test_the_table_has_our_figure_and_each_other_as_a_multiple_of_it(tmp_path: Path) -> None:
    for name, found in SMALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    rows = cpu.table({"agent_loop": {"why": "ValueError: no"}}, tmp_path).splitlines()
    assert rows[2:] == [
        "| a training step, one turn | s | 2 | TRL 4 (2 x) |",
        "| a turn of the loop, 64 at once | µs | 90.4 | SkyRL 362 (4 x), verl: no such version |",
        "| `agent_loop` |  |  | ValueError: no |",
        "| `env_throughput` |  |  | not run |",
        "| `fuzz_tool_calls` |  |  | not run |",
        "| wrong answers accepted, of 2,000 pairs |  | 0 | math-verify 1 |",
        "| right answers rejected, of 2,000 pairs |  | 1 | math-verify 3 (3 x) |",
        "| a grade, sums | µs | 1,918 | seen before 12.6 (0.0065 x) |",
    ]


def test_a_part_runs_in_its_own_process_and_one_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = cpu.Part(("--episodes", "8", "--repeats", "1"), cpu.own_loop)
    wrong = cpu.Part(("--count", "many"), cpu.graders)
    monkeypatch.setattr(cpu, "PARTS", {"agent_loop": short, "graders": wrong})
    monkeypatch.setattr(sys, "argv", ["cpu", "--results", str(tmp_path), "--sites", str(tmp_path)])
    cpu.main()
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["parts"]["agent_loop"]["why"] == ""
    assert "invalid int value: 'many'" in written["parts"]["graders"]["why"]
    assert [row.split(" | ")[0] for row in written["table"][2:]] == [
        "| a turn of the loop, 1,024 at once",
        "| a turn of the loop, 8,192 at once",
        "| `graders`",
    ]
    assert "\n".join(written["table"]) in capsys.readouterr().out


def test_packages_of_other_versions_are_not_taken_for_those_that_are_pinned(tmp_path: Path) -> None:
    (tmp_path / "old-1.0.dist-info").mkdir()
    (tmp_path / "old-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 1.0\n")
    assert run_beside([tmp_path], ("old==1.0",), "platform", []) == ""
    assert "remove it" in run_beside([tmp_path], ("old==1.1",), "platform", [])


def test_the_page_shows_the_figures_of_the_last_run() -> None:
    parts = json.loads((RESULTS / "cpu.json").read_text())["parts"]
    assert cpu.table(parts, RESULTS) in (ROOT / "docs" / "results-cpu.md").read_text(encoding="utf-8")
