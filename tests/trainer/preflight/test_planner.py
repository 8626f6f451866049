"""Claims about the planner: counts and seconds are the arithmetic by hand, the simulation loses nothing, and more GPUs
are never slower."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.model import STARTER_PATH
from envs.config.cli import exit_code, parse
from envs.errors import UserError
from tests.budget import examples
from trainer.config.run import RunConfig
from trainer.learner.layout import Layout as RankLayout
from trainer.learner.weights_io import meta_model
from trainer.plan import run
from trainer.preflight.memory_terms import GIB, count_values
from trainer.preflight.planner.calibrate import fit_line
from trainer.preflight.planner.costs import Costs, LearnerCosts
from trainer.preflight.planner.hardware import BUNDLED, CONSTANTS, Hardware
from trainer.preflight.planner.layout import Layout, Memory, ladder
from trainer.preflight.planner.search import Search, Wanted
from trainer.preflight.planner.shape import ModelShape
from trainer.preflight.planner.simulation import Forecast, Schedule, simulate
from trainer.preflight.planner.workload import EpisodeShape, GroupShape, Lengths, Recorded, TurnShape
from trainer.preflight.qwen3_vl import qwen3_vl_config

pytest.importorskip("simpy")

#: One layer of width 8, one head, 10 words. A machine that computes and reads for nothing unless a test says so.
TINY = ModelShape(
    parameters=1000,
    dense=500,
    experts=0,
    expert_share=0.0,
    head=80,
    layers=1,
    attention_width=8,
    kv_heads=1,
    head_size=8,
    patch_flops=0.0,
    patches_per_token=4,
)


def machine(**given: float) -> Hardware:
    values = {name: 1e9 if name.endswith(("_tflops", "gb_s")) else 0.0 for name in CONSTANTS}
    values |= {"memory_gib": 80.0, "gpus_per_host": 8.0, **given}
    return Hardware("test", dict.fromkeys(CONSTANTS, "test"), **values)


def layout(placement: str = "split", ranks: int = 1, servers: int = 1, cache_tokens: float = 1e9) -> Layout:
    return Layout(placement, LearnerCosts(ranks), servers, 1, "ipc", cache_tokens)  # type: ignore[arg-type]


def play(costs: Costs, schedule: Schedule, lengths: Lengths, where: Layout | None = None) -> Forecast:
    return simulate(costs, where or layout(), schedule, lengths.groups(schedule.group_size, 0))


EQUAL = Lengths(prompt=10, images=0, turns=2, turn_tokens=5, observation=3, tool_s=7.0, spread=0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As the checkpoints' indexes count them.
    [("2b", 2_127_532_032), ("30b-a3b", 31_070_754_032), ("235b-a22b", 235_670_022_896)],
)
def test_a_network_is_counted_as_by_hand(name: str, parameters: int) -> None:
    network = meta_model(qwen3_vl_config(name))
    shape, text = ModelShape.of(network.config, count_values(network.parameters())), network.config.text_config
    assert shape.parameters == parameters
    hidden, layers = text.hidden_size, text.num_hidden_layers
    attention = 2 * hidden * 128 * (text.num_attention_heads + text.num_key_value_heads)
    if name == "2b":
        assert shape.active == shape.dense == layers * (attention + 3 * hidden * 6144) and shape.experts == 0
    else:
        expert = 3 * hidden * text.moe_intermediate_size
        assert shape.dense == layers * (attention + 128 * hidden) and shape.experts == layers * 128 * expert
        assert shape.active == shape.dense + layers * 8 * expert
        assert shape.decode_values(1) == pytest.approx(shape.active + shape.head)
        assert shape.decode_values(4096) == pytest.approx(shape.dense + shape.experts + shape.head)
    assert shape.cache_values == 2 * layers * text.num_key_value_heads * 128
    assert shape.head == 151_936 * hidden


def test_a_decode_step_is_what_it_reads_or_computes_whichever_is_longer() -> None:
    reads = Costs(TINY, machine(memory_gb_s=1e-6, decode_step_s=0.25, decode_row_s=0.125))
    assert reads.decode_step_s(2, 100) == pytest.approx((2 * 580 + 2 * 100 * 16) / 1e3 + 0.25 + 0.25)
    computes = Costs(TINY, machine(prefill_tflops=1e-9))
    assert computes.decode_step_s(2, 100) == pytest.approx((2 * 2 * 580 + 4 * 100 * 8) / 1e3)
    wide = Costs(replace(TINY, kv_heads=2), machine(memory_gb_s=1e-6, collective_s=0.5))
    assert wide.decode_step_s(1, 0, tensor_parallel=4) == pytest.approx(2 * 580 / 4 / 1e3 + 2 * 0.5)
    assert wide.decode_step_s(0, 100, 4) - wide.decode_step_s(0, 0, 4) == pytest.approx(2 * 100 * 32 / 2 / 1e3)


def test_training_reads_a_prompt_once_and_counts_three_forwards() -> None:
    costs = Costs(TINY, machine(train_tflops=1e-12))
    group = GroupShape((EpisodeShape(4, (TurnShape(2, 1), TurnShape(1))), EpisodeShape(4, (TurnShape(3),))))
    assert [episode.stream for episode in group.episodes] == [8, 7] and group.trained_tokens == 4 + 4 + 3
    pairs = 10 + (36 - 10) + (28 - 10)
    by_hand = 3 * (2 * 11 * 500 + 4 * pairs * 8 + 2 * (3 + 3) * 80)
    assert costs.group_flops(group) == by_hand
    assert costs.train_s([group], LearnerCosts(1)) == pytest.approx(by_hand)
    assert costs.train_s([group] * 3, LearnerCosts(2)) == pytest.approx(2 * by_hand, rel=1e-6)
    assert costs.train_s([group] * 3, LearnerCosts(64)) == pytest.approx(by_hand, rel=1e-6)  # more ranks than prompts
    assert costs.train_s([group], LearnerCosts(1, recompute=1.0)) == pytest.approx(by_hand * 4 / 3)


def test_ranks_that_reshard_gather_for_every_micro_batch() -> None:
    costs = Costs(TINY, machine(link_gb_s=1e-6, network_gb_s=1e-7, ranks_s=1.0))
    assert costs.exchange_s(5, LearnerCosts(1)) == 0
    assert costs.exchange_s(5, LearnerCosts(4)) == pytest.approx(1 + 6 * 1000 * 0.75 / 1e3)
    assert costs.exchange_s(5, LearnerCosts(4, reshards=True)) == pytest.approx(1 + 5 * 8 * 1000 * 0.75 / 1e3)
    assert costs.exchange_s(5, LearnerCosts(16)) == pytest.approx(1 + 6 * 1000 * 15 / 16 / 1e2)


def test_a_synchronous_step_is_rollout_plus_training_plus_push_by_hand() -> None:
    """2 problems of 2 samples, two turns of 5 tokens, a tool of 7 s after each, 0.5 s a token, whatever the batch."""
    costs = Costs(TINY, machine(decode_step_s=0.5, update_s=3.0, push_s=2.0, turn_s=0.125))
    forecast = play(costs, Schedule(2, 2, 0, 100, steps=3), EQUAL)
    # The driver starts turns one after the other. The last of four joins the others' batch 0.375 s after the first.
    rollout = 2 * (5 * 0.5 + 7) + 4 * 0.125
    for step in forecast.steps:
        assert step.waited_s == pytest.approx(rollout, abs=0.25) and step.train_s == pytest.approx(3, rel=1e-3)
        assert step.ended - step.began == pytest.approx(step.waited_s + 3 + 2, rel=1e-3)
    exact = play(Costs(TINY, machine(decode_step_s=0.5, update_s=3.0, push_s=2.0)), Schedule(2, 2, 0, 100, 3), EQUAL)
    assert exact.step_s == pytest.approx(2 * (5 * 0.5 + 7) + 3 + 2, rel=1e-5)
    assert exact.samples_per_s == pytest.approx(4 / 24, rel=1e-5) and exact.tokens_per_s == pytest.approx(
        40 / 24, rel=1e-5
    )
    assert exact.busy["servers"] == pytest.approx(5 / 24, rel=1e-4)
    assert exact.busy["learner"] == pytest.approx(3 / 24, rel=1e-4)


def test_with_staleness_one_two_steps_share_a_rollout_training_and_push() -> None:
    """The groups of step k + 2 begin when step k has been pushed; nothing else is slow enough to wait for."""
    costs = Costs(TINY, machine(decode_step_s=0.5, update_s=3.0, push_s=2.0))
    ahead = play(costs, Schedule(2, 2, 1, 100, steps=8), EQUAL)
    assert ahead.step_s == pytest.approx((19 + 3 + 2) / 2, rel=1e-3) and ahead.limit == "episode latency"
    slow = play(replace(costs, hardware=replace(costs.hardware, update_s=40.0)), Schedule(2, 2, 1, 100, 8), EQUAL)
    assert slow.step_s == pytest.approx(40 + 2, rel=1e-3) and slow.limit == "learner"


def test_servers_pause_while_a_colocated_learner_trains() -> None:
    costs = Costs(TINY, machine(decode_step_s=0.5, update_s=40.0, release_s=1.0))
    lengths = replace(EQUAL, tool_s=0.0)
    forecast = play(costs, Schedule(2, 2, 4, 100, steps=8), lengths, layout("colocate"))
    assert forecast.busy["servers"] + forecast.busy["learner"] <= 1
    assert play(costs, Schedule(2, 2, 4, 100, 8), lengths).step_s < forecast.step_s


def test_a_tokenizer_process_serves_one_turn_after_the_other() -> None:
    """A serial server of constant service: N requests at once are all served after N services, as in D/D/1."""
    costs = Costs(TINY, machine(request_s=0.25))
    forecast = play(costs, Schedule(8, 4, 0, 1000, 2), replace(EQUAL, turns=1, tool_s=0.0))
    assert forecast.steps[0].waited_s == pytest.approx(32 * 0.25, rel=1e-4)
    assert forecast.limit == "tokenizer process" and forecast.busy["tokenizer process"] == pytest.approx(1, rel=1e-3)
    two = play(costs, Schedule(8, 4, 0, 1000, 2), replace(EQUAL, turns=1, tool_s=0.0), layout(servers=2))
    assert two.steps[0].waited_s == pytest.approx(16 * 0.25, rel=0.3)


def test_turns_that_wait_for_others_stop_their_server_less_often() -> None:
    """40 streams of about 600 tokens in three turns: 80 turns come while others are written."""

    def seconds(read_s: float, turn_wait_s: float) -> float:
        costs = Costs(TINY, machine(decode_step_s=0.01, read_s=read_s))
        lengths = replace(EQUAL, turns=3, turn_tokens=200, tool_s=0.0, spread=0.5)
        return play(costs, Schedule(5, 8, 0, 1000, 1, turn_wait_s), lengths).step_s

    alone, together = (seconds(0.05, wait_s) - seconds(0.0, wait_s) for wait_s in (0.0, 0.2))
    assert 80 * 0.05 < alone < 90 * 0.05 and together < alone / 2
    assert 0 < seconds(0.0, 0.2) - seconds(0.0, 0.0) <= 2 * 0.2  # what the longest stream's two turns wait


def test_turns_in_flight_are_sent_and_read_again_after_a_push() -> None:
    """Tokens take 16 s, training 2.5 s, a push 1 s. Of two steps' groups that overlap, the older see a push."""

    def sent(staleness: int) -> float:
        costs = Costs(TINY, machine(decode_step_s=0.5, update_s=2.5, push_s=1.0, request_s=1e-4))
        lengths = replace(EQUAL, turns=1, turn_tokens=32, tool_s=0.0)
        forecast = play(costs, Schedule(2, 2, staleness, 100, steps=40), lengths)
        turns = sum(len(group.episodes) for step in forecast.counted for group in step.groups)
        return forecast.busy["tokenizer process"] * forecast.seconds / 1e-4 / turns

    assert sent(0) == pytest.approx(1, rel=1e-3)
    assert sent(1) == pytest.approx((2 + 1) / 2, rel=0.05)
    assert sent(3) > 3


