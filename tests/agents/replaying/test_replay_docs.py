"""What "Replay" shows works as shown: its bug hunt finds the planted fault in the three commands of the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

from agents.recording import Recording
from agents.recording.selection import SelectionConfig
from agents.replay import ReplayConfig
from agents.replaying.difference import KINDS
from agents.replaying.fork import ForkConfig
from envs.config.settings import flag_of, leaves
from envs.grading import score_text
from tests.pages import code_block, session
from tests.paths import ROOT
from tests.processes import run_command

PAGE = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")


def lines(text: str) -> list[str]:
    """Return the lines of an output without figures, frames and episodes, which are others on other machines.

    A column's padding goes with its figures: 9 is padded by one space more than 10.
    """
    shapes = (" ".join(re.sub(r"[\d.]+", "0", line).split()) for line in text.splitlines())
    shapes = (re.sub(r"(evaluate-\S+-0-0)(, (\1|0))+", r"\1", shape) for shape in shapes)  # however many
    return list(dict.fromkeys(shape for shape in shapes if shape and not shape.startswith(("─", "evaluate-"))))


def test_the_bug_hunt_finds_the_planted_fault_in_the_three_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text(code_block(PAGE, "python", "# graded.py"))
    (tmp_path / "registry.yaml").write_text(code_block(PAGE, "yaml", "# registry.yaml"))
    env = {"PYTHONPATH": str(ROOT), "COLUMNS": "110"}

    def command(argv: list[str], code: int) -> str:
        done = run_command(*argv, cwd=tmp_path, env=env, timeout_s=280)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    evaluate, replay, alone = (
        session(PAGE, word) for word in ("--name first", "first --registry registry.yaml\n", "--max-concurrent 1")
    )
    (accuracy,) = re.findall(r"accuracy \(pass@1\) +(\S+)", command(evaluate[0], 0))
    out = command(replay[0], 1)
    # The table alone: how many episodes are listed below it depends on which of them ran at the same time.
    assert lines(out)[:4] == lines(replay[1])[:4]
    assert "gave another result" in out and "the environment is random, or its episodes share state" in out
    out = command([*alone[0], "--report", "alone.json"], 1)
    assert lines(out) == lines(alone[1])
    report = json.loads((tmp_path / "alone.json").read_text())
    assert set(report["kinds"]) == {"reward"} and report["unsteady"] == []
    labels = {e.id: (e.label, e.turns[-1].text) for e in Recording.open(tmp_path / "runs" / "first").episodes()}
    solved = [score_text(text, str(label)) for label, text in labels.values()]
    assert float(accuracy) < sum(solved) / len(solved)
    for found in report["found"]:
        label, text = labels[found["id"]]
        assert [each["replayed"] for each in found["differences"]] == [score_text(text, str(label))]


def test_every_kind_and_flag_is_on_the_page() -> None:
    assert re.findall(r"^\| `([a-z ]+)` \|", PAGE, re.MULTILINE) == list(KINDS)
    flags = {flag_of(path[-1], field) for path, field in leaves(ReplayConfig)} - {"RUN"}
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    both = {**SelectionConfig.model_fields, **ForkConfig.model_fields}
    own = {flag_of(name, field) for name, field in both.items()}
    assert own | {"--env", "--registry", "--model", "--show", "--report"} <= named
    assert named - flags <= {"--size", "--name"}
