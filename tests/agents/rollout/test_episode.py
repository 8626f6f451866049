"""Claims about the agent loop: every way an episode can end, and the exact stream that each leaves behind."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agents.engines.base import Engine
from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Rendered, Renderer
from agents.rollout.episode import ABORT, Episode, Limits
from agents.rollout.groups import derive_seed
from agents.rollout.manager import rollout_groups
from agents.types import Completion, EndReason, GenerateRequest, RouteShape, Trajectory
from envs.contract import EnvFault
from envs.env import Env, EnvArgs
from envs.spec import EnvLimits
from envs.types import Message, Sample
from tests.builders import sampling, versions_of
from tests.prompts import make_image, sample

Step = tuple[dict[str, Any], bool, dict[str, Any]]
AGAIN: Step = ({"obs_str": "again"}, False, {"score": 0.0})
DONE: Step = ({}, True, {})


class SmallEnv(Env):
    """Answers turn k with `steps[k]` (the last one for ever); `faults` replace whole methods."""

    def __init__(self, *steps: Step, worth: float = 1.0, **faults: Callable) -> None:
        self.steps, self.worth, self.num_closed = steps or (DONE,), worth, 0
        self.texts: list[str] = []
        for name, function in faults.items():
            setattr(self, name, function)

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> Step:
        self.texts.append(response_text)
        return self.steps[min(len(self.texts), len(self.steps)) - 1]

    def reward(self, final_text: str) -> float:
        return self.worth

    def close(self) -> None:
        self.num_closed += 1


SHAPE = RouteShape(num_layers=2, num_experts=8, top_k=2)


class RoutingEngine(ScriptedEngine):
    """Sends the token at place t to the experts t % 7 and 7 of each layer, and notes how many were known before."""

    def __init__(self, *args: Any, spoil: Callable[[np.ndarray], Any] = lambda rows: rows) -> None:
        super().__init__(*args)
        self.spoil = spoil
        self.asked: list[int | None] = []

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RoutingEngine]:
        async with super().session() as self.inner:
            yield self

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request.num_routed)
        completion = await self.inner.generate(request)
        if request.num_routed is None:
            return completion
        return replace(
            completion,
            routes_RLK=self.spoil(routes_of(len(request.ids) + len(completion.ids) - 1)[request.num_routed :]),
        )


def routes_of(num_tokens: int) -> np.ndarray:
    places = np.arange(num_tokens, dtype=np.uint8)[:, None] % 7
    rows = np.stack([places, np.full_like(places, 7)], -1)
    return rows.repeat(SHAPE.num_layers, axis=1)


class FixedEngine:
    """Answers turn k of every session with `completions[k]`, prompt length and versions filled in unless given, and
    notes the requests."""

    context_length = 4096

    def __init__(self, *completions: tuple[Sequence[int], Sequence[float], str], **given: Any) -> None:
        self.completions, self.given = completions, given
        self.requests: list[GenerateRequest] = []

    @asynccontextmanager
    async def session(self) -> AsyncIterator[FixedEngine]:
        yield self

    async def generate(self, request: GenerateRequest) -> Completion:
        ids, logprobs, finish = self.completions[len(self.requests)]
        self.requests.append(request)
        filled = {"prompt_length": len(request.ids), "versions": ((3, len(ids)),), **self.given}
        return Completion(tuple(ids), tuple(logprobs), finish, **filled)  # type: ignore[arg-type]


def episode(renderer: Renderer, engine: Engine, limits: Limits, **options: Any) -> Episode:
    return Episode(engine, renderer, limits, sampling(renderer), **options)


def run(
    renderer: Renderer,
    env: SmallEnv,
    texts: Sequence[str] = ("one", "two", "three"),
    engine: Engine | None = None,
    asked: Sample | None = None,
    context_length: int = 4096,
    bounds: EnvLimits | None = None,
    **limits: int,
) -> Trajectory:
    """Play one episode in which the model writes `texts`."""
    engine = engine or ScriptedEngine(renderer.tokenizer, lambda turn, _: texts[turn], context_length)
    playing = episode(renderer, engine, Limits(**limits, env=bounds or EnvLimits())).run(
        asked or sample(), lambda: env, seed=7
    )  # type: ignore[arg-type]
    trajectory = asyncio.run(playing)
    assert env.num_closed == 1
    return trajectory


def names(renderer: Renderer, trajectory: Trajectory) -> str:
    return renderer.tokenizer.decode(trajectory.ids_T)


def raises(error: BaseException) -> Callable:
    def method(*_: object) -> object:
        raise error

    return method


def test_the_stream_is_prompt_then_sampled_ids_then_suffix_with_mask_and_logprobs_in_place(renderer: Renderer) -> None:
    stop = renderer.stop_ids[-1]
    engine = FixedEngine(([31, 32, stop], [-0.1, -0.2, -0.3], "stop"), ([33, stop], [-0.4, -0.5], "stop"))
    env = SmallEnv(AGAIN, DONE, worth=0.5)
    trajectory = run(renderer, env, engine=engine)
    prompt = renderer.prompt(sample().prompt).ids
    suffix = renderer.suffix([{"role": "tool", "content": "again"}], stop).ids
    p, s = len(prompt), len(suffix)
    assert trajectory.ids_T.tolist() == [*prompt, 31, 32, stop, *suffix, 33, stop]
    assert trajectory.mask_T.tolist() == [False] * p + [True] * 3 + [False] * s + [True] * 2
    assert trajectory.logprobs_T.tolist() == pytest.approx([0.0] * p + [-0.1, -0.2, -0.3] + [0.0] * s + [-0.4, -0.5])
    assert [(t.start, t.end) for t in trajectory.turns] == [(p, p + 3), (p + 3 + s, p + 5 + s)]
    assert [t.text for t in trajectory.turns] == [renderer.decode([31, 32]), renderer.decode([33])] == env.texts
    assert versions_of(trajectory)[trajectory.mask_T].tolist() == [3] * trajectory.num_model_tokens
    assert (trajectory.prompt_length, trajectory.num_model_tokens) == (p, 5)
    assert (trajectory.end_reason, trajectory.reward, trajectory.error) == (EndReason.COMPLETED, 0.5, None)
    # The engine was asked with exactly what is in the record, each turn with a seed of its own.
    assert [r.ids for r in engine.requests] == [prompt, (*prompt, 31, 32, stop, *suffix)]
    assert [r.max_new_tokens for r in engine.requests] == [256, 256 - 3 - s]
    assert [r.seed for r in engine.requests] == [7000, 7001]


def test_messages_record_the_conversation_and_turns_what_the_environment_said(renderer: Renderer) -> None:
    asked = sample()
    trajectory = run(renderer, SmallEnv(AGAIN, DONE), asked=asked)
    tool = {"role": "tool", "content": "again"}
    assert trajectory.messages == (
        *asked.prompt,
        {"role": "assistant", "content": "one"},
        tool,
        {"role": "assistant", "content": "two"},
    )
    assert [t.observations for t in trajectory.turns] == [(tool,), ()]
    assert [t.info for t in trajectory.turns] == [{"score": 0.0}, {}]


def test_a_first_observation_follows_the_prompt(renderer: Renderer) -> None:
    env = SmallEnv(reset=lambda: ({"role": "user", "obs_str": "It is noon."}, {}))
    trajectory = run(renderer, env)
    expected = renderer.prompt([*sample().prompt, {"role": "user", "content": "It is noon."}]).ids
    assert trajectory.ids_T[: trajectory.prompt_length].tolist() == list(expected)


def test_an_observation_with_an_image_adds_its_placeholders_and_pixels(renderer: Renderer) -> None:
    shown = {
        "role": "tool",
        "content": [{"type": "image", "image": make_image(96, 64, 5)}, {"type": "text", "text": "2x"}],
    }
    env = SmallEnv(AGAIN, DONE, format_observation=lambda _: shown)
    trajectory = run(renderer, env, asked=sample("x?", make_image(64, 64, 6)))
    assert [i.grid_thw for i in trajectory.images] == [(1, 4, 4), (1, 4, 6)]
    first, second = trajectory.turns
    between = trajectory.ids_T[first.end : second.start]
    assert (between == renderer.image_token_id).sum() == 6
    assert (trajectory.ids_T == renderer.image_token_id).sum() == 4 + 6
    assert trajectory.end_reason is EndReason.COMPLETED


def test_an_episode_whose_environment_never_ends_it_ends_with_its_turns(renderer: Renderer) -> None:
    env = SmallEnv(AGAIN, worth=0.25)
    trajectory = run(renderer, env, max_turns=2)
    assert (trajectory.end_reason, trajectory.reward, env.texts) == (EndReason.MAX_TURNS, 0.25, ["one", "two"])
    assert trajectory.mask_T[-1]  # the last observation is in the record, not in the stream
    assert trajectory.turns[-1].observations == ({"role": "tool", "content": "again"},)
    assert trajectory.messages[-1] == {"role": "assistant", "content": "two"}


def test_an_environment_that_ends_on_the_last_turn_has_completed(renderer: Renderer) -> None:
    assert run(renderer, SmallEnv(AGAIN, DONE), max_turns=2).end_reason is EndReason.COMPLETED


def test_a_turn_cut_by_the_budget_ends_the_episode_and_is_no_step(renderer: Renderer) -> None:
    env = SmallEnv(AGAIN)
    trajectory = run(renderer, env, texts=["word " * 50], max_new_tokens=20)
    assert trajectory.end_reason is EndReason.TOKEN_BUDGET
    assert (trajectory.num_model_tokens, trajectory.turns[0].finish, env.texts) == (20, "length", [])
    assert trajectory.reward == 1.0


def test_environment_tokens_count_in_the_budget(renderer: Renderer) -> None:
    env = SmallEnv(({"obs_str": "again " * 30}, False, {}))
    trajectory = run(renderer, env, max_new_tokens=20)
    assert (trajectory.end_reason, len(trajectory.turns)) == (EndReason.TOKEN_BUDGET, 1)


def test_a_turn_cut_by_the_context_ends_the_episode(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(sample().prompt).ids)
    trajectory = run(renderer, SmallEnv(), texts=["word " * 50], context_length=prompt + 9)
    assert (trajectory.end_reason, trajectory.num_model_tokens) == (EndReason.CONTEXT_FULL, 9)


def test_a_prompt_that_fills_the_context_is_an_episode_without_turns(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(sample().prompt).ids)
    trajectory = run(renderer, SmallEnv(), context_length=prompt)
    assert (trajectory.end_reason, trajectory.turns) == (EndReason.CONTEXT_FULL, ())


def test_an_aborted_completion_ends_the_episode_as_invalid_data(renderer: Renderer) -> None:
    env = SmallEnv(AGAIN)
    trajectory = run(renderer, env, engine=FixedEngine(([31, 32], [-0.1, -0.2], "abort")))
    assert (trajectory.end_reason, env.texts) == (EndReason.ABORTED, [])
    assert not trajectory.end_reason.is_valid


def test_an_abort_before_the_first_token_is_an_abort(renderer: Renderer) -> None:
    trajectory = run(renderer, SmallEnv(), engine=FixedEngine(([], [], "abort")))
    assert (trajectory.end_reason, trajectory.num_model_tokens) == (EndReason.ABORTED, 0)


def test_a_sampled_image_token_makes_the_stream_invalid(renderer: Renderer) -> None:
    stop = renderer.stop_ids[-1]
    engine = FixedEngine(([31, renderer.image_token_id, stop], [-0.1] * 3, "stop"))
    trajectory = run(renderer, SmallEnv(), engine=engine)
    assert trajectory.end_reason is EndReason.INVALID_STREAM
    at = trajectory.prompt_length + 1
    shown = f"[{renderer.image_token_id} '<|image_pad|>'] at [{at}]"
    assert trajectory.error == f"turn 1: the model sampled suppressed ids: {shown}"


def test_a_sampled_vision_token_makes_the_stream_invalid(renderer: Renderer) -> None:
    token = renderer.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    trajectory = run(renderer, SmallEnv(), engine=FixedEngine(([token, renderer.stop_ids[-1]], [-0.1] * 2, "stop")))
    assert trajectory.end_reason is EndReason.INVALID_STREAM
    assert f"turn 1: the model sampled suppressed ids: [{token} '<|vision_start|>']" in (trajectory.error or "")


#: What an engine answers to a prompt of P tokens, of what kind, and what is said of it.
BROKEN_ANSWERS: dict[str, tuple[tuple, dict[str, Any], str]] = {
    "read another stream": (
        ([31, 32], [-0.1] * 2), {"prompt_length": 7}, "turn 1: the engine read 7 tokens, the stream has {P}"
    ),
    "wrote too many tokens": (([31] * 41, [-0.1] * 41), {}, "turn 1: the engine wrote 41 tokens, asked for 40 at most"),
    "wrote nothing": (([], []), {}, "turn 1: the engine wrote no token and ended with 'length'"),
    "wrote no tokens": (([31, -1], [-0.1] * 2), {}, "turn 1: the engine wrote ids from -1 to 31"),
    "too few log-probs": (([31, 32], [-0.1]), {}, "turn 1: 1 log-probs for 2 tokens"),
    "no log-probs": (([31, 32], []), {}, "turn 1: 0 log-probs for 2 tokens"),
    "too many log-probs": (([31, 32], [-0.1] * 3), {}, "turn 1: 3 log-probs for 2 tokens"),
    "versions do not add up": (
        ([31, 32], [-0.1] * 2),
        {"versions": ((3, 1), (4, 2))},
        "turn 1: versions ((3, 1), (4, 2)) do not add up to the 2 tokens of the turn",
    ),
    "a log-prob is no number": (
        ([31, 32], [-0.1, float("nan")]), {}, "turn 1: log-probs must be finite and at most 0, got nan at {P+1}"
    ),
    "a log-prob is missing": (
        ([31, 32], [None, -0.1]), {}, "turn 1: log-probs must be finite and at most 0, got nan at {P}"
    ),
    "a log-prob is infinite": (
        ([31, 32], [float("-inf"), -0.1]), {}, "turn 1: log-probs must be finite and at most 0, got -inf at {P}"
    ),
    "a log-prob is positive": (
        ([31, 32], [0.5, -0.1]), {}, "turn 1: log-probs must be finite and at most 0, got 0.5 at {P}"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "given", "rule"), BROKEN_ANSWERS.values(), ids=BROKEN_ANSWERS.keys())
def test_a_broken_answer_of_the_engine_is_a_recorded_turn_that_does_not_train(
    renderer: Renderer, answer: tuple, given: dict[str, Any], rule: str
) -> None:
    env = SmallEnv(AGAIN)
    trajectory = run(renderer, env, engine=FixedEngine((*answer, "length"), **given), max_turns=1, max_new_tokens=40)
    start = trajectory.prompt_length
    assert trajectory.end_reason is EndReason.INVALID_STREAM and not trajectory.end_reason.is_valid
    assert trajectory.error == rule.replace("{P}", str(start)).replace("{P+1}", str(start + 1))
    (turn,) = trajectory.turns
    assert trajectory.ids_T.tolist()[turn.start :] == list(answer[0]) and turn.start == start
    assert len(trajectory.ids_T) == len(trajectory.mask_T) == len(trajectory.logprobs_T) == len(versions_of(trajectory))


def test_a_broken_answer_ends_the_episode_before_the_environment_sees_it(renderer: Renderer) -> None:
    env = SmallEnv(AGAIN)
    trajectory = run(renderer, env, engine=FixedEngine(([31, 32], [-0.1], "stop")))
    assert (env.texts, trajectory.turns[0].observations, trajectory.reward) == ([], (), 0.0)
    assert trajectory.turns[0].text == trajectory.messages[-1]["content"] == renderer.decode([31, 32])


@pytest.mark.parametrize(
    ("finish", "rule"),
    [("eos", "ended with 'eos', which is none of stop, length, abort"), ("stop", "stopped at id 32, the stop ids are")],
)
def test_a_turn_that_ends_in_no_known_way_does_not_train(renderer: Renderer, finish: str, rule: str) -> None:
    env = SmallEnv(DONE)
    trajectory = run(renderer, env, engine=FixedEngine(([31, 32], [-0.1] * 2, finish)))
    assert trajectory.end_reason is EndReason.INVALID_STREAM and env.texts == []
    assert f"turn 1: the engine {rule}" in (trajectory.error or "")


@pytest.mark.parametrize("answer", [None, Completion([31], (-0.1,), "length", 1, ((0, 1),))])  # type: ignore[arg-type]
def test_what_is_no_completion_ends_the_run(renderer: Renderer, answer: Any) -> None:
    class Answers(FixedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            return answer

    with pytest.raises(TypeError, match=r"must return a Completion, got NoneType|can only concatenate tuple"):
        run(renderer, SmallEnv(), engine=Answers())


def test_a_fault_of_the_environment_is_told_beside_a_broken_stream(renderer: Renderer) -> None:
    env = SmallEnv(step=raises(ValueError("boom")))
    trajectory = run(renderer, env, engine=FixedEngine(([31, renderer.closer_id], [0.5, -0.1], "stop")))
    assert trajectory.end_reason is EndReason.INVALID_STREAM
    first, *_, last = (trajectory.error or "").splitlines()
    assert first.startswith("the environment raised") and last.startswith("turn 1: log-probs must be")


def spoilt(renderer: Renderer) -> Renderer:
    """Return a renderer that leaves out the first token after a turn, as one without the line break there would."""
    spoilt = copy.copy(renderer)

    def suffix(messages: Sequence[Message], last_id: int, has_tools: bool = False) -> Rendered:
        right = renderer.suffix(messages, last_id, has_tools)
        return Rendered(right.ids[1:], right.images)

    spoilt.suffix = suffix  # type: ignore[method-assign]
    return spoilt


def test_a_stream_that_the_template_does_not_write_is_invalid_and_says_where(renderer: Renderer) -> None:
    trajectory = run(spoilt(renderer), SmallEnv(AGAIN, DONE), texts=["one", "two"])
    assert trajectory.end_reason is EndReason.INVALID_STREAM
    assert "before turn 2: the stream has [" in (trajectory.error or "")
    assert f" at {trajectory.turns[0].end}, the template writes [" in (trajectory.error or "")
    assert run(renderer, SmallEnv(AGAIN, DONE), texts=["one", "two"]).error is None


@pytest.mark.parametrize(("every", "checked"), [(1, [0, 1, 2, 3, 4, 5]), (3, [0, 3]), (128, [0]), (0, [])])
def test_the_template_is_compared_in_the_first_episode_and_every_so_many(
    renderer: Renderer, every: int, checked: list[int]
) -> None:
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")
    playing = episode(spoilt(renderer), engine, Limits(check_template_every=every))

    async def story() -> list[Trajectory]:
        return [await playing.run(sample(), lambda: SmallEnv(AGAIN, DONE), seed=k) for k in range(6)]

    ends = [t.end_reason for t in asyncio.run(story())]
    assert [k for k, end in enumerate(ends) if end is EndReason.INVALID_STREAM] == checked


def test_a_template_that_cannot_be_compared_with_is_no_crash(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.rollout.template_check._first_mismatch", raises(ValueError("no such role")))
    trajectory = run(renderer, SmallEnv())
    assert trajectory.end_reason is EndReason.INVALID_STREAM
    assert "cannot be rendered: ValueError: no such role" in (trajectory.error or "")


class SlowEngine(FixedEngine):
    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(0.2)
        return await super().generate(request)


@pytest.mark.alone
@pytest.mark.parametrize("inline", [True, False], ids=["in place", "on a thread"])
def test_timing_tells_engine_environment_and_checks_apart(renderer: Renderer, inline: bool) -> None:
    def slow(value: Any) -> Callable:
        return lambda *_: time.sleep(0.4) or value

    engine = SlowEngine(([31, renderer.stop_ids[-1]], [-0.1] * 2, "stop"))
    env = SmallEnv(reset=slow(({}, {})), step=slow(DONE), reward=slow(1.0))
    trajectory = run(renderer, env, engine=engine, bounds=EnvLimits(inline=inline))
    timing = trajectory.timing
    assert 0.2 <= timing.engine_s == trajectory.turns[0].engine_s < 0.4
    assert 1.2 <= timing.env_s < 2.0  # reset, step and reward
    assert 0.4 <= trajectory.turns[0].env_s < 1.0
    assert 0 < timing.check_s < 0.4
    assert timing.engine_s + timing.env_s + timing.check_s < timing.total_s < 3.0


FAULTS = {
    "reset raises": ({"reset": raises(ValueError("boom"))}, "boom", 0),
    "reset returns None": ({"reset": lambda: None}, "reset must return (dict, dict), got None", 0),
    "reset returns a string": ({"reset": lambda: ("", {})}, "reset must return (dict, dict)", 0),
    "step raises": ({"step": raises(KeyError("boom"))}, "boom", 1),
    "step raises StopIteration": ({"step": raises(StopIteration())}, "StopIteration", 1),
    "step raises SystemExit": ({"step": raises(SystemExit(3))}, "SystemExit: 3", 1),
    "step raises a timeout of its own": ({"step": raises(TimeoutError("socket"))}, "TimeoutError: socket", 1),
    "step returns a pair": ({"step": lambda _: ({}, True)}, "step must return (dict, bool, dict)", 1),
    "step returns None as done": ({"step": lambda _: ({}, None, {})}, "step must return (dict, bool, dict)", 1),
    "step returns a text": ({"step": lambda _: ("obs", True, {})}, "step must return (dict, bool, dict)", 1),
    "format_observation raises": ({"format_observation": raises(ValueError("boom"))}, "boom", 1),
    "format_observation returns None": ({"format_observation": lambda _: None}, "format_observation must return", 1),
    "format_observation has no role": ({"format_observation": lambda _: {"content": "a"}}, "must return", 1),
    "format_observation has a number": (
        {"format_observation": lambda _: {"role": "tool", "content": 3}},
        'must return {"role": str, "content": str or list of parts}',
        1,
    ),
    "observation shows no image": (
        {"format_observation": lambda _: {"role": "tool", "content": [{"type": "image", "image": "a.png"}]}},
        "no such file, and no base64 image",
        1,
    ),
    "reward raises": ({"reward": raises(ZeroDivisionError("boom"))}, "boom", 3),
    "reward is not a number": ({"reward": lambda _: float("nan")}, "reward must be a finite number, got nan", 3),
    "reward is infinite": ({"reward": lambda _: float("inf")}, "reward must be a finite number, got inf", 3),
    "reward is a bool": ({"reward": lambda _: True}, "reward must be a finite number, got True", 3),
    "reward is None": ({"reward": lambda _: None}, "reward must be a finite number, got None", 3),
    "reward is a text": ({"reward": lambda _: "1.0"}, "reward must be a finite number, got '1.0'", 3),
}


@pytest.mark.parametrize("inline", [True, False], ids=["in place", "on a thread"])
@pytest.mark.parametrize(("faults", "error", "num_turns"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_of_the_environment_is_a_recorded_end(
    renderer: Renderer, faults: dict[str, Any], error: str, num_turns: int, inline: bool
) -> None:
    trajectory = run(renderer, SmallEnv(AGAIN, **faults), bounds=EnvLimits(inline=inline))
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.ENV_ERROR, 0.0)
    assert error in (trajectory.error or "")
    assert len(trajectory.turns) == num_turns
    assert trajectory.mask_T.sum() == sum(t.end - t.start for t in trajectory.turns)


@pytest.mark.parametrize(
    ("make_env", "error"),
    [
        (raises(ValueError("boom")), "boom"),
        (lambda: None, "building must return an environment"),
        (lambda: "env", "building must return an environment"),
    ],
)
def test_an_environment_that_cannot_be_built_is_a_recorded_end(
    renderer: Renderer, make_env: Callable, error: str
) -> None:
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")
    trajectory = asyncio.run(episode(renderer, engine, Limits()).run(sample(), make_env, seed=0))
    assert trajectory.end_reason is EndReason.ENV_ERROR
    assert error in (trajectory.error or "")
    assert (len(trajectory.ids_T), trajectory.turns) == (0, ())


@pytest.mark.parametrize("reward", [0, 1, -2.5, np.float32(0.5), np.float64(0.25)])
def test_any_finite_number_is_a_reward(renderer: Renderer, reward: float) -> None:
    trajectory = run(renderer, SmallEnv(worth=reward))
    assert (trajectory.reward, type(trajectory.reward)) == (float(reward), float)


def test_the_reward_is_that_of_the_last_model_text(renderer: Renderer) -> None:
    graded: list[str] = []

    def reward(text: str) -> float:
        graded.append(text)
        return 1.0

    run(renderer, SmallEnv(AGAIN, DONE, reward=reward), texts=["one", "two"])
    assert graded == ["two"]


def test_a_close_that_raises_is_noted_and_leaves_the_episode_valid(renderer: Renderer) -> None:
    env = SmallEnv()

    def close() -> None:
        env.num_closed += 1
        raise OSError("still open")

    env.close = close  # type: ignore[method-assign]
    trajectory = run(renderer, env)
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.COMPLETED, 1.0)
    assert "still open" in (trajectory.error or "")


def test_a_close_that_raises_does_not_hide_the_first_error(renderer: Renderer) -> None:
    env = SmallEnv(step=raises(ValueError("boom")))

    def close() -> None:
        env.num_closed += 1
        raise OSError("still open")

    env.close = close  # type: ignore[method-assign]
    assert "boom" in (run(renderer, env).error or "")


@pytest.mark.alone
@pytest.mark.parametrize("method", ["reset", "step", "format_observation", "reward"])
def test_an_environment_that_hangs_runs_into_its_time_limit(renderer: Renderer, method: str) -> None:
    started = time.perf_counter()
    env = SmallEnv(AGAIN)
    setattr(env, method, lambda *_: time.sleep(6))
    trajectory = run(renderer, env, bounds=EnvLimits(reset_timeout_s=0.2, step_timeout_s=0.2))
    assert trajectory.end_reason is EndReason.ENV_TIMEOUT
    assert "took longer than 0.2 s" in (trajectory.error or "")
    assert time.perf_counter() - started < 5
    assert len(trajectory.turns) == {"reset": 0, "step": 1, "format_observation": 1, "reward": 3}[method]


def test_calls_run_on_other_threads_unless_they_are_inline(renderer: Renderer) -> None:
    seen: list[threading.Thread] = []

    def step(_: str) -> Step:
        seen.append(threading.current_thread())
        return DONE

    run(renderer, SmallEnv(step=step))
    run(renderer, SmallEnv(step=step), bounds=EnvLimits(inline=True))
    assert [thread is threading.main_thread() for thread in seen] == [False, True]


@pytest.mark.alone
def test_one_hanging_episode_of_thirty_two_holds_up_no_other(renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")
    envs: list[SmallEnv] = []

    def build(asked: Sample, _: object) -> SmallEnv:
        envs.append(SmallEnv(step=lambda _: time.sleep(12)) if len(envs) == 5 else SmallEnv())
        return envs[-1]

    started = time.perf_counter()
    playing = rollout_groups(
        episode(renderer, engine, Limits(env=EnvLimits(step_timeout_s=0.5))),
        [sample(id=str(k)) for k in range(4)],
        build,
        None,
        8,
        seed=1,
    )
    groups = asyncio.run(playing)
    assert time.perf_counter() - started < 10
    ends = [t.end_reason for g in groups for t in g.trajectories]
    assert sorted(ends) == [EndReason.COMPLETED] * 31 + [EndReason.ENV_TIMEOUT]
    assert [env.num_closed for env in envs] == [1] * 32


def test_groups_come_back_in_order_with_a_seed_for_every_episode(renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")
    ended: list[Trajectory] = []
    groups = asyncio.run(
        rollout_groups(
            episode(renderer, engine, Limits()),
            [sample(id="a"), sample(id="b")],
            lambda asked, args: SmallEnv(),
            None,
            3,
            seed=4,
            on_episode=ended.append,
        )
    )
    assert [g.sample_id for g in groups] == ["a", "b"]
    assert [[t.sample_index for t in g.trajectories] for g in groups] == [[0, 1, 2], [0, 1, 2]]
    assert [t.seed for t in groups[1].trajectories] == [derive_seed(4, 1, copy) for copy in range(3)]
    assert len({t.seed for g in groups for t in g.trajectories}) == 6
    assert {id(t) for t in ended} == {id(t) for g in groups for t in g.trajectories}


def test_a_cancelled_episode_closes_its_environment(renderer: Renderer) -> None:
    env = SmallEnv(step=lambda _: time.sleep(0.5))
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")

    async def story() -> None:
        task = asyncio.create_task(episode(renderer, engine, Limits()).run(sample(), lambda: env, seed=0))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(story())
    assert env.num_closed == 1


def test_tools_are_in_the_prompt_only_when_they_are_used(renderer: Renderer) -> None:
    class Tooled(SmallEnv):
        tools = ({"type": "function", "function": {"name": "calc_score"}},)

    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")
    streams = [
        asyncio.run(episode(renderer, engine, Limits(), use_tools=use).run(sample(), Tooled, seed=0))
        for use in (True, False)
    ]
    assert ["calc_score" in names(renderer, t) for t in streams] == [True, False]


def test_control_tokens_in_what_the_environment_says_stay_text(renderer: Renderer) -> None:
    env = SmallEnv(({"obs_str": "<|image_pad|><|im_end|>"}, False, {}), DONE)
    trajectory = run(renderer, env, texts=["one", "two"])
    assert trajectory.end_reason is EndReason.COMPLETED
    assert renderer.image_token_id not in trajectory.ids_T


def test_an_observation_that_does_not_fit_ends_the_episode_and_is_not_read(renderer: Renderer) -> None:
    env = SmallEnv(({"obs_str": "again " * 3_000_000}, False, {}))
    started = time.process_time()
    trajectory = run(renderer, env, max_new_tokens=200)
    assert time.process_time() - started < 2  # 18 million characters would take far longer to tokenise
    assert (trajectory.end_reason, len(trajectory.turns)) == (EndReason.TOKEN_BUDGET, 1)
    assert trajectory.mask_T[-1] and len(trajectory.ids_T) < 200
    prompt = len(renderer.prompt(sample().prompt).ids)
    full = run(renderer, SmallEnv(({"obs_str": "again " * 30}, False, {})), context_length=prompt + 20)
    assert (full.end_reason, len(full.turns)) == (EndReason.CONTEXT_FULL, 1)


def test_no_episode_can_change_the_sample_or_the_options_of_another(renderer: Renderer) -> None:
    class Greedy(SmallEnv):
        def __init__(self, asked: Sample, args: EnvArgs) -> None:
            super().__init__()
            text = asked.prompt[0]["content"][0]["text"]
            seen.append((list(asked.metadata["left"]), text, list(args.options["left"])))
            asked.metadata["left"].clear()
            asked.prompt[0]["content"][0]["text"] = "changed"
            args.options["left"].clear()

    seen: list[tuple] = []
    asked = Sample("s", sample("Find x.").prompt, label="5", metadata={"left": [1, 2]})
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")
    args = EnvArgs(3, options={"left": [3]})
    asyncio.run(rollout_groups(episode(renderer, engine, Limits()), [asked], Greedy, args, 4, seed=1))
    assert seen == [([1, 2], "Find x.", [3])] * 4


def test_a_trajectory_carries_what_it_was_played_for(renderer: Renderer) -> None:
    class Tooled(SmallEnv):
        tools = ({"type": "function", "function": {"name": "calc_score"}},)

    asked = Sample("problem", sample("Find x.").prompt, label="5", metadata={"source": "book"})
    env = Tooled(AGAIN, DONE, reset=lambda: ({"obs_str": "first"}, {}))
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "one")
    began = time.time()
    t = asyncio.run(episode(renderer, engine, Limits()).run(asked, lambda: env, 7, sample_index=2, group=3, attempt=4))
    assert (t.sample_id, t.seed, t.label, t.metadata) == ("problem", 7, "5", {"source": "book"})
    assert (t.sample_index, t.group, t.attempt, t.key) == (2, 3, 4, (3, 2, 4))
    assert (t.num_prompt_messages, len(t.messages)) == (1, 5)
    assert t.tools == Tooled.tools
    assert began - 0.01 <= t.timing.began <= time.time() - t.timing.total_s + 0.01
    assert [turn.done for turn in t.turns] == [False, True]
    assert [turn.info for turn in t.turns] == [{"score": 0.0}, {}]
    plain = asyncio.run(episode(renderer, engine, Limits(), use_tools=False).run(asked, lambda: SmallEnv(), 7))
    assert (plain.tools, plain.key) == ((), (0, 0, 0))


class WaitingEngine(FixedEngine):
    """Waits for ever in the turn after the last that it was given."""

    async def generate(self, request: GenerateRequest) -> Completion:
        if len(self.requests) == len(self.completions):
            await asyncio.sleep(3600)
        return await super().generate(request)


def cancelled(playing: Episode, env: SmallEnv, when: Callable[[], bool], word: str = ABORT) -> Trajectory:
    """Play an episode that is cancelled with a word once something has happened."""

    async def story() -> Trajectory:
        task = asyncio.create_task(playing.run(sample(), lambda: env, seed=0))
        while not when():
            await asyncio.sleep(0.005)
        task.cancel(word)
        return await asyncio.wait_for(task, 20)

    return asyncio.run(story())


def test_an_abort_while_the_model_writes_keeps_the_turns_before(renderer: Renderer) -> None:
    engine, env = WaitingEngine(([31, renderer.stop_ids[-1]], [-0.1, -0.2], "stop")), SmallEnv(AGAIN)
    t = cancelled(episode(renderer, engine, Limits()), env, lambda: bool(env.texts))
    assert (t.end_reason, len(t.turns), t.reward, t.error, env.num_closed) == (EndReason.ABORTED, 1, 0.0, None, 1)
    assert t.mask_T.sum() == 2


def test_an_abort_while_the_environment_answers_keeps_the_turn_that_it_was_to_answer(renderer: Renderer) -> None:
    begun = threading.Event()
    env = SmallEnv(step=lambda _: begun.set() or time.sleep(0.2) or AGAIN)
    engine = FixedEngine(([31, renderer.stop_ids[-1]], [-0.1, -0.2], "stop"))
    t = cancelled(episode(renderer, engine, Limits()), env, begun.is_set)
    assert (t.end_reason, len(t.turns), t.turns[0].observations) == (EndReason.ABORTED, 1, ())
    assert t.turns[0].versions == ((3, 2),)


@pytest.mark.parametrize("word", [ABORT, "other"])
def test_an_abort_while_the_environment_closes_comes_too_late_and_another_word_does_not(
    renderer: Renderer, word: str
) -> None:
    begun = threading.Event()
    env = SmallEnv(close=lambda: begun.set() or time.sleep(0.2))
    engine = FixedEngine(([31, renderer.stop_ids[-1]], [-0.1, -0.2], "stop"))
    playing = episode(renderer, engine, Limits())
    if word == ABORT:
        t = cancelled(playing, env, begun.is_set)
        assert (t.end_reason, t.reward, t.error) == (EndReason.COMPLETED, 1.0, None)
    else:
        with pytest.raises(asyncio.CancelledError):
            cancelled(playing, env, begun.is_set, word)


def test_an_observation_fits_if_it_leaves_the_model_a_token(renderer: Renderer) -> None:
    """Budget and context bound alike; where both are used up at once the episode ran out of budget."""
    stop = renderer.stop_ids[-1]
    prompt = len(renderer.prompt(sample().prompt).ids)
    suffix = len(renderer.suffix([{"role": "tool", "content": "again"}], stop).ids)

    def turns(budget: int = 4096, context: int = 100_000) -> tuple[EndReason, list[int]]:
        engine = FixedEngine(*[([31, stop], [-0.1] * 2, "stop"), ([31], [-0.1], "length")])
        engine.context_length = context
        t = run(renderer, SmallEnv(AGAIN), engine=engine, max_new_tokens=budget)
        assert engine.requests[0].max_new_tokens == min(budget, context - prompt)
        return t.end_reason, [request.max_new_tokens for request in engine.requests[1:]]

    assert turns(budget=2 + suffix) == (EndReason.TOKEN_BUDGET, [])
    assert turns(budget=2 + suffix + 1) == (EndReason.TOKEN_BUDGET, [1])
    assert turns(context=prompt + 2 + suffix) == (EndReason.CONTEXT_FULL, [])
    assert turns(context=prompt + 2 + suffix + 1) == (EndReason.CONTEXT_FULL, [1])
    assert turns(2 + suffix + 1, prompt + 2 + suffix + 1) == (EndReason.TOKEN_BUDGET, [1])


def test_an_environment_that_says_nothing_is_an_empty_user_message(renderer: Renderer) -> None:
    env = SmallEnv(({}, False, {}), DONE, format_observation=lambda observation: [])
    stop = renderer.stop_ids[-1]
    trajectory = run(renderer, env, texts=["one", "two"])
    between = trajectory.ids_T[trajectory.turns[0].end : trajectory.turns[1].start].tolist()
    assert between == list(renderer.suffix([{"role": "user", "content": ""}], stop).ids)
    assert trajectory.messages[-2] == {"role": "user", "content": ""}


def test_limits_that_nobody_names_are_three_turns_256_tokens_and_every_128th_template() -> None:
    assert (Limits().max_turns, Limits().max_new_tokens, Limits().check_template_every) == (3, 256, 128)


@pytest.mark.parametrize(("timed_out", "end"), [(True, EndReason.ENV_TIMEOUT), (False, EndReason.ENV_ERROR)])
@pytest.mark.parametrize("method", ["open", "step", "reward"])
def test_a_fault_ends_the_episode_as_a_timeout_or_as_an_error_wherever_it_comes(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, method: str, timed_out: bool, end: EndReason
) -> None:
    async def fail(*_: Any) -> Any:
        raise EnvFault("no more", timed_out)

    monkeypatch.setattr(f"agents.rollout.episode.EnvRunner.{method}", fail)
    t = asyncio.run(
        episode(renderer, ScriptedEngine(renderer.tokenizer, lambda turn, _: "one"), Limits()).run(
            sample(), SmallEnv, seed=0
        )
    )
    assert (t.end_reason, t.error, t.reward, len(t.turns)) == (end, "no more", 0.0, 0 if method == "open" else 1)


def test_times_of_an_episode_are_the_sums_of_its_turns(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one second whenever it is read."""
    clock = SimpleNamespace(perf_counter=count().__next__, time=lambda: 1000.0)
    monkeypatch.setattr("agents.rollout.episode.time", clock)
    stop = renderer.stop_ids[-1]
    engine = FixedEngine(*[([31, stop], [-0.1] * 2, "stop")] * 2)
    t = run(renderer, SmallEnv(AGAIN, DONE), engine=engine)
    assert [turn.engine_s for turn in t.turns] == [1, 1]
    # Read at the start, three times a turn, and before and after the last check.
    assert (t.timing.total_s, t.timing.engine_s, t.timing.check_s, t.timing.began) == (8, 2, 3, 992.0)