def test_with_its_cache_kept_a_push_costs_no_reading() -> None:
    """Reading is all that servers do. It takes as long as in synchronous steps, but for the last token of turns."""

    def read_s(staleness: int, keeps: bool = False) -> float:
        costs = Costs(TINY, machine(prefill_tflops=1e-9, update_s=2.5, request_s=0.5))
        schedule = Schedule(2, 2, staleness, 100, steps=40, turn_wait_s=0.0, keep_kv_cache=keeps)
        forecast = play(costs, schedule, replace(EQUAL, prompt=1000, turn_tokens=32))
        return forecast.busy["servers"] * forecast.seconds / len(forecast.counted)

    once = read_s(0)
    assert read_s(2, keeps=True) == pytest.approx(once, rel=0.08)
    assert read_s(2) > 1.2 * once


def test_a_server_stands_still_for_the_picture_of_each_new_prompt_and_of_each_stream_after_a_push() -> None:
    def encode_s(staleness: int, keeps: bool = False) -> float:
        costs = Costs(TINY, machine(decode_step_s=0.5, update_s=2.5, push_s=1.0, picture_s=0.25))
        schedule = Schedule(2, 2, staleness, 100, steps=40, turn_wait_s=0.0, keep_kv_cache=keeps)
        with_pictures, without = (
            play(costs, schedule, replace(EQUAL, prompt=10, images=images, tool_s=0.0)) for images in (4, 0)
        )
        busy = [made.busy["servers"] * made.seconds / len(made.counted) for made in (with_pictures, without)]
        return busy[0] - busy[1]

    once = encode_s(0)
    assert once == pytest.approx(2 * 0.25, rel=1e-3)
    assert encode_s(2, keeps=True) == pytest.approx(once, rel=0.1)
    assert encode_s(2) > 1.5 * once


