"""Claims about the embedded engine: what it samples, and that its log-probs are those of a forward over the stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents.engines.hf import HFEngine
from agents.engines.hf_batch import BatchTurn, CachedPrefix, Sampler
from agents.engines.pending_turn import PendingTurn
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import sampling_logprobs
from agents.rendering.renderer import Renderer
from agents.types import Completion, GenerateRequest, SamplingDistribution, SamplingParams
from envs.types import Message
from tests.budget import examples
from tests.builders import full_logprobs, mixed_logprobs, play, request, sampling
from tests.prompts import make_image, question
from tests.tiny_models import write_tiny_model

SCORE: Message = {"role": "tool", "content": "Score 0.0: 70 is wrong. Try another way."}
ZOOMED: Message = {
    "role": "tool",
    "content": [{"type": "image", "image": make_image(64, 96, seed=9)}, {"type": "text", "text": "zoomed"}],
}
BOTH: Message = {
    "role": "user",
    "content": [{"type": "image", "image": make_image(32, 32, seed=s)} for s in (4, 5)],
}


@dataclass(frozen=True, eq=False)
class Conversation:
    """What one session was asked and wrote, turn by turn."""

    requests: list[GenerateRequest]
    completions: list[Completion]


async def converse(
    engine: HFEngine, renderer: Renderer, first: GenerateRequest, replies: Sequence[Message]
) -> Conversation:
    """Let the engine write a turn, answer it, and so on; every reply is followed by one more turn."""
    talk = Conversation([first], [])
    async with engine.session() as session:
        talk.completions.append(await session.generate(first))
        for reply in replies:
            before, written = talk.requests[-1], talk.completions[-1]
            suffix = renderer.suffix([reply], written.ids[-1])
            following = replace(
                request(suffix, first.sampling, before=before, written=written),
                max_new_tokens=first.max_new_tokens,
                seed=before.seed + 1,
            )
            talk.requests.append(following)
            talk.completions.append(await session.generate(following))
    return talk


def assert_same_as_full_forward(model: PolicyModel, talk: Conversation) -> None:
    last, written = talk.requests[-1], talk.completions[-1]
    table = full_logprobs(model, last.ids + written.ids, last.images, last.sampling)
    for asked, done in zip(talk.requests, talk.completions, strict=True):
        places = torch.arange(len(done.ids)) + len(asked.ids) - 1
        expected = table[places, torch.tensor(done.ids)]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="session", params=["qwen3_vl", "qwen3_5"])
def checkpoint(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint folder of a network that has attention alone, and of one whose layers have states."""
    if request.param == "qwen3_vl":
        return checkpoint
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, request.param, checkpoint, weight_scale=2.0)
    return folder


@pytest.fixture(scope="module")
def network(checkpoint) -> PolicyModel:
    """The tiny network, not to be changed."""
    return PolicyModel.load(checkpoint)


@pytest.fixture(scope="module")
def engine(network: PolicyModel) -> HFEngine:
    return HFEngine(network, max_batch=16)


def test_logprobs_of_a_ragged_batch_over_several_turns_equal_a_forward_over_the_whole_stream(
    engine: HFEngine, renderer: Renderer
) -> None:
    params = sampling(renderer)
    plans = [
        (question("Find x."), 3, [SCORE, SCORE]),
        (question("Find the area of the shaded region.", make_image(96, 64)), 17, [ZOOMED, SCORE]),
        (question("y?"), 9, [BOTH]),
        (question("Two figures.", make_image(64, 64, 1), make_image(32, 96, 2)), 6, []),
        (question("Two figures.", make_image(64, 64, 1), make_image(64, 64, 1)), 30, [SCORE, ZOOMED]),
    ]

    async def all_at_once() -> list[Conversation]:
        return await asyncio.gather(
            *(
                converse(engine, renderer, request(renderer.prompt(prompt), params, budget, seed=number), replies)
                for number, (prompt, budget, replies) in enumerate(plans)
            )
        )

    for talk in asyncio.run(all_at_once()):
        assert_same_as_full_forward(engine.model, talk)


def test_a_group_that_shares_one_prompt_writes_different_texts_with_true_logprobs(
    engine: HFEngine, renderer: Renderer
) -> None:
    prompt = renderer.prompt(question("Find x.", make_image(96, 96)))
    firsts = [request(prompt, sampling(renderer), 8, seed=seed) for seed in range(6)]

    async def group() -> list[Conversation]:
        return await asyncio.gather(*(converse(engine, renderer, first, [ZOOMED]) for first in firsts))

    talks = asyncio.run(group())
    assert len({talk.completions[0].ids for talk in talks}) == 6
    for talk in talks:
        assert_same_as_full_forward(engine.model, talk)