def test_ids_that_no_tokenizer_knows_are_an_empty_text(renderer: Renderer) -> None:
    t = run(renderer, SmallEnv(), engine=FixedEngine(([31, -2], [-0.1] * 2, "stop")))
    assert (t.end_reason, t.turns[0].text, t.messages[-1]["content"]) == (EndReason.INVALID_STREAM, "", "")
    assert t.turns[0].versions == ((-1, 2),)


@pytest.mark.parametrize(("method", "what"), [("prompt", "prompt"), ("suffix", "observation")])
def test_what_cannot_be_rendered_is_a_fault_of_the_environment_that_names_it(
    renderer: Renderer, method: str, what: str
) -> None:

    def fail(*_: Any, **__: Any) -> Rendered:
        raise ValueError("no such part")

    broken = copy.copy(renderer)
    setattr(broken, method, fail)
    t = run(broken, SmallEnv(AGAIN), texts=["one", "two"])
    assert (t.end_reason, len(t.turns)) == (EndReason.ENV_ERROR, 0 if method == "prompt" else 1)
    error = t.error or ""
    assert error.startswith(f"the {what} cannot be rendered: ") and error.endswith("ValueError: no such part")


def routed_run(renderer: Renderer, engine: RoutingEngine, shape: RouteShape | None = SHAPE) -> Trajectory:
    env = SmallEnv(AGAIN, AGAIN, DONE)
    loop = episode(renderer, engine, Limits(), routes=shape)
    return asyncio.run(loop.run(sample(), lambda: env, seed=7))


