"""Claims about environments written for verifiers: one line is enough, and no reward is silently 0."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.contract import EnvFault
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample

#: A package as their Environments Hub has them.
MODULE = '''
PIXEL = "data:image/png;base64," \\
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
import asyncio
import verifiers as vf
from datasets import Dataset

def rows(n=20):
    return Dataset.from_list([{"question": f"{i} + 2?", "answer": str(i + 2), "info": {"i": i}} for i in range(n)])

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def exact(completion, answer, info): return completion[-1].content == answer and info["i"] >= 0
async def length(completion, **kwargs): return len(completion)
def raises(completion): raise ValueError("boom")
def nan(completion): return float("nan")
def text(completion): return "0.5"
def mapping(completion): return {"a": 1.0}
async def hangs(completion): await asyncio.sleep(60)

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 2
        return state
    async def env_response(self, messages, state, **kwargs):
        state["left"] -= 1
        return [{"role": "user", "content": f"wrong, {state['left']} left"}]
    @vf.stop
    async def none_left(self, state):
        return state["left"] <= 0

class AsksModel(Guess):
    async def env_response(self, messages, state, **kwargs):
        return await state["client"].get_response(messages)

class OwnLoop(Guess):
    async def get_prompt_messages(self, state): return state["prompt"]

def load_environment(kind="single", function="exact", weight=0.5):
    rubric = vf.Rubric(funcs=[globals()[function], length], weights=[weight, 0.0])
    if kind == "judge":
        rubric = vf.RubricGroup([rubric, vf.JudgeRubric(judge_client=object())])
    if kind == "group":
        rubric = vf.Rubric(funcs=[lambda completions: [1.0]])
    if kind == "no prompt":
        return vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": None, "answer": "y"}] * 9), rubric=rubric)
    if kind == "image":
        parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        rows_with = [{"prompt": [{"role": "user", "content": parts}], "answer": "y", "info": {"i": 0}}] * 9
        return vf.SingleTurnEnv(dataset=Dataset.from_list(rows_with), rubric=rubric)
    if kind == "tools":
        return vf.ToolEnv(dataset=rows(), rubric=rubric, tools=[add], max_turns=1)
    kinds = {"guess": Guess, "own loop": OwnLoop, "asks": AsksModel}
    return kinds.get(kind, vf.SingleTurnEnv)(dataset=rows(), rubric=rubric)
'''


@pytest.fixture
def their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    vf = pytest.importorskip("verifiers")
    if not hasattr(vf, "Environment"):
        pytest.skip("verifiers has no environments from version 0.4 on")
    (tmp_path / "their_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_package", raising=False)
    return tmp_path


def spec_of(folder: Path, max_turns: int = 3, name: str = "their-package", **kwargs: Any) -> EnvSpec:
    file = folder / "registry.yaml"
    entry = {"verifiers": name, "description": "Theirs.", "max_turns": max_turns, "step_timeout_s": 2}
    file.write_text(json.dumps({"theirs": {**entry, "options": {"kwargs": kwargs}}}))
    return get_spec("theirs", file)


def play(spec: EnvSpec, *texts: str) -> tuple[list[Any], float]:
    """Play turns as the agent loop does; return their results and the reward."""
    sample: Sample = spec.load_dataset("train", 1, 0)[0]

    async def episode() -> tuple[list[Any], float]:
        runner = EnvRunner(lambda: load_env(spec)(sample, spec.args()), EnvLimits.of(spec))
        await runner.open()
        try:
            written = [text.replace("RIGHT", str(sample.label)) for text in texts]
            results = [await runner.step(text) for text in written]
            return results, await runner.reward(written[-1])
        finally:
            assert await runner.close() is None

    return asyncio.run(episode())


def test_the_reward_is_the_weighted_sum_and_its_parts_are_recorded_by_name(their_package: Path) -> None:
    results, reward = play(spec_of(their_package), "RIGHT")
    assert results[0].done and reward == 0.5
    assert results[0].info["rubric"] == {"exact": 1.0, "length": 1.0, "num_turns": 1.0}


def test_their_answers_are_observations_and_their_stop_conditions_end_the_episode(their_package: Path) -> None:
    results, reward = play(spec_of(their_package, kind="guess"), "1", "2")
    assert [result.done for result in results] == [False, True] and reward == 0.0
    assert results[0].messages[0] == {"role": "user", "content": "wrong, 1 left"}


def test_tools_are_theirs_and_their_turn_limit_is_not_ours(their_package: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    results, reward = play(spec_of(their_package, kind="tools"), call, "<tool_call>{", "RIGHT")
    assert [result.done for result in results] == [False, False, True] and reward == 0.5
    assert results[0].messages == ({"role": "tool", "content": "3"},)
    assert results[2].info["rubric"]["add_calls"] == 1.0


@pytest.mark.parametrize("function", ["raises", "nan", "text", "mapping"])
def test_a_reward_function_that_fails_is_a_fault_and_no_reward_of_0(their_package: Path, function: str) -> None:
    with pytest.raises(EnvFault) as caught:
        play(spec_of(their_package, function=function), "RIGHT")
    assert type(caught.value) is EnvFault


def test_a_reward_function_that_hangs_is_a_timeout_and_no_low_reward(their_package: Path) -> None:
    with pytest.raises(EnvFault) as caught:
        play(spec_of(their_package, function="hangs"), "RIGHT")
    assert type(caught.value) is EnvFault and caught.value.timed_out


@pytest.mark.parametrize(("function", "shown"), [("raises", "ValueError: boom"), ("mapping", {"a": 1.0})])
def test_a_metric_may_fail_or_give_several_numbers(their_package: Path, function: str, shown: Any) -> None:
    results, reward = play(spec_of(their_package, function=function, weight=0.0), "RIGHT")
    assert reward == 0.0 and results[0].info["rubric"][function] == shown


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("own loop", "get_prompt_messages of its own"),
        ("judge", "JudgeRubric"),
        ("group", "score every episode by itself"),
        ("no prompt", "prompt: must be a text or messages"),
    ],
)
def test_what_cannot_be_carried_is_refused_before_the_first_step(their_package: Path, kind: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        spec_of(their_package, kind=kind).load_dataset("train", 4, 0)


def test_images_of_rows_are_shown(their_package: Path) -> None:
    spec = spec_of(their_package, kind="image")
    assert [part["type"] for part in spec.load_dataset("train", 1, 0)[0].prompt[0]["content"]] == ["text", "image"]
    assert play(spec, "RIGHT")[1] == 0.5


def test_an_environment_that_asks_for_a_model_is_a_fault(their_package: Path) -> None:
    with pytest.raises(EnvFault, match="asks for a model of its own"):
        play(spec_of(their_package, kind="asks"), "RIGHT")


def test_loading_leaves_the_interrupt_to_us(their_package: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    spec_of(their_package, kind="guess", weight=0.25).load_dataset("train", 1, 0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_no_held_out_row_is_trained_on(their_package: Path) -> None:
    spec = spec_of(their_package)
    trained = {sample.label for sample in spec.load_dataset("train", 40, 0)}
    heldout = {sample.label for sample in spec.load_dataset("heldout", 9, 0)}
    assert len(trained) == 17 and len(heldout) == 3 and not trained & heldout


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"trueturn\[verifiers\]"):
        spec_of(tmp_path, name="nobody-has-this").load_dataset("train", 1, 0)
