"""Claims about `import trueturn`: the same runs as the commands, from scripts and where an event loop runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trueturn as tt
from tests.pages import code_block
from tests.paths import ROOT
from tests.trainer.runs import drawing
from trainer.config.sources import read_config
from trainer.run import run as run_command

#: A quick run: two small steps without evaluation.
QUICK: dict[str, Any] = {
    "steps": 2,
    "problems_per_step": 2,
    "group_size": 4,
    "train_size": 16,
    "eval_size": 0,
    "doctor": "off",
    "tracker": (),
    "save_every": 0,
}
#: What depends on the clock.
TIMED = re.compile(r".*(_s|per_s|time_frac|memory_gib)$|images/.*")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run in an empty folder, without curves."""
    monkeypatch.chdir(tmp_path)
    with drawing(False):
        yield


def numbers(run: tt.Run) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not TIMED.fullmatch(name)} for row in run.rows]


def brevity(trajectory: tt.Trajectory) -> float:
    return -trajectory.num_model_tokens / 256


def test_importing_it_and_naming_everything_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, trueturn as tt; tt.env('geo3k').reset(0); print({'torch', 'transformers'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_command_python_and_a_running_loop_give_the_same_metrics() -> None:
    flags = [f"--{name.replace('_', '-')}={'' if value == () else value}" for name, value in QUICK.items()]
    assert run_command(["--max-turns=3", "--name=command", *flags]) == 0
    direct = tt.train(tt.env("geo3k", max_turns=3), name="direct", **QUICK)

    async def inside() -> tuple[tt.Run, tt.Run]:
        return tt.train("geo3k", max_turns=3, name="blocking", **QUICK), await tt.train_async(
            "geo3k", max_turns=3, name="awaited", **QUICK
        )

    blocking, awaited = asyncio.run(inside())
    assert len(numbers(direct)) == 2 and direct.rows[0]["reward"] > 0
    for run in (direct, blocking, awaited):
        assert numbers(run) == numbers(tt.Run("runs/command"))


def test_rewards_algorithms_and_trackers_may_be_objects() -> None:
    seen: list[float] = []

    class Tracker:
        def __init__(self, run: object) -> None: ...
        def write(self, step: int, row: dict[str, float]) -> None:
            seen.append(row["reward"])

        def close(self) -> None: ...

    run = tt.train(
        "geo3k",
        **{**QUICK, "tracker": [Tracker]},
        reward_funcs=[tt.rewards.answer, brevity, lambda t: float(len(t.turns))],
        reward_weights=[1.0, 0.1, 0.01],
        advantage=lambda groups, config: [[t.reward for t in group.valid] for group in groups],
    )
    for row, reward in zip(run.rows, seen, strict=True):
        # Another test of this process may have named a function without a name first.
        (function,) = [value for name, value in row.items() if name.startswith("reward/function")]
        parts = row["reward/answer"] + 0.1 * row["reward/brevity"] + 0.01 * function
        assert row["reward"] == reward == pytest.approx(parts)


def test_a_callback_follows_the_run_adds_metrics_and_ends_it() -> None:
    class Watch(tt.Callback):
        steps: list[int] = []  # noqa: RUF012 - read by the test

        def on_step_end(self, step: int, row: object) -> object:
            self.steps.append(step)
            return tt.Stop("enough") if step == 2 else {"mine": 3.0}

    run = tt.train("geo3k", **{**QUICK, "steps": 5, "eval_size": 2, "eval_every": 1}, callbacks=[Watch()])
    assert Watch.steps == [1, 2] and run.rows[0]["mine"] == 3.0
    assert "enough" in run.summary["stop_reason"]
    assert [each["step"] for each in run.curve] == [0, 1, 2] and run.best_path.is_dir()


def test_objects_of_one_name_are_told_apart_and_a_new_definition_replaces_the_old(capsys: Any) -> None:
    def make(value: float) -> Callable[[tt.Trajectory], float]:
        def constant(trajectory: tt.Trajectory) -> float:
            return value

        return constant

    (row,) = tt.train("geo3k", **{**QUICK, "steps": 1}, reward_funcs=[make(0.25), make(0.5)]).rows
    assert row["reward"] == 0.75


def test_an_environment_of_a_class_and_rows_plays_by_hand_and_trains() -> None:
    class Adder(tt.ToolEnv):
        """Adds numbers."""

        @tt.tool
        def add(self, a: int, b: int) -> int:
            """Return a sum.

            Args:
                a: a number
                b: another one
            """
            return a + b

    env = tt.env(Adder, data=[{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(16)], max_turns=2)
    env.reset(3)
    observation, done, _ = env.step('<tool_call>{"name": "add", "arguments": {"a": 3, "b": 1}}</tool_call>')
    assert not done and env.messages[-1]["role"] == "tool" and "4" in str(observation)
    env.step(r"\boxed{4}")
    assert env.reward() == 1.0
    assert len(env.problems) == 16 and env.problems[3].label == "4"
    run = tt.train(env, **QUICK)
    assert len(run.rows) == 2 and run.rows[0]["episodes"] == 8
    assert next(run.episodes()).label in {str(n + 1) for n in range(16)}


def test_rollouts_are_trajectories_and_evaluations_reports() -> None:
    rollout = tt.rollout("geo3k", num_problems=3, samples=2)
    assert [(t.group, t.sample_index) for t in rollout] == [(g, s) for g in range(3) for s in range(2)]
    assert all(len(t.ids_T) == len(t.mask_T) == len(t.logprobs_T) and t.images for t in rollout)
    again = tt.rollout("geo3k", num_problems=3, samples=2)
    assert [t.ids_T.tolist() for t in again] == [t.ids_T.tolist() for t in rollout]
    report = tt.evaluate("geo3k", size=3, tools=False)
    assert list(report.ways) == ["without_tool"] and report.num_problems == 3
    assert tt.replay(rollout, model="recorded").differing == []


def test_a_run_is_read_replayed_viewed_and_forked() -> None:
    run = tt.train("geo3k", **{**QUICK, "eval_size": 4})
    assert run.metrics["reward"].tolist() == [row["reward"] for row in run.rows]
    assert run.accuracy.keys() == run.accuracy_before.keys() == {"with_tool", "without_tool"}
    assert (run.model_path / "config.json").is_file()
    assert tt.replay(run, model="recorded").differing == []
    page = tt.view(run, phase="train", limit=3)
    assert page.path.is_file() and "<iframe src=" in page._repr_html_()
    episode = next(e for e in run.recording.episodes() if e.phase == "train" and len(e.turns) == 2)
    first, second = tt.fork(run, episode.id, turn=1, model=run, samples=2)
    start = episode.turns[1].start
    assert first.ids_T[:start].tolist() == second.ids_T[:start].tolist() == list(episode.ids[:start])
    resumed = tt.train(resume=run, steps=2)
    assert resumed.folder == run.folder


def test_cancelling_an_awaited_run_keeps_everything_so_far() -> None:
    async def begin_and_cancel() -> None:
        task = asyncio.create_task(tt.train_async("geo3k", name="cut", **{**QUICK, "steps": 500}))
        while not Path("runs/cut/metrics.jsonl").exists() or not tt.Run("runs/cut").rows:
            assert not task.done()
            await asyncio.sleep(0.05)  # the loop goes on while the run trains
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(begin_and_cancel())
    run = tt.Run("runs/cut")
    assert run.summary["interrupted"] and 1 <= run.summary["steps_done"] < 500 and run.model_path.is_dir()
    assert not [thread for thread in threading.enumerate() if thread.name == "trueturn"]


@pytest.mark.alone
@pytest.mark.usefixtures("ctrl_c")
def test_the_stop_button_of_a_notebook_ends_the_run_and_the_call_returns_it() -> None:
    def stop() -> None:
        while not Path("runs/cut/metrics.jsonl").exists() or not tt.Run("runs/cut").rows:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> tt.Run:
        return tt.train("geo3k", name="cut", **{**QUICK, "steps": 60})

    threading.Thread(target=stop).start()
    loop = asyncio.new_event_loop()  # as a notebook has: a loop that takes no Ctrl-C for itself
    try:
        run = loop.run_until_complete(cell())
    finally:
        loop.close()
    assert run.summary["interrupted"] and 1 <= run.summary["steps_done"] < 60


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"stepz": 3}, "stepz=: is no setting of this call, got 3; did you mean 'steps'?"),
        ({"num_generations": 3}, "num_generations of TRL"),
        ({"steps": -1}, "steps=: must be greater than or equal to 0, got -1"),
        (
            {"advantage": "nope"},
            "advantage=: must be 'grpo', 'rloo', 'reinforce++', 'turn' or 'gigpo', or module:NAME",
        ),
        (
            {"reward_funcs": [3]},
            "reward_funcs=: must be Sequence[RewardFunction | str] | RewardFunction | str",
        ),
        ({"reward_weights": [1]}, "reward_weights=: must have a weight for each of 0"),
        ({"reward_funcs": brevity, "reward": "answer"}, "reward=: must not be given beside reward_funcs"),
        ({"max_turns": 0}, "max_turns=: must be greater than or equal to 1, got 0; see help(tt.train) (maximum"),
        ({"samples": 2}, "samples=: is no setting of this call, got 2"),
        (
            {"context_length": 40},
            "max_prompt_tokens=: must leave room to answer, got 1024; give less than the context_length",
        ),
        ({"reward_funcs": [brevity], "reward_weights": [1, 2]}, "reward_weights=: must have a weight for each of 1"),
        ({"config": "no.yaml"}, "config=: must be a YAML file or the name of a ready configuration"),
        ({"data": [3]}, "data: must hold dicts, got int"),
        ({"data": 3}, "data=: "),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_the_keyword(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(tt.UserError) as caught:
        tt.train("geo3k", **settings)
    assert told in str(caught.value)
    assert "--" not in str(caught.value)


def test_an_environment_of_code_that_is_gone_says_so() -> None:
    run = tt.train("geo3k", **{**QUICK, "steps": 1}, advantage=lambda groups, config: [[0.0] * 4 for _ in groups])
    found = subprocess.run(
        [sys.executable, "-m", "trainer.run", "--resume", str(run.folder), "--steps", "2"],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(run.folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert "was given as an object of Python code that does not run here" in found.stderr


def test_settings_may_begin_with_a_configuration_of_their_own() -> None:
    config = tt.TrainConfig(lr=1e-6, group_size=4, steps=7)
    assert (config.optim.lr, config.rollout.group_size, config.steps) == (1e-6, 4, 7)
    with pytest.raises(tt.UserError, match="lrr=: is no setting"):
        tt.TrainConfig(lrr=1)
    run = tt.train("geo3k", config=config, **{**QUICK, "steps": 1})
    assert read_config(run.folder / "config.yaml").optim.lr == 1e-6 and len(run.rows) == 1


PUBLIC = [name for name in tt.__all__ if inspect.isfunction(getattr(tt, name)) and name != "tool"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_function_says_what_it_takes_and_shows_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(tt, name)) or ""
    assert "Example::" in text
    if not name.endswith("_async"):
        assert "Raises:" in text
    signature = inspect.signature(getattr(tt, name))
    assert signature.return_annotation is not inspect.Signature.empty
    if "Args:" in text:
        assert all(f"    {each}:" in text for each in signature.parameters)


@pytest.mark.slow
def test_the_examples_of_the_docstrings_run() -> None:
    names: dict[str, Any] = {"tt": tt, "env": tt.env("geo3k"), "brevity": brevity, "run": tt.train("geo3k", **QUICK)}
    for name in [*PUBLIC, "Run", "TrainConfig"]:
        example = (inspect.getdoc(getattr(tt, name)) or "").partition("Example::\n")[2]
        lines = [line for line in example.splitlines() if line.startswith("    ") or not line]
        code = inspect.cleandoc("\n".join(lines)).partition("\n\nshop =")[0]
        compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(compiled, names)
        if inspect.iscoroutine(result):
            asyncio.run(result)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["tt.evaluate(env", "class Shop", "class StopWhenGood"])
def test_the_code_of_the_page_runs(word: str) -> None:
    exec(code_block((ROOT / "docs/python.md").read_text(), "python", word), {"__name__": "__main__"})


def test_calls_at_the_same_time_take_turns() -> None:
    async def both() -> list[tt.Rollout]:
        calls = [tt.rollout_async("geo3k", num_problems=2, out=name) for name in ("one", "other")]
        return list(await asyncio.gather(*calls))

    one, other = asyncio.run(both())
    assert [t.ids_T.tolist() for t in one] == [t.ids_T.tolist() for t in other]


def test_an_environment_in_a_process_must_stand_in_a_file() -> None:
    with pytest.raises(tt.UserError, match="was given as an object of Python code that does not run here"):
        tt.train(tt.env(type("Odd", (tt.ToolEnv,), {}), data=[{"problem": "?", "answer": "1"}], isolation="process"))
