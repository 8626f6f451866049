"""Claims about the planner: counts and seconds are the arithmetic by hand, forecasts are near measured runs, what is
not predicted is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.config.cli import exit_code, parse
from envs.errors import UserError
from trainer.config.run import RunConfig
from trainer.learner.weights_io import meta_model
from trainer.plan import run
from trainer.planning.hardware import BUNDLED, Hardware
from trainer.planning.layouts import Search, ladder
from trainer.planning.memory import GIB, Plan
from trainer.planning.qwen3_vl import qwen3_vl_config
from trainer.planning.shape import ModelShape
from trainer.planning.speed import TURN_WAIT_S, PlannedLayout, Speed
from trainer.planning.workload import Schedule, Workload

#: One layer of width 8, one head, 10 words. A machine that computes and reads for nothing unless a test says so.
TINY = ModelShape(
    parameters=1000,
    dense=500,
    experts=0,
    expert_share=0.0,
    head=80,
    attention_values=8,
    cache_values=16,
    kv_heads=1,
    image_token_flops=0.0,
)
#: Streams of 23 tokens. Shorter than what a user may plan, so that sums can be done by hand.
EQUAL = Workload.model_construct(
    prompt_tokens=10, image_tokens=0, turns=2, turn_tokens=5, observation_tokens=3, tool_s=7.0, spread=0
)


def schedule(problems: int = 8, group_size: int = 4, max_staleness: int = 0, **more: Any) -> Schedule:
    return Schedule(problems_per_step=problems, group_size=group_size, max_staleness=max_staleness, **more)


FOUR = schedule(2, 2)
SMALL = schedule(8, 4)


def machine(**given: float) -> Hardware:
    values = {name: 1e9 if name.endswith(("tflops", "gb_s")) else 0.0 for name in Hardware.model_fields}
    values |= {"memory_gib": 80.0, "gpus_per_host": 8, **given}
    return Hardware.model_validate({**values, "name": "test"})


def learner(ranks: int = 1, recompute: float = 0.0, reshards: bool = False) -> Plan:
    return Plan(ranks, 16384, recompute=recompute, reshard="always" if reshards else "never")


def layout(placement: str = "split", ranks: int = 1, servers: int = 1, cache_tokens: float = 1e9) -> PlannedLayout:
    return PlannedLayout(placement, learner(ranks), servers, 1, cache_tokens)  # type: ignore[arg-type]


def speed(schedule: Schedule = FOUR, workload: Workload = EQUAL, **given: float) -> Speed:
    return Speed(TINY, machine(**given), workload, schedule)


def shape_of(name: str) -> ModelShape:
    return ModelShape.of(meta_model(qwen3_vl_config(name)))


def search(name: str = "2b", schedule: Schedule = SMALL, hardware: str = "h100", **given: float) -> Search:
    network = meta_model(qwen3_vl_config(name))
    planned_on = Hardware.read(hardware).model_copy(update=given)
    return Search(network, Speed(ModelShape.of(network), planned_on, Workload(), schedule))


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As the checkpoints' indexes count them.
    [("2b", 2_127_532_032), ("30b-a3b", 31_070_754_032), ("235b-a22b", 235_670_022_896)],
)
def test_a_network_is_counted_as_by_hand(name: str, parameters: int) -> None:
    shape, text = shape_of(name), qwen3_vl_config(name).text_config
    assert shape.parameters == parameters
    hidden, layers = text.hidden_size, text.num_hidden_layers
    attention = 2 * hidden * 128 * (text.num_attention_heads + text.num_key_value_heads)
    if name == "2b":
        assert shape.dense == layers * (attention + 3 * hidden * 6144) and shape.experts == 0
    else:
        expert = 3 * hidden * text.moe_intermediate_size
        assert shape.dense == layers * (attention + 128 * hidden) and shape.experts == layers * 128 * expert
        assert shape.read_flops(1, 0, 0) == pytest.approx(2 * (shape.dense + layers * 8 * expert))
        assert shape.decode_values(1) == pytest.approx(shape.dense + layers * 8 * expert + shape.head)
        assert shape.decode_values(4096) == pytest.approx(shape.dense + shape.experts + shape.head)
    assert shape.cache_values == 2 * layers * text.num_key_value_heads * 128
    assert shape.head == 151_936 * hidden


def test_a_decode_step_is_what_it_reads_or_computes_whichever_is_longer() -> None:
    cached = 2 * 23 / 2
    reads = speed(memory_gb_s=1e-6, decode_step_s=0.25)
    assert reads.decode_step_s(2, layout()) == pytest.approx((2 * 580 + 2 * cached * 16) / 1e3 + 0.25)
    computes = speed(tflops=1e-9)
    assert computes.decode_step_s(2, layout()) == pytest.approx((2 * 2 * 580 + 4 * cached * 8) / 1e3)
    wide = replace(speed(memory_gb_s=1e-6), shape=replace(TINY, kv_heads=2))
    four = replace(layout(), tensor_parallel=4)
    assert wide.decode_step_s(2, four) == pytest.approx((2 * 580 / 4 + 2 * cached * 16 / 2) / 1e3)


def test_training_reads_a_prompt_once_and_counts_three_forwards() -> None:
    one = speed(schedule(1, 2), tflops=1e-12)
    pairs = 55 + 2 * (23 * 24 / 2 - 55)
    by_hand = 3 * (2 * (10 + 2 * 13) * 500 + 4 * pairs * 8 + 2 * (2 * 10) * 80)
    assert one.train_s(learner()) == pytest.approx(by_hand)
    three = speed(schedule(3, 2), tflops=1e-12)
    assert three.train_s(learner(2)) == pytest.approx(2 * by_hand, rel=1e-6)
    assert three.train_s(learner(64)) == pytest.approx(by_hand, rel=1e-6)  # more ranks than prompts
    assert one.train_s(learner(recompute=1.0)) == pytest.approx(by_hand * 4 / 3)


def test_ranks_that_reshard_gather_for_every_micro_batch() -> None:
    costs = speed(link_gb_s=1e-6, network_gb_s=1e-7)
    assert costs.exchange_s(5, learner(1)) == 0
    assert costs.exchange_s(5, learner(4)) == pytest.approx(6 * 1000 * 0.75 / 1e3)
    assert costs.exchange_s(5, learner(4, reshards=True)) == pytest.approx(5 * 8 * 1000 * 0.75 / 1e3)
    assert costs.exchange_s(5, learner(16)) == pytest.approx(6 * 1000 * 15 / 16 / 1e2)


def test_a_synchronous_step_is_rollout_plus_training_plus_push_by_hand() -> None:
    """Two turns of 5 tokens, a tool of 7 s after each, 0.5 s a token, whatever the batch."""
    found = speed(decode_step_s=0.5, update_s=3.0, push_s=2.0).forecast(layout())
    assert found.step_s == pytest.approx(10 * 0.5 + TURN_WAIT_S + 14 + 3 + 2, rel=1e-3)
    assert found.train_s == pytest.approx(3, rel=1e-3) and found.limit == "episode latency"
    assert found.samples_per_s == pytest.approx(4 / found.step_s)
    shared = speed(decode_step_s=0.5, update_s=3.0, push_s=2.0, release_s=1.0).forecast(layout("colocate"))
    assert shared.step_s == pytest.approx(found.step_s + 1)


def test_with_staleness_a_step_waits_for_its_share_of_a_rollout() -> None:
    ahead = speed(schedule(2, 2, max_staleness=1), decode_step_s=0.5, update_s=3.0, push_s=2.0).forecast(layout())
    assert ahead.step_s == pytest.approx((10 * 0.5 + TURN_WAIT_S + 14) / 2 + 3 + 2, rel=1e-3)
    assert speed(schedule(2, 2, 1), decode_step_s=0.5, update_s=40.0).forecast(layout()).limit == "learner"


def test_the_busier_side_bounds_a_step() -> None:
    many = schedule(64, 8, max_staleness=4)
    quick = EQUAL.model_copy(update={"tool_s": 0.0})
    servers = speed(many, quick, memory_gb_s=1e-9).forecast(layout())
    writing_s = 64 * 8 * 10 / (5 * 512) * speed(many, quick, memory_gb_s=1e-9).decode_step_s(5 * 512, layout())
    assert servers.limit == "servers" and servers.step_s == pytest.approx(writing_s, rel=1e-3)


def test_streams_are_read_again_after_a_push_unless_the_cache_is_kept() -> None:
    ahead = schedule(2, 2, max_staleness=2)
    pays, keeps = (speed(ahead.model_copy(update={"keep_kv_cache": kept}), tflops=1e-9) for kept in (False, True))
    half = 23 / 2
    one = (2 * half * 500 + 4 * half * (half + 1) / 2 * 8) / 1e3
    assert pays.read_again_s(layout()) == pytest.approx(8 / 2 * one, rel=0.05)
    assert keeps.read_again_s(layout()) == 0 == speed(tflops=1e-9).read_again_s(layout())
    assert pays.forecast(layout()).step_s > keeps.forecast(layout()).step_s


def test_each_new_prompt_stops_its_server_for_its_image() -> None:
    images = EQUAL.model_copy(update={"image_tokens": 4})
    found, without = (speed(workload=work, image_s=0.25).forecast(layout()).step_s for work in (images, EQUAL))
    assert found - without == pytest.approx(2 * 0.25, rel=1e-3)


def test_a_full_cache_makes_streams_wait() -> None:
    wide = speed(decode_step_s=0.5).latency_s(layout())
    assert speed(decode_step_s=0.5).latency_s(layout(cache_tokens=23)) == pytest.approx(2 * wide)


#: Turns of 240 words with one image, 512 tokens at most (benchmarks/planner.py compares all runs).
LONG = Workload(
    prompt_tokens=250, image_tokens=110, turns=1.7, turn_tokens=206, observation_tokens=30, tool_s=0.0, spread=0.16
)


@pytest.mark.parametrize(
    ("hardware", "staleness", "placement", "measured"),
    # Samples a second of h100-split-0, h100-one-gpu, h200-split-2 and h200-split-4 in asynchrony_2b.json.
    [
        ("h100", 0, "split", 21.61),
        ("h100", 0, "colocate", 20.19),
        ("h200", 2, "split", 35.93),
        ("h200", 4, "split", 36.44),
    ],
)
def test_a_forecast_is_within_15_percent_of_the_measured_run(
    hardware: str, staleness: int, placement: str, measured: float
) -> None:
    machine_then = Hardware.read(hardware).model_copy(update={"image_s": 0.035})
    planner = Speed(shape_of("2b"), machine_then, LONG, schedule(16, 8, staleness))
    assert planner.forecast(layout(placement, cache_tokens=1e6)).samples_per_s == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("staleness", [0, 1])
def test_more_gpus_are_never_slower(staleness: int) -> None:
    planner = search(schedule=schedule(8, 4, staleness))
    found = [planner.best(number) for number in (2, 3, 4, 6, 8)]
    rates = [each.forecast.samples_per_s for each in found]
    assert rates == sorted(rates) and rates[-1] > rates[0]
    assert found[0].layout.num_gpus <= 2 and found[-1].layout.num_gpus <= 8
    assert ladder(10) == [1, 2, 3, 4, 6, 8, 10]


def test_a_given_placement_is_kept_and_servers_share_gpus_on_one_host_alone() -> None:
    assert search(schedule=schedule(placement="split")).best(4).layout.placement == "split"
    found = search(schedule=schedule(placement="colocate")).best(64).layout
    assert (found.placement, found.num_gpus) == ("colocate", 8)


def test_memory_is_that_of_the_estimate_and_of_the_cache_by_hand() -> None:
    planner = search()
    found, chosen = planner.layout("split", 2, 1, 1), planner.learner(2)
    assert found and chosen
    estimate = chosen[1]
    assert found.learner_gib == estimate.total / GIB <= 80
    weights, token = 2 * planner.speed.shape.parameters, 2 * planner.speed.shape.cache_values
    assert found.cache_tokens == pytest.approx((0.8 * 80 * GIB - weights) / token)
    shared = planner.layout("colocate", 2, 2, 1)
    assert shared
    assert shared.mem_fraction == pytest.approx(min(0.8, 0.9 - estimate.between_steps / GIB / 80))


def test_what_does_not_fit_says_by_how_much_and_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(["--model", "30b-a3b", "--num-gpus", "2"])) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"must hold learners and servers, got 2; a learner of 2 needs \d+ of 80 GiB; \d+ learners do", error
    )
    assert search("30b-a3b", memory_gib=70.0).layout("split", 64, 1, 1) is None, "too large for a server"
    assert search("30b-a3b").layout("split", 2, 1, 2) is None, "too large for a learner"
    few = search("30b-a3b", memory_gib=141.0)
    chosen = few.learner(4)
    assert chosen and few.layout("split", 4, 4, 1) is None, "rank 0 has no room for all weights besides"
    with pytest.raises(UserError, match="give more GPUs, or shorter episodes"):
        search(schedule=schedule(placement="split")).best(1)


@pytest.mark.parametrize("flags", [(), ("--max-staleness", "1", "--placement", "colocate")])
def test_a_cache_is_kept_only_where_episodes_run_as_weights_come(flags: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--keep-kv-cache: is for --max-staleness above 0 and --placement split"):
        run(["--keep-kv-cache", *flags])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--turn-tokens 30", "--turn-tokens: must give episodes of 300 model tokens or more: shorter ones were missed"),
        ("--hardware h300", "--hardware h300: must be a readable file"),
    ],
)
def test_what_is_not_predicted_is_one_line(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(argv.split())) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_the_command_of_a_plan_is_one_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", "8b", "--num-gpus", "8", "--max-staleness", "1", "--keep-kv-cache"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Computed, not measured: 8b of 8,767 M parameters on H100")
    assert "samples/s" in text and "limit: " in text
    (command,) = re.findall("^python -m trainer.run (.*)$", text, re.MULTILINE)
    config = parse(RunConfig, command.split(), "", "")
    assert (config.model.model, config.cluster.num_gpus > 0) == ("Qwen/Qwen3-VL-8B-Instruct", True)
    assert (config.engine.placement, config.rollout.keep_kv_cache) == ("split", True)


@pytest.mark.parametrize("path", sorted(BUNDLED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_bundled_constant_names_its_source(path: Path) -> None:
    assert Hardware.read(path.stem).name.lower() == path.stem
    named = re.findall(r"^# (.+)\n(\w+): ", path.read_text(), re.MULTILINE)
    assert {name for _, name in named} == Hardware.model_fields.keys() - {"name"}
    for source, name in named:
        if source.startswith(("benchmarks/", "docs/")):
            assert (Path(__file__).parents[3] / source.split(",")[0].split(":")[0]).exists(), name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("speed: 1", "speed: is not a section or setting"),
        ("link_gb_s: 0", "link_gb_s: must be greater than 0, got 0"),
        ("link_gb_s:", "link_gb_s: must be a valid number, .*got nothing"),
        ("", "must hold every constant, got no link_gb_s"),
    ],
)
def test_a_file_with_a_wrong_constant_is_one_line(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    bundled = (BUNDLED / "h100.yaml").read_text()
    file.write_text(bundled)
    assert Hardware.read(str(file)) == Hardware.read("h100")
    file.write_text(re.sub("^link_gb_s: .*", line, bundled, flags=re.MULTILINE))
    with pytest.raises(UserError, match=message):
        Hardware.read(str(file))