def test_groups_of_two_prompts_and_a_session_of_its_own_have_true_logprobs_turn_by_turn(
    engine: HFEngine, renderer: Renderer
) -> None:
    """Rows end one by one, some sessions have more turns than others, and one prompt is longer by an image."""
    prompts = [
        renderer.prompt(question(text, *shown)) for text, *shown in (("x?", make_image(96, 96)), ("y?",), ("Find z.",))
    ]
    plans = [(0, 5), (1, 9), (0, 20), (2, 7), (1, 3), (0, 11), (1, 30)]
    firsts = [
        (
            request(prompts[which], replace(sampling(renderer), stop_ids=()), budget, seed=number),
            [SCORE, ZOOMED][: number % 3],
        )
        for number, (which, budget) in enumerate(plans)
    ]

    async def all_at_once() -> list[Conversation]:
        return await asyncio.gather(*(converse(engine, renderer, first, replies) for first, replies in firsts))

    for talk in asyncio.run(all_at_once()):
        assert_same_as_full_forward(engine.model, talk)


def test_a_prompt_that_ends_in_a_image_is_read_by_each_session(engine: HFEngine, renderer: Renderer) -> None:
    prompt = renderer.prompt(question("Find x.", make_image(96, 96)))
    end = len(prompt.ids) - prompt.ids[::-1].index(renderer.image_token_id)
    firsts = [request(replace(prompt, ids=prompt.ids[:end]), sampling(renderer), 8, seed=seed) for seed in range(2)]

    async def group() -> list[Conversation]:
        return await asyncio.gather(*(converse(engine, renderer, first, []) for first in firsts))

    for talk in asyncio.run(group()):
        assert_same_as_full_forward(engine.model, talk)


@examples(12)
@given(
    plan=st.lists(
        st.tuples(
            st.integers(0, 2),  # images in the prompt
            st.integers(1, 14),  # budget of every turn
            st.lists(st.sampled_from([SCORE, ZOOMED, BOTH]), max_size=2),
            st.sampled_from(["x?", "Find the measure of angle ABC in the figure."]),
        ),
        min_size=1,
        max_size=4,
    ),
    max_batch=st.integers(1, 4),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)
def test_random_conversations_have_true_logprobs(
    network: PolicyModel, renderer: Renderer, plan: list, max_batch: int, temperature: float
) -> None:
    engine, params = HFEngine(network, max_batch=max_batch), sampling(renderer, temperature)

    async def all_at_once() -> list[Conversation]:
        talks = []
        for seed, (num_images, budget, replies, text) in enumerate(plan):
            prompt = renderer.prompt(question(text, *(make_image(32 + 32 * k, 64, seed=k) for k in range(num_images))))
            talks.append(converse(engine, renderer, request(prompt, params, budget, seed=seed), replies))
        return await asyncio.gather(*talks)

    for talk in asyncio.run(all_at_once()):
        assert_same_as_full_forward(network, talk)


def test_a_seed_gives_the_same_ids_whatever_else_is_in_the_batch(network: PolicyModel, renderer: Renderer) -> None:
    params = sampling(renderer)
    requests = [
        request(renderer.prompt(question("Find x." * (1 + k % 3), *[make_image(seed=k)] * (k % 2))), params, 10, seed=k)
        for k in range(6)
    ]
    alone = [asyncio.run(play(HFEngine(network), [asked]))[0] for asked in requests]
    for max_batch in (1, 2, 5, 64):
        together = asyncio.run(play(HFEngine(network, max_batch=max_batch), requests))
        assert [done.ids for done in together] == [done.ids for done in alone]
    reverse = asyncio.run(play(HFEngine(network), requests[::-1]))
    assert [done.ids for done in reverse] == [done.ids for done in alone[::-1]]


def test_another_seed_gives_other_ids(engine: HFEngine, renderer: Renderer) -> None:
    prompt = renderer.prompt(question("Find x."))
    one, same, other = asyncio.run(
        play(engine, [request(prompt, sampling(renderer), 20, seed=seed) for seed in (1, 1, 2)])
    )
    assert one == same
    assert one.ids != other.ids


