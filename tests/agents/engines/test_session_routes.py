"""Claims about the experts that SGLang servers report: what is asked for, what is refused, and what an episode gets."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.engines.pending_turn import PendingTurn
from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.payloads import AskedRoutes, generate_body, parse_answer
from agents.engines.sglang.process import LocalProcess
from agents.engines.sglang.session import NUM_AGAIN, SGLangSession
from agents.engines.weight_servers import ServerLost
from agents.model.architectures import ModelFacts
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Rendered, Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.invariants import broken_routes
from agents.rollout.stream import Stream
from agents.types import EndReason, RouteShape, SamplingParams, Trajectory
from envs.spec import EnvLimits
from tests.agents.engines.test_sglang_engine import (
    STOP_SOON,
    ImageEnv,
    external,
    misbehave,
    settings,
    short_waits,  # noqa: F401
    with_engine,
)
from tests.agents.engines.test_sglang_protocol import asked, written
from tests.builders import full_logprobs
from tests.prompts import make_image, sample
from tests.servers import serving
from tests.tiny_models import write_tiny_model

SHAPE = RouteShape(num_layers=3, num_experts=16, top_k=2)
SAMPLING = SamplingParams()


def experts(num_tokens: int, seed: int = 0) -> np.ndarray:
    """Return experts of so many tokens, of which no set has one twice."""
    random = np.random.default_rng(seed)
    first = random.integers(0, SHAPE.num_experts, (num_tokens, SHAPE.num_layers))
    other = (first + random.integers(1, SHAPE.num_experts, first.shape)) % SHAPE.num_experts
    return np.stack([first, other], -1)


def encoded(routes: np.ndarray) -> str:
    return base64.b64encode(routes.astype("<i4").tobytes()).decode()


def routed(ids: list[int], routes: np.ndarray, **answer: Any) -> Any:
    given = written(*ids, **answer)
    given["meta_info"]["routed_experts"] = encoded(routes)
    return given


def shaped(shape: RouteShape | None = SHAPE) -> SGLangSession:
    """Return a session of an engine whose servers are told of these experts."""
    return SGLangSession(SGLangEngine(SGLangSettings(routes=shape), None))


def taken(session: SGLangSession, turn: PendingTurn, given: Any, origin: object = "server") -> None:
    """Let a turn take the answer of a server, as its session does."""
    wanted = session._asked_routes(turn)
    answer = parse_answer(given, SAMPLING, wanted)
    session._take_routes(turn, answer, wanted, origin)
    turn.append(answer.ids, answer.logprobs)
    turn.stamp(0)


def test_a_request_asks_for_the_experts_of_new_tokens_and_of_a_few_before_them() -> None:
    request = asked(range(20), max_new_tokens=3)
    assert "return_routed_experts" not in generate_body(request, [], "rid", None)
    body = generate_body(request, [], "rid", None, first_route=12)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 12)
    assert shaped()._asked_routes(PendingTurn(request)) is None
    assert shaped(None)._asked_routes(PendingTurn(replace(request, num_routed=0))) is None
    for num_routed, first in ((0, 0), (3, 0), (15, 15 - NUM_AGAIN)):
        assert shaped()._asked_routes(PendingTurn(replace(request, num_routed=num_routed))) == AskedRoutes(first, SHAPE)


@pytest.mark.parametrize(("num_experts", "dtype"), [(16, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_experts_are_read_as_the_smallest_numbers_that_hold_them(num_experts: int, dtype: type) -> None:
    shape = replace(SHAPE, num_experts=num_experts)
    sent = experts(11)
    sent[-1, -1, -1] = num_experts - 1
    answer = parse_answer(routed([4, 5], sent, prompt=12), SAMPLING, AskedRoutes(2, shape))
    assert answer.routes_RLK is not None and answer.routes_RLK.dtype == dtype
    assert np.array_equal(answer.routes_RLK, sent)


BROKEN: dict[str, tuple[Any, str]] = {
    "none": (None, "TypeError"),
    "no text": (7, "TypeError"),
    "empty": ("", "experts of 0 tokens, asked for 11"),
    "half a token": (base64.b64encode(bytes(4 * 7)).decode(), "cannot reshape"),
    "no base64": ("%%%", "base64"),
    "half a number": (base64.b64encode(b"abc").decode(), "multiple of element size"),
    "a token less": (encoded(experts(10)), "experts of 10 tokens, asked for 11"),
    "a token more": (encoded(experts(12)), "experts of 12 tokens, asked for 11"),
    "an expert below 0": (encoded(experts(11) - 100), "expert 42949672.. of 16"),
    "an expert past the last": (encoded(experts(11) + 1), "expert 16 of 16"),
    "all bytes": (encoded(np.full((11, 3, 2), 2**31 - 1)), "expert 2147483647 of 16"),
}


@pytest.mark.parametrize(("sent", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_an_answer_with_other_experts_than_were_asked_for_loses_the_server(sent: Any, said: str) -> None:
    given = written(4, 5, prompt=12)
    given["meta_info"]["routed_experts"] = sent
    with pytest.raises(ServerLost, match=f"no answer: .*{said}"):
        parse_answer(given, SAMPLING, AskedRoutes(2, SHAPE))
    del given["meta_info"]["routed_experts"]
    with pytest.raises(ServerLost, match="no answer: KeyError 'routed_experts'"):
        parse_answer(given, SAMPLING, AskedRoutes(2, SHAPE))
    assert parse_answer(given, SAMPLING).routes_RLK is None


def test_a_request_that_was_aborted_may_have_no_experts_and_they_come_with_the_next() -> None:
    session = shaped()
    turn = PendingTurn(replace(asked(range(10), max_new_tokens=6), num_routed=0))
    whole = experts(13)
    for _ in range(2):
        taken(session, turn, written(finish="abort", prompt=None))
    taken(session, turn, written(4, 5, finish="abort", prompt=10))
    assert (turn.ids, turn.num_routed) == ([4, 5], 0)
    taken(session, turn, routed([6], whole[:12], finish="abort", prompt=12))
    assert turn.num_routed == 12
    taken(session, turn, routed([7], whole[12:], finish="stop", prompt=13, cached=12))
    found = turn.completion().routes_RLK
    assert found is not None and np.array_equal(found, whole)


@pytest.mark.parametrize("num_sent", [0, 2, 4, 10, 12, 13])
def test_a_request_that_was_aborted_may_have_read_less_or_more_than_it_counts(num_sent: int) -> None:
    session = shaped()
    whole = experts(16)
    first = PendingTurn(replace(asked(range(8), max_new_tokens=2), num_routed=0))
    taken(session, first, routed([4, 5], whole[:9], prompt=8))
    turn = PendingTurn(replace(asked(range(14), max_new_tokens=4), num_routed=9))
    start = 9 - NUM_AGAIN
    taken(session, turn, routed([6, 7], whole[start : start + num_sent], finish="abort", prompt=14, cached=9))
    wanted = session._asked_routes(turn)
    assert wanted and wanted.first <= turn.num_routed == min(15, max(9, start + num_sent))
    taken(session, turn, routed([8], whole[wanted.first :], finish="stop", prompt=16, cached=9))
    rows = turn.completion().routes_RLK
    assert rows is not None and np.array_equal(rows[turn.num_again :], whole[9:])
    request = replace(turn.request, ids=tuple(range(14)))
    assert broken_routes(2, request, turn.completion(), SHAPE, first.completion()) is None


WHOLE = experts(14)
KNOWN = WHOLE[9 - NUM_AGAIN : 9]
OTHERS = "turn 2: the last 4 tokens of the turn before have other experts than they had there"


def second_turn(num_cached: int, again: np.ndarray = KNOWN, origin: object = "server") -> str | None:
    """Play two turns of 10 and 5 tokens; the server says `again` of the last tokens of the first. Return the rule that
    the second breaks."""
    session = shaped()
    first = PendingTurn(replace(asked(range(8), max_new_tokens=2), num_routed=0))
    taken(session, first, routed([4, 5], WHOLE[:9], prompt=8))
    turn = PendingTurn(replace(asked(range(13), max_new_tokens=2), num_routed=9))
    sent = np.concatenate([again, WHOLE[9:]])
    taken(session, turn, routed([6, 7], sent, prompt=13, cached=num_cached), origin)
    assert turn.num_routed == 14
    stream = Stream()
    stream.read(Rendered(first.request.ids, ()))
    stream.write(first.completion())
    stream.read(Rendered((10, 11, 12), ()))
    rule = broken_routes(2, turn.request, turn.completion(), SHAPE, stream.last_turn)
    stream.write(turn.completion())
    found = stream.routes_RLK
    # Whatever comes again, what is known stays.
    assert found is not None and np.array_equal(found, WHOLE)
    return rule


def test_tokens_that_a_server_has_cached_must_have_the_experts_of_the_turn_before() -> None:
    assert second_turn(num_cached=9) is None
    assert second_turn(num_cached=9, again=experts(NUM_AGAIN, seed=1)) == OTHERS
    # Shifted by a token, as where a server counts from elsewhere.
    assert second_turn(num_cached=12, again=WHOLE[10 - NUM_AGAIN : 10]) == OTHERS


def test_tokens_that_were_read_again_may_have_others() -> None:
    other = experts(NUM_AGAIN, seed=1)
    assert second_turn(num_cached=8, again=other) is None
    assert second_turn(num_cached=9, again=other, origin="another server, or other weights") is None


def test_a_few_other_experts_are_those_of_an_episode_with_the_same_turn() -> None:
    few = KNOWN.copy()
    few[0, 0] = (few[0, 0] + 1) % SHAPE.num_experts
    assert second_turn(num_cached=9, again=few) is None
    assert second_turn(num_cached=9, again=KNOWN[:, :, ::-1]) is None


# Episodes on servers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_tiny_model(folder, "qwen3_vl_moe")
    return folder


def own_experts(network: PolicyModel, trajectory: Trajectory) -> np.ndarray:
    """Return the experts that the network chooses in one forward over a stream, but those of its last token."""
    found: list[torch.Tensor] = []
    routers = [module for module in network.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda *call: found.append(call[2][2])) for router in routers]
    with torch.inference_mode():
        full_logprobs(network, trajectory.ids_T.tolist(), trajectory.images, SAMPLING)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)[:-1].numpy()


async def play(engine: SGLangEngine, renderer: Renderer, shape: RouteShape | None) -> list[Trajectory]:
    params = SamplingParams(1.0, STOP_SOON, renderer.suppressed_ids)
    limits = Limits(3, 400, EnvLimits(inline=True))
    loop = Episode(engine, renderer, limits, params, routes=shape)
    problem = sample("Find x.", make_image(), id="x")
    return list(await asyncio.gather(*(loop.run(problem, ImageEnv, seed=seed) for seed in range(4))))


def assert_routed(trajectories: list[Trajectory], mixture: Path) -> None:
    network = PolicyModel.load(mixture)
    assert any(len(trajectory.turns) == 3 for trajectory in trajectories)
    for trajectory in trajectories:
        assert trajectory.end_reason.is_valid, trajectory
        found = trajectory.routes_RLK
        assert found is not None and found.dtype == np.uint8
        own = own_experts(network, trajectory)[: trajectory.turns[-1].end - 1]
        assert np.array_equal(np.sort(found), np.sort(own))


def test_an_episode_on_a_server_has_the_experts_that_the_network_chose(mixture: Path) -> None:
    renderer = Renderer.from_checkpoint(mixture)
    shape = ModelFacts.load(mixture).routes
    assert shape == RouteShape(num_layers=3, num_experts=4, top_k=2)
    with serving(mixture, "--enable-return-routed-experts", "--has-cache") as url:
        given = external(url, routes=shape)
        assert_routed(with_engine(given, renderer, lambda engine: play(engine, renderer, shape)), mixture)
        misbehave(url, "generate", "answer without experts")
        assert_routed(with_engine(given, renderer, lambda engine: play(engine, renderer, shape)), mixture)
        assert all(t.routes_RLK is None for t in with_engine(given, renderer, lambda e: play(e, renderer, None)))
        misbehave(url, "generate", *["answer with other experts"] * 4)
        ends = {t.end_reason for t in with_engine(given, renderer, lambda engine: play(engine, renderer, shape))}
        assert ends == {EndReason.INVALID_STREAM}


def test_an_episode_goes_on_elsewhere_and_over_pauses_with_the_experts_that_it_has(
    mixture: Path, tmp_path: Path
) -> None:
    renderer = Renderer.from_checkpoint(mixture)
    shape = ModelFacts.load(mixture).routes

    async def disturbed(engine: SGLangEngine) -> list[Trajectory]:
        assert engine.capabilities.gives_routes
        playing = asyncio.create_task(play(engine, renderer, shape))
        for _ in range(3):
            await asyncio.sleep(0.1)
            await engine.pause()
            await engine.resume()
        victim = max(engine.servers.all, key=lambda server: server.num_sessions).process
        assert isinstance(victim, LocalProcess) and not playing.done()
        os.killpg(victim.pid, signal.SIGKILL)
        return await playing

    given = settings(mixture, tmp_path, servers=2, slow_s=0.1, routes=shape)
    assert_routed(with_engine(given, renderer, disturbed), mixture)