def test_a_full_cache_makes_streams_wait() -> None:
    """A cache of two streams, constant service: 4 streams on 2 places take two services, as in D/D/2."""
    costs, lengths = Costs(TINY, machine(decode_step_s=0.5)), replace(EQUAL, turns=1, tool_s=0.0)
    wide = play(costs, Schedule(2, 2, 0, 100, 1), lengths)
    narrow = play(costs, Schedule(2, 2, 0, 100, 1), lengths, layout(cache_tokens=30))
    assert wide.steps[0].waited_s == pytest.approx(2.5, rel=1e-4)
    assert narrow.steps[0].waited_s == pytest.approx(5.0, rel=1e-4)


@examples(25)
@given(
    staleness=st.integers(0, 3),
    servers=st.integers(1, 3),
    placement=st.sampled_from(("split", "colocate")),
    concurrent=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_every_written_token_is_trained_on_once_or_is_ahead(
    staleness: int, servers: int, placement: str, concurrent: int, seed: int
) -> None:
    costs = Costs(TINY, machine(decode_step_s=0.01, update_s=0.7, push_s=0.1, turn_s=0.001, request_s=0.002))
    schedule = Schedule(3, 4, staleness, concurrent, steps=4)
    lengths = Lengths(prompt=20, images=0, turns=2.5, turn_tokens=30, observation=5, tool_s=0.2)
    where = layout(placement, servers=servers, cache_tokens=400)
    forecast = simulate(costs, where, schedule, lengths.groups(4, seed))
    trained = sum(group.model_tokens for step in forecast.steps for group in step.groups)
    assert forecast.tokens_written == pytest.approx(trained + forecast.tokens_ahead, abs=1e-3)
    assert staleness or forecast.tokens_ahead == pytest.approx(0, abs=1e-3)
    drawn = list(itertools.islice(lengths.groups(4, seed), 12))
    assert [group for step in forecast.steps for group in step.groups] == drawn
    assert all(0 <= age <= staleness for step in forecast.steps for age in step.ages)


def small_search(staleness: int = 0) -> Search:
    lengths = Lengths(prompt=200, images=64, turns=2, turn_tokens=200, observation=20)
    return Search.of("2b", Hardware.read("h100"), lengths, Schedule(8, 4, staleness, 1024, 3 + staleness))


@pytest.mark.parametrize("staleness", [0, 1])
def test_more_gpus_are_never_slower(staleness: int) -> None:
    search = small_search(staleness)
    rates = [search.best(number).forecast.samples_per_s for number in (2, 3, 4, 6, 8)]
    assert rates == sorted(rates) and rates[-1] > rates[0]
    for number in (2, 8):
        assert search.best(number).layout.num_gpus <= number


def test_what_the_user_fixes_is_kept() -> None:
    search = small_search()
    found = search.best(4, Wanted("split", num_servers=1, tensor_parallel=2)).layout
    assert (found.placement, found.num_servers, found.tensor_parallel) == ("split", 1, 2)


def test_weights_travel_as_in_a_run() -> None:
    with pytest.raises(UserError, match="--sync nccl: needs servers on GPUs of their own, got --placement colocate"):
        Wanted("colocate", transport="nccl")
    search = small_search()
    assert search.best(4, Wanted(transport="nccl")).layout.placement == "split"
    assert search.best(2, Wanted("colocate")).layout.transport == "ipc"
    assert search.best(16, Wanted("colocate", num_servers=16)).layout.transport == "disk"


def test_memory_is_that_of_the_estimate_and_of_the_cache_by_hand() -> None:
    search = small_search()
    memory, shape = search.memory, search.memory.shape
    found = memory.layout("split", 2, 1, 1, "ipc")
    assert isinstance(found, Layout)
    estimate = memory.estimate(2, found.learner.tokens, 0.0, found.learner.reshards, False)
    assert found.learner_gib == estimate.total / GIB <= 80
    weights, token = 2 * shape.parameters, 2 * shape.cache_values
    assert found.cache_tokens == pytest.approx((0.8 * 80 * GIB - weights) / token)
    shared = memory.layout("colocate", 2, 2, 1, "ipc")
    assert isinstance(shared, Layout)
    resident = (estimate.weights + estimate.optimizer) / GIB
    assert shared.server_gib == pytest.approx(min(0.8, 0.9 - resident / 80) * 80)


def test_ranks_of_megatron_that_share_a_stream_are_as_much_faster_and_wait_for_the_pipeline() -> None:
    costs = Costs(TINY, machine(train_tflops=1e-12))
    group = GroupShape((EpisodeShape(4, (TurnShape(2, 1), TurnShape(1))), EpisodeShape(4, (TurnShape(3),))))
    pairs = 36 + 28
    by_hand = 3 * (2 * (8 + 7) * 500 + 4 * pairs * 8 + 2 * (3 + 3) * 80)  # each sample reads the prompt
    one = LearnerCosts(1, layout=RankLayout())
    assert costs.group_flops(group, shares_prompt=False) == by_hand
    assert costs.train_s([group], one) == pytest.approx(by_hand, rel=1e-6)
    for layout in (RankLayout(tensor=4), RankLayout(tensor=2, context=2)):
        assert costs.train_s([group], LearnerCosts(4, layout=layout)) == pytest.approx(by_hand / 4, rel=1e-6)
    # Two micro-batches of 8 tokens over four stages: 3 of 5 slots of a stage are waited for.
    four = LearnerCosts(4, tokens=8, layout=RankLayout(pipeline=4))
    assert costs.train_s([group], four) == pytest.approx(by_hand / 4 * (1 + 3 / 2), rel=1e-6)
    copies = LearnerCosts(4, layout=RankLayout(tensor=2))
    assert costs.train_s([group] * 2, copies) == pytest.approx(by_hand / 2, rel=1e-6)


def test_what_ranks_of_megatron_exchange_is_the_arithmetic_by_hand() -> None:
    shape = replace(TINY, layers=4, hidden=8, experts=200, expert_share=0.25, experts_per_token=2)
    costs = Costs(shape, machine(link_gb_s=1e-6, network_gb_s=1e-7, ranks_s=1.0))

    def shared_s(layout: RankLayout, recompute: float = 0.0) -> float:
        return costs.shared_s(LearnerCosts(8, tokens=16, recompute=recompute, layout=layout), layout) * 1e3

    hidden = 2 * 16 * 8  # of one micro-batch, in bytes
    keys = 2 * 16 * 2 * 8  # of one block
    assert shared_s(RankLayout()) == 0
    assert shared_s(RankLayout(tensor=4)) == pytest.approx(4 * 4 * 2 * 0.75 * hidden)
    assert shared_s(RankLayout(tensor=4), 1.0) == pytest.approx(6 * 4 * 2 * 0.75 * hidden)
    assert shared_s(RankLayout(context=2)) == pytest.approx(3 * 4 * keys / 2)
    assert shared_s(RankLayout(pipeline=2)) == pytest.approx(2 * hidden)
    assert shared_s(RankLayout(expert=4)) == pytest.approx(4 * 4 * 0.75 * 2 * hidden)
    assert shared_s(RankLayout(expert=16)) == pytest.approx(10 * 4 * 4 * 15 / 16 * 2 * hidden)  # over two hosts
    exchange = LearnerCosts(8, layout=RankLayout(tensor=2, expert=4, sequence=True))
    moved = 800 / 2 * 0.75 + 200 / 4 * 0.5
    assert costs.exchange_s(5, exchange) == pytest.approx(1 + 6 * moved / 1e3)


def test_the_layout_that_shares_the_least_and_fits_is_chosen() -> None:
    model = meta_model(qwen3_vl_config("8b"))
    shape = ModelShape.of(model.config, count_values(model.parameters()))

    def chosen(name: str, ranks: int, longest: int = 4096) -> RankLayout | None:
        found = Memory(model, shape, Hardware.read(name), longest, 0.2, layouts=None).learner(ranks)
        assert found is None or found[1].total <= Hardware.read(name).memory_gib * GIB
        return found[0].layout if found else None

    assert chosen("h200", 4) == RankLayout() and chosen("h100", 1) is None
    assert chosen("h100", 4) == RankLayout(tensor=2, sequence=True)
    assert chosen("h100", 8, 262_144) == RankLayout(tensor=4, sequence=True)
    given = Memory(model, shape, Hardware.read("h200"), 4096, 0.2, layouts=(RankLayout(pipeline=2),))
    found = given.learner(4)
    assert found is not None and found[0].layout == RankLayout(pipeline=2)
    refused = given.layout("split", 3, 1, 1, "nccl")
    assert isinstance(refused, str) and refused.startswith("3 learners cannot share the network in this way")


def test_the_plan_of_megatron_is_a_command_with_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(STARTER_PATH), "--num-gpus", "4", "--steps", "2", "--backend", "megatron", "--pp", "2"]
    assert run([*argv, "--problems-per-step", "4"]) == 0
    text = capsys.readouterr().out
    assert "GPUs for learners (--backend megatron --pp 2)" in text and "not measured: all times of --backend" in text
    command = next(line for line in text.splitlines() if line.startswith("python -m trainer.run"))
    assert command.endswith("--backend megatron --pp 2") and "--reshard" not in command