def test_tokens_are_drawn_with_the_probabilities_that_are_reported(engine: HFEngine, renderer: Renderer) -> None:
    prompt = renderer.prompt(question("Find x."))
    params = sampling(renderer, temperature=0.6)
    draws = 2000
    requests = [request(prompt, params, 1, seed=seed) for seed in range(draws)]
    drawn = np.bincount(
        [engine_done.ids[0] for engine_done in asyncio.run(play(HFEngine(engine.model, max_batch=draws), requests))],
        minlength=len(renderer.tokenizer),
    )
    expected = full_logprobs(engine.model, [*prompt.ids, 0], (), params)[-1].exp().double().detach().numpy()
    common = np.argsort(expected)[-8:]
    error = np.sqrt(expected[common] * (1 - expected[common]) / draws)
    assert (np.abs(drawn[common] / draws - expected[common]) < 4 * error).all()


def test_suppressed_ids_are_never_sampled_and_have_no_probability(engine: HFEngine, renderer: Renderer) -> None:
    prompt = renderer.prompt(question("Find x."))
    free = SamplingParams(temperature=1.0, stop_ids=())
    likely = full_logprobs(engine.model, [*prompt.ids, 0], (), free)[-1].topk(100).indices.tolist()
    suppressed = replace(free, suppressed_ids=tuple(likely))
    done = asyncio.run(play(engine, [request(prompt, suppressed, 40, seed=seed) for seed in range(10)]))
    assert not {i for completion in done for i in completion.ids} & set(likely)
    without = asyncio.run(play(engine, [request(prompt, free, 40, seed=seed) for seed in range(10)]))
    assert {i for completion in without for i in completion.ids} & set(likely)


def kept_by_hand(logprobs_V: torch.Tensor, params: SamplingParams) -> set[int]:
    """Return the ids that may be drawn, one after the other as SGLang's sampler cuts them."""
    kept: set[int] = set()
    before = 0.0
    most = float(logprobs_V.max().exp())
    for token in logprobs_V.argsort(descending=True).tolist()[: params.top_k]:
        probability = float(logprobs_V[token].exp())
        if before <= params.top_p and probability >= params.min_p * most:
            kept.add(token)
        before += probability
    return kept


@pytest.mark.parametrize(
    "cuts",
    [{"top_k": 5}, {"top_k": 256, "top_p": 0.6}, {"top_k": 3, "top_p": 0.9}, {"top_k": 40, "min_p": 0.2}],
    ids=str,
)
def test_tokens_are_drawn_from_their_sets_with_the_log_probs_among_these(
    cuts: dict[str, Any], engine: HFEngine, renderer: Renderer
) -> None:
    prompt = renderer.prompt(question("Find x."))
    whole = replace(sampling(renderer, temperature=1.3), stop_ids=())
    params = replace(whole, **cuts)
    # Beside turns that are drawn from all ids, and a turn that ends early: its row is left out of the batch.
    asked = [request(prompt, whole, 9, seed=50), *(request(prompt, params, 3 + 8 * n, seed=n) for n in range(4))]
    plain, *done = asyncio.run(play(engine, asked))
    assert plain.kept_NK is None
    for completion in done:
        table = full_logprobs(engine.model, prompt.ids + completion.ids, (), params)[len(prompt.ids) - 1 :].detach()
        assert completion.kept_NK is not None and completion.kept_NK.shape == (len(completion.ids), params.top_k)
        for token, logprob, kept_K, row_V in zip(
            completion.ids, completion.logprobs, completion.kept_NK.tolist(), table, strict=True
        ):
            assert set(kept_K) == kept_by_hand(row_V, params) and token in kept_K
            among = row_V[sorted(set(kept_K))].logsumexp(-1)
            assert logprob == pytest.approx(float(row_V[token] - among), abs=1e-5)
    assert any(len(set(kept_K)) > 1 for completion in done for kept_K in completion.kept_NK.tolist())


def test_a_pause_keeps_the_sets_of_the_tokens_before_it() -> None:
    asked = GenerateRequest((1,), (), 30, SamplingParams(top_k=2), seed=11)
    turn = PendingTurn(asked)
    turn.append([4], [-1.0], np.array([[4, 5]], dtype=np.int32))
    turn.append([], [])
    turn.append([7, 6], [-1.0, -1.0], np.array([[7, 7], [6, 1]], dtype=np.int32))
    kept = turn.completion().kept_NK
    assert kept is not None and kept.tolist() == [[4, 5], [7, 7], [6, 1]]


