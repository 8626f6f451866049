"""Claims about the arguments of started SGLang servers: which are chosen, and that the user's have the last word."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.server_arguments import (
    choose_arguments,
    choose_variables,
    launch_command,
    server_gpus,
)
from agents.engines.sglang.server_facts import Host, has_fa3, max_positions
from agents.engines.sglang.settings import ServerPlace
from agents.model import STARTER_PATH
from envs.errors import UserError
from tests.agents.engines.test_sglang_engine import SILENT

H100 = Host(1, (9,), has_fa3=True)


def words(host: Host = H100, **options: Any) -> dict[str, list[str]]:
    """Return the values of the chosen arguments by name."""
    chosen = choose_arguments(SGLangSettings(str(STARTER_PATH), **options), ServerPlace(30000), host)
    return {name: values for name, *values in chosen}


@pytest.mark.parametrize(
    ("generation", "has_fa3", "dtype", "text", "tower"),
    [
        (9, True, "bfloat16", "fa3", "fa3"),
        (9, False, "bfloat16", "triton", "triton_attn"),
        (9, True, "float32", "triton", "sdpa"),
        (8, True, "bfloat16", "triton", "triton_attn"),
        (10, True, "bfloat16", "triton", "sdpa"),
        (None, True, "bfloat16", "triton", "sdpa"),
    ],
)
def test_attention_is_that_of_the_gpu_the_kernels_and_the_dtype(
    generation: int | None, has_fa3: bool, dtype: str, text: str, tower: str
) -> None:
    chosen = words(Host(1, (generation,) if generation else (), has_fa3), dtype=dtype)
    assert chosen["--attention-backend"] == [text]
    assert chosen["--mm-attention-backend"] == [tower]
    assert (chosen["--sampling-backend"], chosen["--grammar-backend"]) == (["pytorch"], ["none"])
    assert chosen["--skip-server-warmup"] == []


@pytest.mark.parametrize(("sessions", "largest"), [(1, "1"), (65, "65"), (2048, "512")])
def test_graphs_are_for_what_runs_at_once_up_to_a_bound(sessions: int, largest: str) -> None:
    assert words(max_sessions=sessions)["--cuda-graph-max-bs-decode"] == [largest]


def test_the_context_is_what_the_run_needs_where_the_model_could_read_more() -> None:
    longest = max_positions(str(STARTER_PATH))
    assert longest
    assert words(context_length=1024)["--context-length"] == ["1088"]
    assert "--context-length" not in words(context_length=longest) | words(context_length=0)
    assert max_positions("some/hub-id") is None


def test_states_get_the_memory_that_fills_up_with_that_of_keys_and_values(tmp_path: Path) -> None:
    """Five states of 2 x (4 x 512 x 128 + 2 x 3 x 1024) bytes, against 1,024 tokens of 2 x 2 x 2 x 128 bytes."""
    assert "--mamba-full-memory-ratio" not in words()
    text = {
        "max_position_embeddings": 8192,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))

    def chosen(length: int) -> str:
        arguments = choose_arguments(SGLangSettings(str(tmp_path), context_length=length), ServerPlace(30000), H100)
        return " ".join(word for words in arguments for word in words)

    assert "--mamba-full-memory-ratio 2.56 " in chosen(1024) + " "
    assert "--mamba-full-memory-ratio" not in chosen(0) + chosen(4096)  # SGLang's own share is larger


# The command ----------------------------------------------------------------------------------------------------------


#: What lets turns be read together.
TOGETHER = [
    "--enable-prefill-delayer",
    "--prefill-delayer-queue-min-ratio 0.125",
    "--prefill-delayer-max-delay-ms 200",
]


def command(*given: str, **options: Any) -> str:
    settings = SGLangSettings(str(STARTER_PATH), arguments=given, context_length=4096, **options)
    return " ".join(launch_command(settings, choose_arguments(settings, ServerPlace(30000), H100)))


def test_without_arguments_the_command_has_all_that_was_given_by_hand_before() -> None:
    found = command(max_sessions=64)
    assert "agents/engines/sglang/launch.py " in found and " -m sglang.launch_server " in found
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
        "--cuda-graph-max-bs-decode 64",
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
        (["--mem-fraction-static=0.9"], ["--mem-fraction-static 0.4"]),
        (["--dp-size", "2"], ["--nccl-port"]),
        (["--enable-fp32-lm-head"], []),
        (["--cuda-graph-max-bs", "64"], ["--cuda-graph-max-bs-decode"]),
        (["--cuda-graph-bs-decode", "1", "2"], ["--cuda-graph-max-bs-decode"]),
        (["--disable-overlap-schedule"], TOGETHER),
        (["--max-running-requests", "64"], TOGETHER),
        (["--prefill-delayer-max-delay-ms=50", "--enable-prefill-delayer"], TOGETHER),
        (["--disable-cuda-graph"], ["--cuda-graph-max-bs-decode", "--disable-prefill-cuda-graph"]),
        (["--cuda-graph-backend-decode=disabled"], ["--cuda-graph-max-bs-decode"]),
        (["--cuda-graph-backend-prefill", "breakable"], ["--disable-prefill-cuda-graph"]),
        (['--cuda-graph-config={"decode":{}}'], ["--cuda-graph-max-bs-decode", "--disable-prefill-cuda-graph"]),
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


def test_the_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\necho 10.0\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    find = Host.here.__func__.__wrapped__  # type: ignore[attr-defined]
    assert find(Host).generations == (9, 10)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert find(Host).generations == ()


def test_finding_facts_loads_neither_torch_nor_sglang() -> None:
    program = (
        "import sys; from agents.engines.sglang.server_facts import has_fa3; has_fa3();"
        "print({'torch', 'sglang'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


# The process ----------------------------------------------------------------------------------------------------------


def test_a_server_has_one_thread_for_torch_unless_the_user_says_otherwise(
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
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    asyncio.run(start())
    later = (tmp_path / "sglang-0.log").read_text().splitlines()[len(log) :]
    assert "threads 3" in later


def test_float32_is_not_multiplied_as_tf32() -> None:
    assert "TRITON_F32_DEFAULT" not in choose_variables("bfloat16")
    assert choose_variables("float32")["TRITON_F32_DEFAULT"] == "ieee"


def test_servers_without_gpus_of_their_own_are_an_error_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "here", lambda: Host(4))
    options: dict[str, Any]
    for options in ({"num_servers": 5}, {"num_servers": 2, "tensor_parallel": 2, "first_gpu": 1}):
        settings = SGLangSettings(str(STARTER_PATH), log_folder=tmp_path / "logs", **options)
        with pytest.raises(UserError, match="--num-servers: must leave each server GPUs of its own: this host has 4"):
            asyncio.run(SGLangEngine(settings, None).start())
    assert not (tmp_path / "logs").exists()