def test_what_does_not_fit_says_by_how_much_and_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(["--model", "235b-a22b", "--num-gpus", "8"])) == 2
    error = capsys.readouterr().err
    assert "--num-gpus: must hold learners and servers, got 8" in error and "GiB" in error and "do" in error
    model = meta_model(qwen3_vl_config("30b-a3b"))
    shape = ModelShape.of(model.config, count_values(model.parameters()))
    memory = Memory(model, shape, Hardware.read("h100"), 4096, 0.2)
    assert memory.cache_tokens(1, 64.0) == pytest.approx((64 * GIB - 2 * shape.parameters) / (2 * shape.cache_values))
    tight = Memory(model, shape, replace(Hardware.read("h100"), memory_gib=70.0), 4096, 0.2).layout(
        "split", 64, 1, 1, "nccl"
    )
    assert tight == "a server of 1 GPUs needs 58 GiB on each and may take 56; --tensor-parallel 2 does"
    large = memory.layout("split", 2, 1, 2, "nccl")
    assert isinstance(large, str) and large.startswith("a learner of 2 needs") and large.endswith("learners do")
    whole = memory.layout("split", 64, 1, 2, "ipc")
    assert isinstance(whole, Layout)  # 58 GiB of weights beside a 64th of the state


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--calibrate: must be a file in a folder that exists"):
        run(["--calibrate", str(tmp_path / "nowhere" / "constants.json")])


