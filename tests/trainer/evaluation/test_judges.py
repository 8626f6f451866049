"""A judge among the rewards of an evaluation and of a run: table, files, recording and replay."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

import trueturn as tt
from agents.recording import Recording
from agents.replay import run as replay
from agents.types import EndReason
from envs.config.cli import exit_code
from tests.agents.endpoints.server import chat_server, says
from trainer.evaluate import run as evaluate
from trainer.evaluation.judges import JudgeAgreement, agreements
from trainer.evaluation.results import EvaluatedEpisode


def judge_file(folder: Path, url: str) -> str:
    settings = {"url": url, "model": "judge", "regex": r"Score: (\d+)", "range": [0, 10], "max_retries": 0}
    (folder / "judge.yaml").write_text(json.dumps({**settings, "template": "{label} or {answer}?"}))
    return str(folder / "judge.yaml")


def reply(body: dict[str, Any]) -> Mapping[str, Any]:
    """Solve problems with a 7 in them; as a judge, like right answers, and say nothing of even ones."""
    asked = str(body["messages"][-1]["content"])
    if body["model"] != "judge":
        (question,) = re.findall(r"What is (.*?)\?", asked)
        return says(f"\\boxed{{{eval(question) if '7' in question else 'x'}}}")
    label, answer = asked.removesuffix("?").split(" or ")
    if label != "4" and label[-1] in "02468":
        return says("I cannot say.")
    return says("Score: 8" if label in answer else "Score: 2")


def test_the_agreement_of_a_judge_counts_what_it_calls_right_from_one_half_on() -> None:
    rows = [(True, 0.5), (True, 0.9), (False, 0.5), (True, 0.49), (False, 0.0), (False, 0.1), (None, 1.0)]
    episodes = [
        EvaluatedEpisode(0.0, right, EndReason.COMPLETED, 1, 1, verdicts={"judge": value}) for right, value in rows
    ]
    episodes.append(EvaluatedEpisode(0.0, True, EndReason.REWARD_ERROR, 1, 1))  # the judge failed
    assert agreements(episodes) == {"judge": JudgeAgreement(6, 4 / 6, 2, 1, 1, 2)}


def test_an_evaluation_shows_judge_and_grader_side_by_side_and_a_judge_that_fails_makes_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    argv = ["--env", "calculator", "--size", "12", "--tools", "off", "--out", str(tmp_path)]
    with chat_server(reply) as server:
        player = [*argv, "--endpoint", server.url, "--model", "player"]
        assert exit_code(lambda: evaluate([*player, "--name", "plain"])) == 0
        rewards = ["--reward", "answer@1", "--reward", f"{judge_file(tmp_path, server.url)}@0"]
        assert exit_code(lambda: evaluate([*player, "--name", "judged", *rewards])) == 0
        num_asked = len(server.asked)
        assert replay([str(tmp_path / "judged")]) == 0
        assert len(server.asked) == num_asked, "replay asks no judge"
    plain, judged = (
        json.loads((tmp_path / name / "evaluation.json").read_text())["ways"]["without_tool"]
        for name in ("plain", "judged")
    )
    assert judged["accuracy"] == plain["accuracy"] and not plain["judges"]
    found = judged["judges"]["judge"]
    num_judged = 12 - judged["num_broken"]
    assert 0 < num_judged == found["num_episodes"] == found["right_right"] + found["wrong_wrong"] < 12
    shown = rf"without tool +judge +{num_judged} +1.000 +{found['right_right']} +0 +0 +{found['wrong_wrong']}"
    assert re.search(shown, capsys.readouterr().out)
    episodes = [*Recording.open(tmp_path / "judged").episodes()]
    scored = [episode for episode in episodes if episode.end_reason.is_valid]
    assert {episode.verdicts["judge"] for episode in scored} <= {"Score: 8", "Score: 2"}
    assert all(episode.reward == episode.rewards["answer"] for episode in scored)


def test_a_run_trains_on_the_verdict_and_leaves_out_what_the_judge_could_not_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[int] = []

    def fickle(body: dict[str, Any]) -> Mapping[str, Any]:
        asked.append(1)
        return says("Score: 5" if len(asked) <= 2 or len(asked) % 4 else "no")  # the first two are asked before step 0

    with chat_server(fickle) as server:
        judge_file(tmp_path, server.url)
        run = tt.train(
            "calculator",
            reward_funcs=["answer", "judge.yaml"],
            reward_weights=[1.0, 0.5],
            steps=1,
            problems_per_step=2,
            group_size=4,
            eval_size=0,
            name="run",
        )
    row = run.rows[0]
    assert row["reward/judge"] == 0.5 and row["reward"] == pytest.approx(row["reward/answer"] + 0.25)
    ends = [episode.end_reason for episode in Recording.open(run.folder).episodes()]
    assert EndReason.REWARD_ERROR in ends and any(end.is_valid for end in ends)
