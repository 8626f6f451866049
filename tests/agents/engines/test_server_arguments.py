"""Claims about the arguments of started SGLang servers: which are chosen, and that the user's have the last word."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.server_arguments import (
    MAX_CAPTURED,
    ServerFacts,
    capture_sizes,
    choose_arguments,
    choose_variables,
    server_gpus,
)
from agents.engines.sglang.server_facts import Gpu, Host, ServedModel, has_fa3
from agents.model import STARTER_PATH
from envs.errors import UserError
from tests.agents.engines.test_sglang_engine import SILENT

GIB = 2**30
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB)
B200 = Gpu("NVIDIA B200", (10, 0), 180 * GIB)
RTX = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB)
#: In bfloat16: 4 GiB of weights, and 128 KiB of keys and values for a token.
SEES = ServedModel(reads_images=True, max_positions=262_144, weight_bytes=4 * GIB, token_bytes=2**17)
READS = replace(SEES, reads_images=False)


def words(facts: ServerFacts) -> dict[str, list[str]]:
    """Return the values of the chosen arguments by name."""
    return {argument.words[0]: list(argument.words[1:]) for argument in choose_arguments(facts)}


@pytest.mark.parametrize(
    ("gpu", "has_fa3", "checkpoint", "dtype", "text", "images"),
    [
        (H100, True, SEES, "bfloat16", "fa3", "fa3"),
        (H100, False, SEES, "bfloat16", "triton", "triton_attn"),
        (H100, True, SEES, "float32", "triton", "sdpa"),
        (H100, True, READS, "bfloat16", "fa3", None),
        (H100, False, READS, "bfloat16", "triton", None),
        (A100, True, SEES, "bfloat16", "triton", "triton_attn"),
        (B200, True, SEES, "bfloat16", "triton", "sdpa"),
        (B200, True, READS, "bfloat16", "triton", None),
        (None, True, None, "bfloat16", "triton", "sdpa"),
    ],
)
def test_attention_is_that_of_the_gpu_the_kernels_the_model_and_the_dtype(
    gpu: Gpu | None, has_fa3: bool, checkpoint: ServedModel | None, dtype: str, text: str, images: str | None
) -> None:
    chosen = words(ServerFacts(gpu, has_fa3, checkpoint, dtype))
    assert chosen["--attention-backend"] == [text]
    assert chosen.get("--mm-attention-backend") == (images and [images])
    assert (chosen["--sampling-backend"], chosen["--grammar-backend"]) == (["pytorch"], ["none"])
    assert chosen["--skip-server-warmup"] == []


@pytest.mark.parametrize(
    ("sessions", "gpu", "last", "count"),
    [
        (1, H100, 1, 1),
        (5, H100, 5, 4),
        (64, H100, 64, 8),
        (65, H100, 72, 9),
        (256, H100, 256, 12),
        (640, H100, 640, 15),
        (2048, H100, 640, 15),
        (2048, B200, MAX_CAPTURED, 16),
        (1024, RTX, 192, 11),
    ],
)
def test_graphs_are_of_few_sizes_up_to_what_runs_at_once_and_the_gpu_holds(
    sessions: int, gpu: Gpu, last: int, count: int
) -> None:
    sizes = [*map(int, words(ServerFacts(gpu, sessions=sessions))["--cuda-graph-bs-decode"])]
    assert (sizes[-1], len(sizes)) == (last, count)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1


def test_every_batch_runs_in_a_graph_of_less_than_twice_its_size_that_sglang_also_has() -> None:
    of_sglang = {1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(512, 1025, 32)}
    for most in range(1, 1025):
        sizes = capture_sizes(most)
        assert sizes[-1] >= most and (most <= 12 or {*sizes} <= of_sglang)
        for batch in range(1, most + 1):
            assert min(size for size in sizes if size >= batch) < 2 * batch


def test_the_context_is_what_the_run_needs_where_the_model_could_read_more() -> None:
    facts = ServerFacts(H100, checkpoint=SEES, context_length=4096)
    assert words(facts)["--context-length"] == ["4160"]
    short = replace(facts, checkpoint=replace(SEES, max_positions=4096))
    assert "--context-length" not in words(short) | words(replace(facts, context_length=0))


def test_a_server_alone_takes_the_fraction_and_those_that_share_a_gpu_divide_it() -> None:
    alone = ServerFacts(H100, checkpoint=SEES, context_length=4096, mem_fraction=0.6)
    assert words(alone)["--mem-fraction-static"] == ["0.6"] and "--max-total-tokens" not in words(alone)
    for count in (2, 3, 4):
        shared = words(replace(alone, servers_on_gpu=count))
        taken = count * (4 * GIB + int(shared["--max-total-tokens"][0]) * 2**17)
        assert 0 <= 0.6 * 80 * GIB - taken < count * 2**17 + 1
        # SGLang compares what is free with what was free before it loaded, while the others load too.
        free = 80 * GIB - taken
        assert free - 80 * GIB * (1 - float(shared["--mem-fraction-static"][0])) > 0
    assert words(replace(alone, checkpoint=None, servers_on_gpu=3))["--mem-fraction-static"] == ["0.200"]


def test_servers_that_do_not_fit_on_their_gpu_are_an_error_with_a_fraction_that_does() -> None:
    facts = ServerFacts(H100, checkpoint=SEES, context_length=4096, mem_fraction=0.1, servers_on_gpu=3)
    with pytest.raises(UserError) as caught:
        choose_arguments(facts)
    least = float(str(caught.value).split("give more than ")[1].split(",")[0])
    assert "--mem-fraction" in str(caught.value) and "3 servers" in str(caught.value)
    choose_arguments(replace(facts, mem_fraction=least + 0.01))


def test_every_chosen_argument_has_a_reason_and_one_name() -> None:
    for facts in (ServerFacts(), ServerFacts(H100, True, SEES, context_length=4096, servers_on_gpu=2)):
        chosen = choose_arguments(facts)
        assert all(argument.reason for argument in chosen)
        assert len({argument.words[0] for argument in chosen}) == len(chosen)


# The command ----------------------------------------------------------------------------------------------------------


#: What lets turns be read together.
TOGETHER = [
    "--enable-prefill-delayer",
    "--prefill-delayer-queue-min-ratio 0.125",
    "--prefill-delayer-max-delay-ms 200",
]


def command(*given: str, **options: Any) -> str:
    settings = SGLangSettings(str(STARTER_PATH), arguments=given, context_length=4096, **options)
    host = Host(1, (H100,), True)
    return " ".join(settings.launch_command(settings.chosen_arguments(settings.place_here(0, 30000, host), host)))


def test_without_arguments_the_command_has_all_that_was_given_by_hand_before() -> None:
    found = command(max_sessions=64)
    assert " -m agents.engines.sglang.launch " in found and " -m sglang.launch_server " in found
    for wanted in (
        f"--model-path {STARTER_PATH}",
        "--port 30000",
        "--host 127.0.0.1",
        "--tp-size 1",
        "--nccl-port 30050",
        "--base-gpu-id 0",
        "--attention-backend fa3",
        "--mm-attention-backend fa3",
        "--sampling-backend pytorch",
        "--grammar-backend none",
        "--cuda-graph-bs-decode 1 2 4 8 16 32 48 64",
        "--mem-fraction-static 0.4",
        "--enable-fp32-lm-head",
        " ".join(TOGETHER),
    ):
        assert f"{wanted} " in f"{found} "
    assert "--enable-fp32-lm-head" not in command(dtype="float32")
    assert "--prefill-delayer-max-delay-ms 1500 " in command(turn_wait_s=1.5)
    assert "prefill-delayer" not in command(turn_wait_s=0.0)


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (["--attention-backend", "flashinfer"], ["--attention-backend fa3"]),
        (["--attention-backend=flashinfer"], ["--attention-backend fa3"]),
        (["--attention-b", "flashinfer"], ["--attention-backend fa3"]),
        (["--mem-fraction-static=0.9"], ["--mem-fraction-static 0.4"]),
        (["--model", "other"], ["--model-path"]),
        (["--tensor-parallel-size", "2"], ["--tp-size"]),
        (["--dp-size", "2"], ["--nccl-port"]),
        (["--enable-fp32-lm-head"], []),
        (["--cuda-graph-max-bs", "64"], ["--cuda-graph-bs-decode"]),
        (["--cuda-graph-bs-decode", "1", "2"], ["--cuda-graph-bs-decode 1 2 4"]),
        (["--disable-overlap-schedule"], TOGETHER),
        (["--max-running-requests", "64"], TOGETHER),
        (["--prefill-delayer-max-delay-ms=50", "--enable-prefill-delayer"], TOGETHER),
        (["--disable-cuda-graph"], ["--cuda-graph-bs-decode", "--disable-prefill-cuda-graph"]),
        (["--cuda-graph-backend-decode=disabled"], ["--cuda-graph-bs-decode"]),
        (["--cuda-graph-backend-prefill", "breakable"], ["--disable-prefill-cuda-graph"]),
        (['--cuda-graph-config={"decode":{}}'], ["--cuda-graph-bs-decode", "--disable-prefill-cuda-graph"]),
    ],
)
def test_an_argument_of_the_user_takes_the_place_of_the_chosen_one_in_every_spelling(
    given: list[str], gone: list[str]
) -> None:
    found, without = command(*given), command()
    assert found.endswith(" ".join(given))
    assert not [words for words in gone if f"{words} " in f"{found} ".removesuffix(f"{' '.join(given)} ")]
    others = [word for word in without.split() if word.startswith("--") and not any(word in words for words in gone)]
    assert [name for name in others if name not in found] == []  # and of no other
    assert found.split().count(given[0]) == 1


def test_a_users_file_of_arguments_takes_the_place_of_chosen_ones_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("attention_backend: flashinfer\ngrammar-backend: xgrammar\n")
    found = command("--config", str(file))
    assert "--attention-backend" not in found and "--grammar-backend" not in found
    assert "--sampling-backend pytorch" in found
    file.write_text("- no mapping")
    assert "--attention-backend fa3" in command("--config", str(file))
    assert "--attention-backend fa3" in command("--config", str(tmp_path / "missing.yaml"))


def test_servers_beyond_the_gpus_share_them_with_a_command_for_each_place() -> None:
    host = Host(2, (H100, H100), False)
    settings = SGLangSettings(str(STARTER_PATH), num_servers=3, max_sessions=90, context_length=4096)
    places = [settings.place_here(number, 30000 + number, host) for number in range(3)]
    chosen = [settings.chosen_arguments(place, host) for place in places]
    named = [{argument.words[0]: argument.words[1:] for argument in each} for each in chosen]
    assert [each["--base-gpu-id"] for each in named] == [("0",), ("1",), ("0",)]
    assert [each["--nccl-port"] for each in named] == [("30050",), ("30051",), ("30052",)]
    assert ["--max-total-tokens" in each for each in named] == [True, False, True]
    assert [each["--cuda-graph-bs-decode"][-1] for each in named] == ["48"] * 3  # a mean of 30, and 16 out of balance


@pytest.mark.parametrize(
    ("first", "tensor_parallel", "num_gpus", "places"),
    [
        (0, 1, 0, [[0], [1], [2]]),
        (2, 1, 4, [[2], [3], [0]]),
        (0, 2, 3, [[0, 1], [0, 1], [1, 2]]),
        (2, 2, 4, [[2, 3], [0, 1], [2, 3]]),
    ],
)
def test_every_server_is_on_gpus_that_are_there(
    first: int, tensor_parallel: int, num_gpus: int, places: list[list[int]]
) -> None:
    assert [list(server_gpus(first, number, tensor_parallel, num_gpus)) for number in range(3)] == places


# Facts ----------------------------------------------------------------------------------------------------------------


def test_a_checkpoints_facts_are_those_of_its_files(tmp_path: Path) -> None:
    facts = ServedModel.read(STARTER_PATH, "bfloat16")
    config = json.loads((STARTER_PATH / "config.json").read_text())["text_config"]
    assert facts is not None and facts.reads_images and facts.max_positions == config["max_position_embeddings"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert facts.token_bytes == 2 * values
    wide = ServedModel.read(STARTER_PATH, "float32")
    assert wide is not None
    assert (wide.token_bytes, wide.weight_bytes) == (2 * facts.token_bytes, 2 * facts.weight_bytes)
    text = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({**text, "dtype": "float32"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert ServedModel.read(tmp_path, "bfloat16") == ServedModel(False, 512, 500, 2 * 2 * 3 * 64)
    (tmp_path / "config.json").write_text("[]")
    assert ServedModel.read(tmp_path, "bfloat16") is None and ServedModel.read("some/hub-id", "bfloat16") is None


def test_flash_attention_3_is_there_if_its_library_is_beside_sgl_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel/sm90").mkdir(parents=True)
    (tmp_path / "sgl_kernel/__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "sgl_kernel/sm90/common_ops.abi3.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not has_fa3()
    (tmp_path / "sgl_kernel/flash_ops.abi3.so").touch()
    assert has_fa3()
    assert "sgl_kernel" not in sys.modules


def test_the_gpus_are_those_that_nvidia_smi_lists_or_else_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" >&2\necho "NVIDIA H100 80GB HBM3, 9.0, 81559"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    Host.here.__func__.cache_clear()  # type: ignore[attr-defined]
    try:
        assert Host.here().gpus == (Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81559 * 2**20),)
        program.write_text("#!/bin/sh\nexit 9\n")
        of_torch = SimpleNamespace(name="NVIDIA B200", major=10, minor=0, total_memory=180 * GIB)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: of_torch)
        Host.here.__func__.cache_clear()  # type: ignore[attr-defined]
        assert Host.here() == Host(1, (B200,), has_fa3())
    finally:
        Host.here.__func__.cache_clear()  # type: ignore[attr-defined]


def test_finding_facts_loads_neither_torch_nor_sglang() -> None:
    program = (
        "import sys; from agents.engines.sglang.server_facts import ServedModel, has_fa3; has_fa3();"
        f"ServedModel.read({str(STARTER_PATH)!r}, 'bfloat16'); print({{'torch', 'sglang'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


# The process ----------------------------------------------------------------------------------------------------------


def test_a_server_has_one_thread_for_torch_unless_the_user_says_otherwise_and_its_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import os; print('threads', os.environ['OMP_NUM_THREADS'], flush=True){SILENT}"
    settings = SGLangSettings(str(STARTER_PATH), command=(sys.executable, "-c", program), log_folder=tmp_path)

    async def start() -> None:
        engine = SGLangEngine(settings, None)
        try:
            await engine.start()
        finally:
            await engine.close()

    monkeypatch.delenv("OMP_NUM_THREADS")
    asyncio.run(start())
    log = (tmp_path / "sglang-0.log").read_text().splitlines()
    assert log[0].startswith("$ ") and "threads 1" in log
    assert any(line.startswith("# --attention-backend triton: ") for line in log)
    assert any(line.startswith("# OMP_NUM_THREADS=1: ") for line in log)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    asyncio.run(start())
    later = (tmp_path / "sglang-0.log").read_text().splitlines()[len(log) :]
    assert "threads 3" in later and not any("OMP_NUM_THREADS" in line for line in later if line[0] == "#")


def test_float32_is_not_multiplied_as_tf32() -> None:
    assert "TRITON_F32_DEFAULT" not in choose_variables("bfloat16")
    assert choose_variables("float32")["TRITON_F32_DEFAULT"][0] == "ieee"


def test_servers_that_cannot_share_a_gpu_are_an_error_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "here", lambda: Host(1, (replace(H100, num_bytes=GIB),), True))
    settings = SGLangSettings(
        str(STARTER_PATH), num_servers=20, context_length=4096, mem_fraction=0.05, log_folder=tmp_path / "logs"
    )
    with pytest.raises(UserError, match="20 servers on a GPU"):
        asyncio.run(SGLangEngine(settings, None).start())
    assert not (tmp_path / "logs").exists()