def test_a_server_without_a_calibration_is_refused() -> None:
    with pytest.raises(UserError, match="--engine-url: needs --calibrate, or nothing reads it, got http://gpu1:30000"):
        run(["--engine-url", "http://gpu1:30000"])


def test_the_command_of_a_plan_is_one_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    ahead = ["--max-staleness", "1", "--keep-kv-cache"]
    assert run(["--model", "8b", "--num-gpus", "8", "--steps", "2", *ahead]) == 0
    (command,) = re.findall("^python -m trainer.run (.*)$", capsys.readouterr().out, re.MULTILINE)
    config = parse(RunConfig, command.split(), "", "")
    assert (config.model.model, config.cluster.num_gpus > 0) == ("Qwen/Qwen3-VL-8B-Instruct", True)
    assert (config.engine.placement, config.rollout.keep_kv_cache) == ("split", True)


@pytest.mark.parametrize("flags", [(), ("--max-staleness", "1", "--placement", "colocate")])
def test_a_cache_is_kept_only_where_episodes_run_as_weights_come(flags: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--keep-kv-cache: is for --max-staleness above 0 and --placement split"):
        run(["--keep-kv-cache", *flags])


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.json")), ids=lambda path: path.stem)
def test_every_bundled_constant_names_its_source(path: Path) -> None:
    found = Hardware.read(path.stem)
    assert all(found.sources[name] for name in CONSTANTS) and len(found.notes()) == 2
    for name, source in found.sources.items():
        if source.startswith(("benchmarks/", "docs/")):
            assert (Path(__file__).parents[3] / source.split(",")[0].split(":")[0]).exists(), name


def test_constants_survive_a_file(tmp_path: Path) -> None:
    found = machine(turn_s=0.1)
    found.write(tmp_path / "mine.json")
    assert Hardware.read(tmp_path / "mine.json") == found


def test_a_file_without_a_constant_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    machine().write(file)
    data = json.loads(file.read_text())
    for wrong in ({**data["constants"], "speed": {"value": 1, "source": ""}}, {}):
        file.write_text(json.dumps({"name": "x", "constants": wrong}))
        with pytest.raises(UserError, match="unknown or missing"):
            Hardware.read(file)
    data["constants"]["link_gb_s"]["value"] = 0
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match="must be above 0: link_gb_s"):
        Hardware.read(file)
    with pytest.raises(UserError, match="must be a bundled machine or a file"):
        Hardware.read("h300")


