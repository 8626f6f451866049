"""Claims about arguments of the Python API: it takes what the docstrings promise, and says in Python what is wrong."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trueturn as tt
from agents.recording import Recording
from envs.history import History
from envs.registry import get_spec
from tests.keywords import FILE, module
from tests.paths import ROOT
from trueturn.environment import ENTRY_KEYS

#: A run without a step.
NONE: dict[str, Any] = {"steps": 0, "eval_size": 0, "doctor": "off", "tracker": (), "save_every": 0}
ROWS = [{"problem": "What is 1 + 1?", "answer": "2"}]


class Adder(tt.ToolEnv):
    """Adds numbers."""

    @tt.tool
    def add(self, a: int) -> int:
        """Add one.

        Args:
            a: a number
        """
        return a + 1


def samples(split: str, size: int, seed: int, start: int = 0) -> list[tt.Sample]:
    numbers = range(start, start + size)
    return [tt.Sample(f"{split}-{n}", ({"role": "user", "content": f"{n}?"},), label=str(n)) for n in numbers]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, with one of its own for what is temporary."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tt.Run:
    folder = tmp_path_factory.mktemp("runs")
    quick = {**NONE, "steps": 1, "problems_per_step": 2, "group_size": 2}
    return tt.train(tt.env(Adder, data=ROWS * 4, max_turns=2), out=folder, **quick)


def public_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in tt.__all__:
        if inspect.isfunction(found := getattr(tt, name)) and name != "tool":
            yield name, found
    yield "rewards.answer", tt.rewards.answer
    yield "Run", tt.Run
    yield "Environment.reset", lambda problem: tt.env(Adder, data=ROWS).reset(problem)
    yield "Environment.step", lambda response_text: tt.env(Adder, data=ROWS).step(response_text)


def arguments() -> list[Any]:
    """Return each call with each of its arguments."""
    return [
        pytest.param(function, name, id=f"{call} {name}")
        for call, function in public_calls()
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize(("function", "name"), arguments())
def test_an_argument_of_a_wrong_type_is_an_error_that_names_it(function: Callable[..., Any], name: str) -> None:
    parameters = inspect.signature(function).parameters
    sound = {"recorded": "runs/none", "episode": "train-0-0", "turn": 0, "model": "starter"}
    needed = {name: value for name, value in sound.items() if name in parameters}
    for value in [object(), {"a": 1}, b"bytes"] + [None] * (parameters[name].default is not None):
        given = {**needed, name: value}
        in_order = [given.pop(name)] if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL else []
        with pytest.raises(tt.UserError) as caught:
            result = function(*in_order, **given)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        assert str(caught.value).startswith(f"{name}=: must be ") and "--" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["price", 3, {"name": "price"}])
def test_what_is_marked_as_a_tool_must_be_a_method(wrong: Any) -> None:
    with pytest.raises(tt.UserError, match="@tool: must stand over a method"):
        tt.tool(wrong)


ENTRY = {
    "id": "sums",
    "version": "7",
    "description": "Counts.",
    "dataset": samples,
    "dataset_options": {"start": 5},
    "options": {"level": 2},
    "tool_calls": "last",
    "on_tool_fault": "drop",
    "retries": 3,
    "retry_backoff_s": 0.5,
    "workers": "ray",
    "worker_resources": {"num_cpus": 2},
    "memory_limit_gib": 1.5,
    "compat": None,
    "tools": "required",
    "history": {"keep_images": 4},
}


def test_an_environment_of_code_takes_every_key_of_a_registry_entry() -> None:
    assert ENTRY.keys() == ENTRY_KEYS
    env = tt.env(Adder, **ENTRY, isolation="process", max_turns=4)
    for name, value in ENTRY.items():
        assert getattr(env.spec, name) == value or name in ("dataset", "history")
    assert env.spec.history == History(keep_images=4)
    assert (env.spec.max_turns, env.spec.isolation, env.problems[0].label) == (4, "process", "5")
    assert get_spec("sums").version == "7"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"retries": "2"}, "retries: must be a valid integer, got the text '2'"),
        ({"memory_limit_gib": 1}, "memory_limit_gib needs isolation: process, got thread"),
        ({"tool_calls": "all"}, "tool_calls: must be one of last, sequential"),
        ({"entry_point": "x:y"}, "entry_point=: is no setting of this call"),
        ({"id": 3}, "must have a text as its id"),
        ({"steppp": 3}, "steppp=: is no setting of this call"),
    ],
)
def test_a_wrong_key_of_an_entry_is_an_error_that_names_it(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(tt.UserError, match=re.escape(told)):
        tt.env(Adder, data=ROWS, **settings)


@pytest.mark.parametrize("source", [int, len, object])
def test_what_is_no_environment_is_refused_at_once(source: Any) -> None:
    with pytest.raises(tt.UserError, match="entry_point"):
        tt.env(source, data=ROWS)


def test_two_environments_of_one_name_each_play_with_their_own_settings() -> None:
    first = tt.env(Adder, dataset=samples, version="1")
    tt.env(Adder, dataset=samples, version="2")
    rollout = tt.rollout(first, num_problems=1, max_new_tokens=8)
    assert Recording.open(rollout.folder).manifest.env.version == "1"


def test_a_problem_that_there_is_not_is_an_error_and_tools_are_known_before_an_episode() -> None:
    env = tt.env(Adder, data=ROWS * 3)
    assert [tool["function"]["name"] for tool in env.tools] == ["add"]
    with pytest.raises(tt.UserError, match="must be reset before it is played"):
        env.step("2")
    for number in (3, -4):
        with pytest.raises(tt.UserError, match=rf"problem=: must be from 0 to 2, got {number}"):
            env.reset(number)
    env.reset(-1)
    env.step("2")


def test_a_single_reward_function_and_a_single_callback_are_enough() -> None:
    def brevity(trajectory: tt.Trajectory) -> float:
        return -trajectory.num_model_tokens / 256

    class Watch(tt.Callback):
        started = 0

        def on_begin(self, run: tt.RunStart) -> None:
            Watch.started += 1

    quick = {**NONE, "steps": 1, "problems_per_step": 2, "group_size": 2}
    run = tt.train(tt.env(Adder, data=ROWS * 4), reward_funcs=brevity, callbacks=Watch, **quick)
    assert run.rows[0]["reward"] == pytest.approx(run.rows[0]["reward/brevity"])
    assert Watch.started == 1


def test_without_an_environment_a_resumed_run_keeps_its_own(run: tt.Run) -> None:
    with pytest.raises(tt.UserError, match=r"env=: must be .*, got None"):
        tt.train(None, resume=run)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tt.UserError, match=r"seed=: must stay as in the run.*leave it out of keywords"):
        tt.train(resume=run, seed=3)


def test_a_recording_is_replayed_and_continued_in_an_environment_of_code(run: tt.Run) -> None:
    env = tt.env(Adder, data=ROWS, id="other", max_turns=2)
    assert tt.replay(run, env=env).differing == []
    assert tt.replay(run, env=Adder).num_replayed == tt.replay(run).num_replayed == 4
    (again,) = tt.fork(run, "train-0-0", turn=0, model="starter", env=env)
    assert again.label == "2"

    class Wrong(Adder):
        def reward(self, final_text: str) -> float:
            return 0.5

    assert len(tt.replay(run, env=Wrong).differing) == 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"episode": "train-99-99", "turn": 0}, "episode=: must select one episode to continue, got none; name one"),
        ({"episode": "train-*", "turn": 0}, "episode=: must select one episode"),
        ({"episode": "train-0-0", "turn": 9}, "turn=: must be at most"),
        ({"episode": "train-0-0", "turn": 0, "by": "hand"}, "by=: is no setting of this call, got hand; leave it out"),
        ({"episode": "train-0-0", "turn": 0, "id": "x"}, "id=: is no setting of this call, got x; give episode="),
        ({"episode": "train-0-0", "turn": 0, "samples": 2, "temperature": 0}, "samples=: must be 1 at temperature 0"),
    ],
)
def test_an_error_of_a_fork_names_its_arguments(run: tt.Run, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(tt.UserError) as caught:
        tt.fork(run, model="starter", **arguments)
    assert told in str(caught.value) and "--" not in str(caught.value)


def test_what_a_call_names_otherwise_is_refused_under_the_name_of_the_command(run: tt.Run) -> None:
    for call, told in (
        (lambda: tt.rollout("geo3k", size=3), "size=: is no setting of this call, got 3; give num_problems="),
        (lambda: tt.rollout("geo3k", num_problems=0), "num_problems=: must be greater than or equal to 1, got 0"),
        (lambda: tt.replay(run, report="x.json"), "report=: is no setting of this call, got x.json; leave it out"),
        (lambda: tt.view(), "recorded=: must be one run, or two to compare, got 0"),
    ):
        with pytest.raises(tt.UserError) as caught:
            call()
        assert told in str(caught.value)


def test_rollouts_and_evaluations_leave_a_folder_only_where_one_was_named(here: Path) -> None:
    rollout = tt.rollout("geo3k", num_problems=1, max_new_tokens=8)
    report = tt.evaluate("geo3k", size=1, tools=False, max_new_tokens=8)
    assert len(tt.view(rollout).path.read_bytes()) > 1000 and report.num_problems == 1
    with pytest.raises(tt.UserError):
        tt.rollout("geo3k", model="no/such/model")
    kept = tt.rollout("geo3k", num_problems=1, max_new_tokens=8, name="kept")
    del rollout, report
    gc.collect()
    (page,) = (here / "temporary").glob("trueturn-*")
    assert [path.name for path in page.iterdir()] == ["episodes.html"]
    assert [path.name for path in (here / "runs").iterdir()] == [kept.folder.name] == ["kept"]


def test_the_settings_that_editors_know_are_those_of_the_configuration() -> None:
    assert FILE.read_text(encoding="utf-8") == module(), "write it anew: python -m tests.keywords"


CALLS = """
import trueturn as tt