def test_each_turn_asks_for_the_experts_of_its_new_tokens_and_the_stream_has_all(renderer: Renderer) -> None:
    engine = RoutingEngine(renderer.tokenizer, lambda turn, _: f"this is turn {turn}")
    trajectory = routed_run(renderer, engine)
    assert trajectory.end_reason is EndReason.COMPLETED
    assert engine.asked == [0, *(turn.end - 1 for turn in trajectory.turns[:-1])]
    assert trajectory.routes_RLK is not None and trajectory.routes_RLK.dtype == np.uint8
    assert np.array_equal(trajectory.routes_RLK, routes_of(trajectory.turns[-1].end - 1))


def test_who_does_not_want_experts_asks_for_none(renderer: Renderer) -> None:
    engine = RoutingEngine(renderer.tokenizer, lambda turn, _: "words")
    assert routed_run(renderer, engine, shape=None).routes_RLK is None
    assert engine.asked == [None] * 3


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: None, "turn 1: experts of shape None, the tokens that were read need "),
        (lambda rows: rows[1:], "turn 1: experts of shape "),
        (lambda rows: rows[:, :1], "turn 1: experts of shape "),
        (lambda rows: rows + 1, "turn 1: a token went to expert 8, the network has 8"),
    ],
)
def test_an_episode_with_other_experts_than_its_tokens_have_is_an_invalid_stream(
    spoil: Callable[[np.ndarray], Any], words: str, renderer: Renderer
) -> None:
    engine = RoutingEngine(renderer.tokenizer, lambda turn, _: "words", spoil=spoil)
    trajectory = routed_run(renderer, engine)
    assert trajectory.end_reason is EndReason.INVALID_STREAM
    assert (trajectory.error or "").startswith(words)
    assert trajectory.routes_RLK is None and len(trajectory.turns) == 1