def test_a_line_is_fitted_without_negative_parts() -> None:
    assert fit_line((1, 2, 4), (3.0, 5.0, 9.0)) == pytest.approx((1.0, 2.0))
    assert fit_line((1, 2, 4), (5.0, 4.0, 2.0))[1] == 0 and fit_line((1, 2), (1.0, 3.0))[0] == 0


def test_lengths_have_the_means_that_were_asked_for() -> None:
    lengths = Lengths(prompt=100, images=50, turns=2.5, turn_tokens=80, observation=20, tool_s=0.5)
    groups = list(itertools.islice(lengths.groups(4, 0), 2000))
    turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
    assert len(turns) / 8000 == pytest.approx(2.5, rel=0.02)
    assert sum(turn.tokens for turn in turns) / len(turns) == pytest.approx(80, rel=0.02)
    assert sum(turn.tool_s for turn in turns) / len(turns) == pytest.approx(0.5, rel=0.03)
    assert sum(group.prompt for group in groups) / 2000 == pytest.approx(150, rel=0.03)


def test_the_command_plans_prints_its_flags_and_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", "2b", "--num-gpus", "4", "--hardware", "h200", "--steps", "3", "--max-staleness", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Computed, not measured: 2b of 2,128 M parameters on H200")
    assert "--max-staleness 1" in text and "samples/s" in text and "limit: " in text
    assert "not measured: collective_s" in text and "from the datasheet: " in text


def test_a_recorded_run_is_played_again_as_it_was(tmp_path: Path) -> None:
    from trainer.run import run as train

    flags = ["--steps", "1", "--problems-per-step", "2", "--group-size", "2", "--eval-size", "0", "--save-every", "0"]
    assert train([*flags, "--out", str(tmp_path), "--name", "a", "--tracker=", "--doctor", "off"]) == 0
    row = json.loads((tmp_path / "a" / "metrics.jsonl").read_text())
    recorded = Recorded.read(tmp_path / "a")
    episodes = [episode for group in recorded.recorded for episode in group.episodes]
    assert len(recorded.recorded) == 2 and len(episodes) == 4
    assert sum(e.model_tokens for e in episodes) / 4 == row["tokens_per_episode"]
    assert sum(e.stream for e in episodes) / 4 == row["length/stream_mean"]
    assert sum(len(e.turns) for e in episodes) / 4 == row["turns"] and all(g.images for g in recorded.recorded)
    with pytest.raises(UserError):
        Recorded.read(STARTER_PATH)


def test_the_numbers_of_gpus_to_try_are_a_ladder() -> None:
    assert ladder(16) == [1, 2, 3, 4, 6, 8, 12, 16] and set(ladder(7)) <= set(ladder(8))