def test_sampling_logprobs_are_a_softmax_over_what_is_left() -> None:
    logits = torch.tensor([[0.0, 2.0, 4.0, 100.0]])
    got = sampling_logprobs(logits, SamplingDistribution(2.0, (3,)))
    norm = np.log(1 + np.e + np.e**2)  # logits / 2 are 0, 1, 2
    assert got[0].tolist() == pytest.approx([-norm, 1 - norm, 2 - norm, -np.inf])


def test_temperature_zero_takes_the_likeliest_token_and_reports_logprobs_of_temperature_one(
    engine: HFEngine, renderer: Renderer
) -> None:
    greedy = sampling(renderer, temperature=0.0)
    prompt = renderer.prompt(question("Find x.", make_image()))
    (done,) = asyncio.run(play(engine, [request(prompt, greedy, 10, seed=3)]))
    plain = sampling(renderer, temperature=1.0)
    table = full_logprobs(engine.model, prompt.ids + done.ids, prompt.images, plain)[len(prompt.ids) - 1 :]
    assert list(done.ids) == table.argmax(-1).tolist()
    assert done.logprobs == pytest.approx(table.max(-1).values.tolist(), abs=1e-5)


def test_a_turn_ends_with_its_stop_id(engine: HFEngine, renderer: Renderer) -> None:
    prompt = renderer.prompt(question("Find x."))
    free = SamplingParams(stop_ids=())
    (long,) = asyncio.run(play(engine, [request(prompt, free, 30)]))
    assert (len(long.ids), long.finish) == (30, "length")
    stop = long.ids[11]
    (short,) = asyncio.run(play(engine, [request(prompt, replace(free, stop_ids=(stop,)), 30)]))
    assert short.finish == "stop"
    assert short.ids == long.ids[: long.ids.index(stop) + 1]
    assert short.prompt_length == len(prompt.ids)


def test_a_stop_id_on_the_last_token_of_the_budget_is_a_stop(engine: HFEngine, renderer: Renderer) -> None:
    prompt = renderer.prompt(question("Find x."))
    (one,) = asyncio.run(play(engine, [request(prompt, SamplingParams(), 1)]))
    (same,) = asyncio.run(play(engine, [request(prompt, SamplingParams(stop_ids=one.ids), 1)]))
    assert (one.finish, same.finish) == ("length", "stop")


def test_more_sessions_than_places_all_finish_also_in_a_second_event_loop(
    network: PolicyModel, renderer: Renderer
) -> None:
    engine = HFEngine(network, max_batch=3)
    prompt = renderer.prompt(question("Find x."))
    requests = [request(prompt, sampling(renderer), 1 + seed % 5, seed=seed) for seed in range(11)]
    first = asyncio.run(play(engine, requests))
    second = asyncio.run(play(engine, requests))
    assert [done.ids for done in first] == [done.ids for done in second]


def test_a_cancelled_request_does_not_hold_up_the_others(network: PolicyModel, renderer: Renderer) -> None:
    engine = HFEngine(network)
    prompt = renderer.prompt(question("Find x."))
    patient, hasty = (request(prompt, sampling(renderer), 200, seed=seed) for seed in (1, 2))

    async def story(delay_s: float) -> list[list[Completion] | BaseException]:
        tasks = [asyncio.create_task(play(engine, [asked])) for asked in (patient, hasty)]
        await asyncio.sleep(delay_s)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    (alone,) = asyncio.run(play(engine, [patient]))
    for delay_s in (0.0, 0.05):  # before its batch has begun, and in the middle of it
        kept, gone = asyncio.run(asyncio.wait_for(story(delay_s), 20))
        assert isinstance(gone, asyncio.CancelledError)
        assert isinstance(kept, list)
        assert kept[0].ids == alone.ids


def test_a_session_that_waits_for_its_environment_is_waited_for(network: PolicyModel, renderer: Renderer) -> None:
    engine = HFEngine(network)
    prompt = renderer.prompt(question("Find x."))
    asked = [request(prompt, sampling(renderer), 4, seed=seed) for seed in range(2)]
    batches: list[int] = []
    write = engine.write

    def counting(turns: Sequence) -> None:
        batches.append(len(turns))
        write(turns)

    engine.write = counting  # type: ignore[method-assign]

    async def late(request: GenerateRequest) -> Completion:
        async with engine.session() as session:
            await asyncio.sleep(0.1)
            return await session.generate(request)

    async def story() -> None:
        await asyncio.gather(play(engine, asked[:1]), late(asked[1]))

    asyncio.run(story())
    assert batches == [2]