class Shop(tt.ToolEnv): ...
def good(trajectory: tt.Trajectory) -> float: return 1.0
def sums(split: str, size: int, seed: int) -> list[tt.Sample]: return []

shop = tt.env(Shop, dataset=sums, retries=2, data=[{"problem": "?", "answer": "1"}])
run = tt.train(shop, steps=3, lr=1e-5, reward_funcs=good, callbacks=tt.Callback(), advantage="grpo")
tt.train(resume=run, config=tt.TrainConfig(group_size=4), reward_funcs=[good, "answer"])
tt.rollout(shop, model=run, samples=2, tools="off")
tt.evaluate(Shop, size=3, ks=[1, 2], tools=False)
tt.replay(run, env=shop, limit=3)
tt.fork(run, "train-0-0", 1, run, env=Shop, temperature=0.5)
tt.view(run, max_reward=0, step=3)
"""
WRONG = """
import trueturn as tt
tt.train("geo3k", stepz=3)
tt.evaluate("geo3k", temperature=1)
tt.replay("runs/x", report="y")
"""


@pytest.mark.slow
def test_a_type_checker_knows_every_setting(here: Path) -> None:
    for text, wrong in ((CALLS, []), (WRONG, [3, 4, 5])):
        (here / "calls.py").write_text(text, encoding="utf-8")
        (here / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"]}}', encoding="utf-8")
        command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "calls.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        lines = [int(line) for line in re.findall(r"calls\.py:(\d+):\d+ - error", done.stdout)]
        assert list(dict.fromkeys(lines)) == wrong, done.stdout + done.stderr
