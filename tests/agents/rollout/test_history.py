"""Claims about windows of history: what the model goes on seeing, and the exact stream that begins at each cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agents.engines.hf import HFEngine
from agents.engines.scripted import ScriptedEngine
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.episode import ABORT, Episode, Limits
from agents.rollout.invariants import Vocabulary, broken_invariant
from agents.rollout.template_check import template_mismatch
from agents.types import EndReason, Trajectory
from envs.contract import EnvFault
from envs.env import Env, EnvArgs
from envs.execution.process_env import ProcessEnv
from envs.history import LEFT_OUT, History, checked_history, with_numbers
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Message, Sample
from tests.agents.rollout.test_episode import SHAPE, RoutingEngine
from tests.builders import full_logprobs, sampling
from tests.prompts import make_image, sample
from trainer.setup.components import build_episode

PROBLEM = make_image(64, 32, seed=99)
TEXTS = ("one", "<|im_start|>two", "three", "four", "five", "six")


class Screens(Env):
    """Answers turn k with image k, and ends its task with turn `num_screens`."""

    def __init__(self, num_screens: int = 5) -> None:
        self.num_shown = 0
        self.num_screens = num_screens

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._screen(), {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return self._screen(), self.num_shown > self.num_screens, {}

    def _screen(self) -> dict[str, Any]:
        self.num_shown += 1
        image = make_image(32, 32, seed=self.num_shown)
        return {"obs_str": f"screen {self.num_shown}", "role": "user", "multi_modal_data": {"image": [image]}}

    def reward(self, final_text: str) -> float:
        return 1.0


class Edited(Screens):
    """Screens whose history a function edits."""

    def __init__(self, edit: Callable[[list[Message]], Any], num_screens: int = 5) -> None:
        super().__init__(num_screens)
        self.edit = edit

    def edit_history(self, messages: list[Message]) -> Any:
        return self.edit(messages)


def play(
    renderer: Renderer,
    env: Env | None = None,
    history: History | None = None,
    engine: Any = None,
    asked: Sample | None = None,
    bounds: EnvLimits | None = None,
    **limits: Any,
) -> Trajectory:
    engine = engine or ScriptedEngine(renderer.tokenizer, lambda turn, _: TEXTS[turn])
    given = {"max_turns": 6, "max_new_tokens": 2000, "check_template_every": 1, **limits}
    loop = Episode(engine, renderer, Limits(**given, env=bounds or EnvLimits()), sampling(renderer), history=history)
    return asyncio.run(loop.run(asked or sample("Press.", PROBLEM), lambda: env or Screens(), seed=7))


def assert_exact(renderer: Renderer, t: Trajectory) -> None:
    """Every stream keeps all rules and the template, and every turn is trained in one stream."""
    assert t.end_reason is not EndReason.INVALID_STREAM, t.error
    trained = [np.zeros(len(stream.ids_T), dtype=bool) for stream in t.streams]
    for turn in t.turns:
        trained[turn.stream][turn.start : turn.end] = True
    for stream, mask_T in zip(t.streams, trained, strict=True):
        assert stream.turns
        assert broken_invariant(stream, Vocabulary.of(renderer)) is None
        assert template_mismatch(stream, renderer) is None
        assert stream.mask_T.tolist() == mask_T.tolist()
        shown = [dict(message) for message in stream.messages[: stream.num_opening]]
        prompt = renderer.prompt(shown, stream.tools, stream.num_given)
        assert stream.ids_T[: stream.prompt_length].tolist() == list(prompt.ids)


def images_of(t: Trajectory) -> list[list[str]]:
    return [[image.digest for image in stream.images] for stream in t.streams]


def test_each_stream_shows_the_last_images_and_every_turn_trains_in_one(renderer: Renderer) -> None:
    t = play(renderer, history=History(keep_images=2))
    assert_exact(renderer, t)
    assert (t.end_reason, len(t.turns)) == (EndReason.COMPLETED, 5)
    # The second screen is the second image: nothing is cut before the third.
    assert [turn.stream for turn in t.turns] == [0, 0, 1, 2, 3]
    known = play(renderer).images
    problem, *screens = [image.digest for image in known]
    assert images_of(t) == [[problem, *screens[:2]], *([problem, *screens[n : n + 2]] for n in (1, 2, 3))]
    said = [part.get("text") for part in t.later[0].messages[1]["content"]]
    assert said == [LEFT_OUT, "screen 1"]
    # The words of the model stand in later prompts as it sampled them, control tokens and all.
    turn = t.turns[1]
    sampled = t.ids_T[turn.start : turn.end].tolist()
    ids = t.later[1].ids_T.tolist()
    assert any(ids[n : n + len(sampled)] == sampled for n in range(t.later[1].prompt_length))


def test_the_last_turns_go_on_behind_the_opening(renderer: Renderer) -> None:
    t = play(renderer, history=History(keep_turns=1))
    assert_exact(renderer, t)
    assert [turn.stream for turn in t.turns] == [0, 0, 1, 2, 3]
    spoken = [[m["content"] for m in stream.messages if m["role"] == "assistant"] for stream in t.streams]
    assert spoken[2] == [t.turns[2].text, t.turns[3].text]
    assert all(stream.messages[0] == t.messages[0] for stream in t.streams)


def test_a_history_that_is_not_cut_is_one_stream(renderer: Renderer) -> None:
    plain = play(renderer)
    for t in (
        play(renderer, history=History(keep_images=9, keep_turns=9)),
        play(renderer, Edited(lambda messages: messages)),
        play(renderer, Edited(lambda messages: tuple(dict(message) for message in messages))),
    ):
        assert not t.later
        assert t.ids_T.tolist() == plain.ids_T.tolist()


def test_an_environment_may_sum_up_what_the_model_no_longer_sees(renderer: Renderer) -> None:
    def edit(messages: list[Message]) -> list[Message]:
        if len(messages) < 6:
            return messages
        return [messages[0], {"role": "user", "content": "Three screens so far."}, *messages[-2:]]

    t = play(renderer, Edited(edit))
    assert_exact(renderer, t)
    assert [turn.stream for turn in t.turns] == [0, 0, 1, 2, 3]
    assert [m["content"] for m in t.later[0].messages[1:3]] == ["Three screens so far.", t.turns[1].text]
    assert t.later[0].num_given == 2


def test_an_environment_may_show_another_image_in_place_of_one(renderer: Renderer) -> None:
    small = Image.new("RGB", (32, 32), "red")

    def edit(messages: list[Message]) -> list[Message]:
        messages[1]["content"][0]["image"] = small
        return messages

    t = play(renderer, Edited(edit, num_screens=2))
    assert_exact(renderer, t)
    assert len(t.streams) == 2
    assert images_of(t)[0][1] != images_of(t)[1][1]
    assert images_of(t)[0][0] == images_of(t)[1][0]


@pytest.mark.parametrize(
    ("edited", "told"),
    [
        (None, "must return messages in a list"),
        ([], "must return messages in a list"),
        (["no message"], "edit_history must return"),
        ([{"role": "user", "content": [{"type": "image", "image": 9}]}], "image"),
        ([{"role": "assistant", "content": "mine"}, {"role": "user", "content": ""}], "must not write"),
        ([{"role": "user", "content": ""}, {"role": "assistant", "content": "one"}], 'role "assistant"'),
    ],
)
def test_a_wrong_history_is_a_fault_of_the_environment(renderer: Renderer, edited: Any, told: str) -> None:
    t = play(renderer, Edited(lambda _: edited))
    assert t.end_reason is EndReason.ENV_ERROR
    assert told in str(t.error)
    assert len(t.turns) == 1 and not t.later


def test_turns_of_the_model_stay_in_their_order() -> None:
    said = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    said.append({"role": "user", "content": "e"})
    assert checked_history([*said[:2], *said[3:]], said)[1] is said[1]
    with pytest.raises(EnvFault, match="must not write, change or move"):
        checked_history([said[0], said[3], said[1], said[4]], said)


def test_an_editor_that_hangs_or_raises_ends_the_episode(renderer: Renderer) -> None:
    slow = EnvLimits(step_timeout_s=0.2)
    assert play(renderer, Edited(lambda _: time.sleep(1)), bounds=slow).end_reason is EndReason.ENV_TIMEOUT
    t = play(renderer, Edited(lambda messages: messages[99]))
    assert t.end_reason is EndReason.ENV_ERROR and "IndexError" in str(t.error)


def test_a_limit_or_an_abort_behind_a_cut_leaves_no_stream_without_a_turn(renderer: Renderer) -> None:
    window = History(keep_images=2)
    whole = play(renderer, history=window)
    lengths = [len(stream.ids_T) - stream.prompt_length for stream in whole.streams]
    spent = play(renderer, history=window, max_new_tokens=sum(lengths[:2]))
    assert (spent.end_reason, len(spent.streams)) == (EndReason.TOKEN_BUDGET, 2)
    assert_exact(renderer, spent)
    # A window bounds each stream, so an episode may be longer than the context.
    window = History(keep_turns=1)
    whole = play(renderer, history=window)
    room = max(len(stream.ids_T) for stream in whole.streams) + 1
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: TEXTS[turn], room)
    assert play(renderer, history=window, engine=engine).end_reason is EndReason.COMPLETED
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: TEXTS[turn], room)
    assert play(renderer, engine=engine).end_reason is EndReason.CONTEXT_FULL


def test_an_abort_while_the_first_turn_of_a_stream_is_written_keeps_the_turns_before(renderer: Renderer) -> None:
    async def aborted() -> Trajectory:
        def text(turn: int, _: object) -> str:
            if turn == 2:
                task.cancel(ABORT)
            return TEXTS[turn]

        engine = ScriptedEngine(renderer.tokenizer, text)
        limits = Limits(6, 2000, check_template_every=1)
        loop = Episode(engine, renderer, limits, sampling(renderer), history=History(keep_images=2))
        task = asyncio.create_task(loop.run(sample("Press.", PROBLEM), Screens, seed=7))
        return await task

    t = asyncio.run(aborted())
    assert t.end_reason is EndReason.ABORTED
    assert_exact(renderer, t)


def test_experts_are_those_of_each_stream(renderer: Renderer) -> None:
    engine = RoutingEngine(renderer.tokenizer, lambda turn, _: TEXTS[turn])
    loop = Episode(engine, renderer, Limits(6, 2000), sampling(renderer), routes=SHAPE, history=History(keep_images=1))
    t = asyncio.run(loop.run(sample("Press."), Screens, seed=7))
    assert t.end_reason is EndReason.COMPLETED, t.error
    assert engine.asked == [0] * 5
    assert [len(s.routes_RLK) for s in t.streams if s.routes_RLK is not None] == [len(s.ids_T) - 1 for s in t.streams]


@given(st.lists(st.sets(st.integers(0, 12)), min_size=6, max_size=6))
def test_every_stream_is_exact_whatever_is_left_out(renderer: Renderer, left_out: Sequence[set[int]]) -> None:
    cuts = iter(left_out)

    def edit(messages: list[Message]) -> list[Message]:
        gone = next(cuts)
        return [m for n, m in enumerate(messages) if n in (0, len(messages) - 1) or n not in gone]

    t = play(renderer, Edited(edit))
    assert t.end_reason is EndReason.COMPLETED, t.error
    assert_exact(renderer, t)


def played_on(model: PolicyModel, renderer: Renderer, num: int = 3) -> list[Trajectory]:
    async def all_played() -> list[Trajectory]:
        limits = Limits(5, 200, EnvLimits(inline=True), check_template_every=1)
        # Random weights rarely draw the one id that closes a turn.
        often = replace(sampling(renderer), stop_ids=(*renderer.stop_ids, *range(300, 500)))
        loop = Episode(HFEngine(model), renderer, limits, often, history=History(keep_images=2))
        plays = [loop.run(sample("Press.", PROBLEM), lambda: Screens(), seed) for seed in range(num)]
        return await asyncio.gather(*plays)

    return asyncio.run(all_played())


def test_log_probs_on_the_embedded_engine_are_those_of_each_stream_read_alone(
    model: PolicyModel, renderer: Renderer
) -> None:
    first = played_on(model, renderer)
    assert any(t.later for t in first)
    for t, again in zip(first, played_on(model, renderer), strict=True):
        assert_exact(renderer, t)
        assert [s.ids_T.tolist() for s in t.streams] == [s.ids_T.tolist() for s in again.streams]
        for stream in t.streams:
            logprobs_TV = full_logprobs(model, stream.ids_T.tolist(), stream.images, sampling(renderer))
            ids_T1 = torch.from_numpy(stream.ids_T[1:])[:, None]
            expected_T = logprobs_TV.gather(1, ids_T1)[:, 0].detach().numpy()
            mask_T = stream.mask_T[1:]
            assert stream.logprobs_T[1:][mask_T] == pytest.approx(expected_T[mask_T], abs=1e-4)


def test_a_history_edited_in_another_process_keeps_the_images(tmp_path: Any, monkeypatch: Any) -> None:
    code = (
        "from envs.env import Env\n"
        "class Kept(Env):\n"
        "    def __init__(self, sample, args): pass\n"
        "    def reset(self): return {}, {}\n"
        "    def step(self, text): return {'obs_str': 'x'}, False, {}\n"
        "    def edit_history(self, messages): return messages[-1:]\n"
    )
    (tmp_path / "kept_env.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = EnvSpec(id="kept", entry_point="kept_env:Kept", description="x", max_turns=2, isolation="process")
    env = ProcessEnv(spec, sample("Press.", PROBLEM), EnvArgs(max_turns=2))
    assert env.edit_history is None
    env.reset()
    assert env.edit_history is not None
    said = sample("Press.", PROBLEM).prompt
    edited = checked_history(env.edit_history(with_numbers(said)[0]), said)
    env.close()
    assert edited[0] is said[0]


def test_each_part_of_a_mixture_has_the_history_of_its_entry(renderer: Renderer) -> None:
    desktop = get_spec("desktop")
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "1")
    loop = build_episode(engine, renderer, desktop, 8, 500, sampling(renderer))
    assert loop.history == History(keep_images=4)
    (asked,) = desktop.load_dataset("train", 1, 0)
    t = asyncio.run(loop.run(asked, lambda: desktop.load_here()(asked, desktop.args(8)), seed=0))
    assert [len(stream.images) for stream in t.streams] == [4] * 5
    assert_exact(renderer, t)