def test_a_session_whose_environment_hangs_holds_up_nobody_for_long(network: PolicyModel, renderer: Renderer) -> None:
    engine = HFEngine(network, max_wait_s=0.1)
    asked = request(renderer.prompt(question("Find x.")), sampling(renderer), 4)

    async def story() -> list[Completion]:
        async with engine.session():  # open, and never asks for a turn
            return await asyncio.wait_for(play(engine, [asked]), 10)

    assert len(asyncio.run(story())[0].ids) == 4


def test_a_fault_in_the_network_reaches_every_waiting_episode(network: PolicyModel, renderer: Renderer) -> None:
    prompt = renderer.prompt(question("Find x."))
    good = request(prompt, sampling(renderer), 4)
    bad = replace(good, ids=(len(renderer.tokenizer) + 5,))

    async def story() -> Sequence[object]:
        engine = HFEngine(network)
        return await asyncio.gather(play(engine, [good]), play(engine, [bad]), return_exceptions=True)

    assert all(isinstance(outcome, IndexError) for outcome in asyncio.run(asyncio.wait_for(story(), 20)))


def test_turns_of_two_temperatures_wait_for_each_other_and_are_written_in_batches_of_their_own(
    network: PolicyModel, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an evaluation beside training asks for them."""
    engine, prompt = HFEngine(network), renderer.prompt(question("Find x."))
    write, batches = HFEngine.write, []

    def noted(self: HFEngine, turns: Sequence[BatchTurn]) -> None:
        batches.append([turn.request.sampling.temperature for turn in turns])
        write(self, turns)

    monkeypatch.setattr(HFEngine, "write", noted)
    mixed = [request(prompt, sampling(renderer, temperature), 4) for temperature in (1.0, 0.0, 1.0, 0.0)]
    alone = [asyncio.run(play(HFEngine(network), [asked]))[0].ids for asked in mixed]
    batches.clear()
    assert [completion.ids for completion in asyncio.run(play(engine, mixed))] == alone
    assert batches == [[1.0, 1.0], [0.0, 0.0]]


def test_new_weights_change_what_is_written_and_stamp_their_version(model: PolicyModel, renderer: Renderer) -> None:
    engine = HFEngine(model)
    asked = request(renderer.prompt(question("Find x.", make_image())), sampling(renderer), 12)
    (before,) = asyncio.run(play(engine, [asked]))
    torch.manual_seed(1)
    weights = {name: p.detach() * (1 + 0.3 * torch.randn_like(p)) for name, p in model.named_parameters()}
    engine.load_weights(weights, version=7)
    (after,) = asyncio.run(play(engine, [asked]))
    assert (before.versions[0][0], after.versions[0][0]) == (0, 7)
    assert before.ids != after.ids
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert_same_as_full_forward(model, Conversation([asked], [after]))


def test_weights_of_another_network_are_refused(model: PolicyModel) -> None:
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    weights["stray"] = weights.pop("backbone.model.visual.pos_embed.weight")
    with pytest.raises(AssertionError, match="pos_embed"):
        HFEngine(model).load_weights(weights, version=1)


def test_a_stream_that_does_not_extend_what_was_read_is_refused(engine: HFEngine, renderer: Renderer) -> None:
    first = request(renderer.prompt(question("Find x.")), sampling(renderer), 4)

    async def story() -> None:
        async with engine.session() as session:
            await session.generate(first)
            await session.generate(replace(first, ids=(first.ids[0] + 1, *first.ids[1:], 5, 5, 5)))

    with pytest.raises(AssertionError, match="extend"):
        asyncio.run(story())


def other_weights(model: PolicyModel, noise: float = 0.3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: p.detach() * (1 + noise * torch.randn_like(p)) for name, p in model.named_parameters()}


async def when(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; fail where it never does."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


class Slowed(HFEngine):
    """Counts batches and their decoding passes, and takes a millisecond more for each, to let a test act between."""

    def __init__(self, model: PolicyModel, **options: Any) -> None:
        super().__init__(model, **options)
        self.num_batches = self.num_forwards = 0

    def _decode(self, cache: Any, logits_BV: torch.Tensor, positions_B: torch.Tensor, turns: Sequence) -> None:
        self.rows = turns
        self.num_batches += 1
        update = cache.advance

        def advance() -> None:
            self.num_forwards += 1
            time.sleep(0.001)
            update()

        cache.advance = advance
        super()._decode(cache, logits_BV, positions_B, turns)


async def converse_with_pauses(
    engine: Slowed, renderer: Renderer, firsts: Sequence[GenerateRequest], replies: Sequence[Message], every: int
) -> list[Conversation]:
    """Let all conversations run at once, and pause and resume the engine each time that it has made `every` passes."""
    talking = asyncio.gather(*(converse(engine, renderer, first, replies) for first in firsts))
    while not talking.done():
        mark = engine.num_forwards + every
        await when(lambda mark=mark: engine.num_forwards >= mark or talking.done())
        await engine.pause()
        passes = engine.num_forwards
        await asyncio.sleep(0.003)
        assert engine.num_forwards == passes, "nothing is written during a pause"
        await engine.resume()
    return await talking


def test_pauses_without_new_weights_change_nothing(network: PolicyModel, renderer: Renderer) -> None:
    params = SamplingParams(stop_ids=(), suppressed_ids=renderer.suppressed_ids)
    firsts = [
        request(renderer.prompt(question("Find x." * (1 + k), *[make_image(seed=k)] * (k % 2))), params, 20 + k, seed=k)
        for k in range(3)
    ]
    engine = Slowed(network)
    plain = [asyncio.run(converse(HFEngine(network), renderer, first, [ZOOMED])) for first in firsts]
    paused = asyncio.run(converse_with_pauses(engine, renderer, firsts, [ZOOMED], every=7))
    assert engine.num_batches >= 6  # two turns, each cut more than once
    for one, other in zip(plain, paused, strict=True):
        for expected, got in zip(one.completions, other.completions, strict=True):
            assert (got.ids, got.finish, got.versions) == (expected.ids, expected.finish, expected.versions)
            assert (got.prompt_length, got.num_cached) == (expected.prompt_length, expected.num_cached)
            assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_turn_goes_on_under_new_weights_and_says_which_token_is_whose(model: PolicyModel, renderer: Renderer) -> None:
    """The tokens of each version have the log-probs that its weights give them; a later turn reads all anew.

    Two sessions have one prompt, which they read together under the old weights but can no longer under the new ones.
    """
    engine = Slowed(model)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    new = other_weights(model)
    params = SamplingParams(stop_ids=(), suppressed_ids=renderer.suppressed_ids)
    prompt = renderer.prompt(question("Find x.", make_image()))
    firsts = [request(prompt, params, 40, seed=seed) for seed in (3, 4)]

    async def story() -> list[Conversation]:
        talking = asyncio.gather(*(converse(engine, renderer, first, [ZOOMED]) for first in firsts))
        await when(lambda: engine.num_forwards >= 10)
        await engine.pause()
        engine.load_weights(new, version=5)
        await engine.resume()
        return await talking

    talks = asyncio.run(story())
    assert talks[0].completions[0].ids != talks[1].completions[0].ids
    for talk in talks:
        (version, count), (last, rest) = talk.completions[0].versions
        assert (version, last, count + rest) == (0, 5, 40)
        assert 10 <= count < 40
        second = talk.completions[1]
        assert (second.versions, second.num_cached) == (((5, 40),), len(prompt.ids) + 39)
        assert_same_as_full_forward(model, Conversation(talk.requests[1:], talk.completions[1:]))
    tables = []
    for weights in (old, new):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        tables.append([written_logprobs(model, talk).detach() for talk in talks])
    for before, after, talk in zip(*tables, talks, strict=True):
        count = talk.completions[0].versions[0][1]
        expected = torch.cat([before[:count], after[count:]])
        torch.testing.assert_close(torch.tensor(talk.completions[0].logprobs), expected, rtol=0, atol=1e-5)
        assert (before[count:] - after[count:]).abs().max() > 0.01  # the weights do differ


def written_logprobs(model: PolicyModel, talk: Conversation) -> torch.Tensor:
    """Return the log-probs of a conversation's first model turn, from a forward over all of it."""
    asked, done = talk.requests[0], talk.completions[0]
    places = torch.arange(len(done.ids)) + len(asked.ids) - 1
    return full_logprobs(model, asked.ids + done.ids, asked.images, asked.sampling)[places, torch.tensor(done.ids)]


def test_new_weights_between_two_turns_make_the_next_one_read_its_stream_anew(
    model: PolicyModel, renderer: Renderer
) -> None:
    engine, new = HFEngine(model), other_weights(model)
    first = request(renderer.prompt(question("Find x.", make_image())), sampling(renderer), 8, seed=3)

    async def story() -> tuple[GenerateRequest, Completion]:
        async with engine.session() as session:
            written = await session.generate(first)
            await engine.pause()
            engine.load_weights(new, version=1)
            await engine.resume()
            second = request(renderer.suffix([ZOOMED], written.ids[-1]), first.sampling, before=first, written=written)
            return second, await session.generate(second)

    second, done = asyncio.run(story())
    assert (done.versions, done.num_cached) == (((1, len(done.ids)),), 0)
    assert_same_as_full_forward(model, Conversation([second], [done]))


def test_with_its_cache_kept_a_session_goes_on_from_what_older_weights_have_read(
    model: PolicyModel, renderer: Renderer, tmp_path: Path
) -> None:
    """Computed by Transformers alone: keys and values of the old weights, and the new weights after them."""
    engine = Slowed(model, keeps_kv_cache=True)
    model.save(tmp_path / "old", torch.float32)
    new = other_weights(model, noise=0.1)
    params = SamplingParams(stop_ids=(), suppressed_ids=renderer.suppressed_ids)
    first = request(renderer.prompt(question("Find x.")), params, 40, seed=3)

    async def story() -> tuple[Conversation, Conversation]:
        talking = asyncio.create_task(converse(engine, renderer, first, [SCORE]))
        await when(lambda: engine.num_forwards >= 10)
        await engine.pause()
        engine.load_weights(new, version=1)
        await engine.resume()
        return await talking, await converse(engine, renderer, first, [])

    talk, later = asyncio.run(story())
    (_, count), (_, rest) = talk.completions[0].versions
    assert count >= 10 and rest > 0
    assert talk.completions[1].num_cached == len(first.ids) + 39
    assert (later.completions[0].versions, later.completions[0].num_cached) == (((1, 40),), 0)
    assert_same_as_full_forward(model, later)  # a session that began under the new weights has read nothing before
    stream = talk.requests[1].ids + talk.completions[1].ids
    num_old = len(first.ids) + count - 1  # the last id that was drawn is not read yet
    model.save(tmp_path / "new", torch.float32)
    expected = mixed_logprobs(tmp_path / "old", tmp_path / "new", stream, num_old, params)
    fresh = full_logprobs(model, stream, (), params)
    for asked, done in zip(talk.requests, talk.completions, strict=True):
        places = torch.arange(len(done.ids)) + len(asked.ids) - 1
        given, ids = torch.tensor(done.logprobs), torch.tensor(done.ids)
        torch.testing.assert_close(given, expected[places, ids], rtol=0, atol=1e-5)
        assert (given - fresh[places, ids])[-rest:].abs().max() > 1e-3  # reading anew gives others


def test_weights_that_a_run_goes_back_to_leave_no_cache(model: PolicyModel, renderer: Renderer) -> None:
    engine = Slowed(model, keeps_kv_cache=True)
    params = SamplingParams(stop_ids=(), suppressed_ids=renderer.suppressed_ids)
    first = request(renderer.prompt(question("Find x.")), params, 40, seed=3)
    engine.weight_version = 3

    async def story() -> Conversation:
        talking = asyncio.create_task(converse(engine, renderer, first, [SCORE]))
        await when(lambda: engine.num_forwards >= 10)
        await engine.pause()
        engine.load_weights(other_weights(model, noise=0.1), version=2)
        await engine.resume()
        return await talking

    talk = asyncio.run(story())
    assert_same_as_full_forward(model, Conversation(talk.requests[1:], talk.completions[1:]))


def test_weights_change_only_while_paused_or_between_rollouts(model: PolicyModel, renderer: Renderer) -> None:
    engine, weights = HFEngine(model), dict(model.named_parameters())

    async def story() -> None:
        async with engine.session():
            with pytest.raises(AssertionError, match="1 sessions are open"):
                engine.load_weights(weights, version=1)

    asyncio.run(story())


def test_a_cancelled_turn_is_written_no_further_and_its_session_can_go_on(
    network: PolicyModel, renderer: Renderer
) -> None:
    engine = Slowed(network)
    params = SamplingParams(stop_ids=(), suppressed_ids=renderer.suppressed_ids)
    asked = request(renderer.prompt(question("Find x.")), params, 3000)
    short = replace(asked, max_new_tokens=5)

    async def story() -> tuple[int, Completion]:
        async with engine.session() as session:
            turn = asyncio.create_task(session.generate(asked))
            await when(lambda: engine.num_forwards >= 5)
            turn.cancel()
            await asyncio.wait([turn])
            passes = engine.num_forwards
            done = await session.generate(short)
            return engine.num_forwards - passes, done

    passes, done = asyncio.run(story())
    assert passes < 100  # those of the short turn, and the few that the cancelled one may still have made
    assert (done.num_cached, done.prompt_length) == (0, len(asked.ids))
    assert_same_as_full_forward(network, Conversation([short], [done]))


def test_a_turn_that_was_written_as_it_was_cancelled_is_forgotten(network: PolicyModel, renderer: Renderer) -> None:
    """Who is cancelled between the last token and its hearing of it may ask again from where it was."""
    engine = Slowed(network)
    asked = request(renderer.prompt(question("Find x.")), SamplingParams(stop_ids=()), 5)
    other = replace(asked, ids=(*asked.ids, 35, 36))

    async def story() -> Completion:
        async with engine.session() as session:
            turn = asyncio.create_task(session.generate(asked))
            await when(lambda: engine.num_forwards > 0)
            while not engine.rows[0].future.done():
                await asyncio.sleep(0)
            assert not turn.done()
            turn.cancel()
            await asyncio.wait([turn])
            assert turn.cancelled()
            return await session.generate(other)

    done = asyncio.run(story())
    assert_same_as_full_forward(network, Conversation([other], [done]))


def test_every_token_is_drawn_with_the_next_number_of_its_turns_random_stream() -> None:
    async def draws() -> list[int]:
        asked = GenerateRequest((1,), (), 30, SamplingParams(), seed=11)
        turn = BatchTurn(asked, CachedPrefix(), asyncio.get_running_loop().create_future())
        sampler = Sampler([turn], torch.device("cpu"))
        while sampler.alive[0]:
            sampler.draw(torch.zeros(1, 1000))
        return sampler.release(0).ids

    uniforms = np.random.default_rng(11).random(30)
    assert asyncio.run(draws()) == np.floor(uniforms * 1000).astype(int).tolist()


def test_of_a_batch_only_the_cancelled_row_ends(network: PolicyModel, renderer: Renderer) -> None:
    engine = Slowed(network)
    params = SamplingParams(stop_ids=(), suppressed_ids=renderer.suppressed_ids)
    kept, gone = (request(renderer.prompt(question("Find x.")), params, 60, seed=seed) for seed in (1, 2))

    async def story() -> list[Completion]:
        tasks = [asyncio.create_task(play(engine, [asked])) for asked in (kept, gone)]
        await when(lambda: engine.num_forwards >= 5)
        tasks[1].cancel()
        return await tasks[0]

    (done,) = asyncio.run(story())
    assert [len(turn.ids) == 60 for turn in engine.rows] == [True, False]
    (alone,) = asyncio.run(play(HFEngine(network), [kept]))
    assert done.ids == alone.ids


def test_a_score_is_the_logprob_at_temperature_one_with_nothing_suppressed(
    network: PolicyModel, renderer: Renderer
) -> None:
    prompt = renderer.prompt(question("Two figures.", make_image(64, 64, 1), make_image(32, 96, 2)))
    ids = (*prompt.ids, 40, 41, 42)
    got = asyncio.run(HFEngine(network).score(ids, prompt.images))
    table = full_logprobs(network, ids, prompt.images, SamplingParams())
    expected = table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert got.dtype == np.float32
    assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert asyncio.run(HFEngine(network).score(ids[:1], ())).shape == (0,)


def test_closing_ends_the_running_batch_and_tells_who_waits(network: PolicyModel, renderer: Renderer) -> None:
    engine = Slowed(network)
    asked = request(renderer.prompt(question("Find x.")), SamplingParams(stop_ids=()), 3000)

    async def story() -> None:
        waiting = asyncio.create_task(play(engine, [asked]))
        await when(lambda: engine.num_forwards >= 5)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await asyncio.wait_for(play(engine, [asked]), 5)

    asyncio.run(story())
    assert engine.num_forwards < 1000
