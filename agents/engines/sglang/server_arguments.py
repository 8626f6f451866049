"""Chooses the arguments of an SGLang server that we start, each with the reason for it.

What the run wants (`SGLangSettings`), where the server goes and what its host has come in, arguments go out. The user's
arguments have the last word. Names and rules are those of SGLang 0.5.15.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from agents.engines.sglang.routing import most_sessions
from agents.engines.sglang.server_facts import Host, max_positions
from agents.engines.sglang.settings import ServerPlace, SGLangSettings

#: The largest batch that is captured as a CUDA graph. SGLang counts 2 MiB for each of its rows.
MAX_CAPTURED = 512
#: So many turns that are written let one more wait to be read: with 128, sixteen are read at once.
WRITTEN_FOR_ONE = 8
#: Tokens of SGLang's context beyond ours, because it counts a few as reserved.
CONTEXT_MARGIN = 64
#: The port at which the processes of a server meet, counted from its own (`agents.engines.sglang.process`).
MEETING_PORT = 50


@dataclass(frozen=True)
class Argument:
    """One argument of the server, why it is given, and the user's arguments beside which it is not.

    Example: `Argument(("--grammar-backend", "none"), "no request has a grammar")`.
    """

    words: tuple[str, ...]
    reason: str = ""
    not_beside: tuple[str, ...] = ()


def choose_arguments(settings: SGLangSettings, place: ServerPlace, host: Host) -> list[Argument]:
    """Return the arguments with which a server is fast and right for what a run asks of it.

    Example, the first two after the model and the place, for Qwen3-VL in bfloat16 on an H100 with all of sgl_kernel::

        Argument(("--attention-backend", "fa3"), "Hopper, and sgl_kernel has FlashAttention-3")
        Argument(("--mm-attention-backend", "fa3"))
    """
    own = {
        "--model-path": settings.model_path,
        "--tp-size": str(settings.tensor_parallel),
        "--port": str(place.port),
        "--host": place.address,
        "--dtype": settings.dtype,
        "--base-gpu-id": str(place.first_gpu),
        "--weight-version": "0",
        "--log-level": "warning",
    }
    chosen = [
        *map(Argument, own.items()),
        Argument(
            ("--nccl-port", str(place.port + MEETING_PORT)),
            "the port that SGLang chooses is anybody's until the weights are loaded",
            ("--dp-size", "--data-parallel-size"),  # its workers need a port each
        ),
        *_attention(settings, place, host),
        Argument(
            ("--sampling-backend", "pytorch"),
            "requests have no top-k and top-p: every backend draws with torch, and this one compiles nothing",
        ),
        Argument(("--grammar-backend", "none"), "no request has a grammar"),
        Argument(("--skip-server-warmup",), "the first request compiles the same kernels"),
        Argument(("--mem-fraction-static", f"{settings.mem_fraction:g}"), "--mem-fraction"),
        *_graphs(settings),
        *_turns_together(settings),
        *_context(settings),
        *_adapters(settings),
    ]
    if settings.frees_memory and host.has_memory_saver:
        chosen.append(Argument(("--enable-memory-saver",), "the learner trains on its GPU"))
    if settings.dtype != "float32":  # as `agents.model.policy.float32_logits`
        chosen.append(Argument(("--enable-fp32-lm-head",), "log-probs of the learner come from float32 logits"))
    given = {word.partition("=")[0] for word in settings.arguments}
    return [argument for argument in chosen if given.isdisjoint((argument.words[0], *argument.not_beside))]


def launch_command(settings: SGLangSettings, chosen: Sequence[Argument]) -> list[str]:
    """Return the command that starts a server with chosen arguments, and then the user's.

    Of an argument that is given twice, in whatever spelling, SGLang's parser takes the last.
    """
    words = [word for argument in chosen for word in argument.words]
    return [sys.executable, "-m", "agents.engines.sglang.launch", *settings.command, *words, *settings.arguments]


def _attention(settings: SGLangSettings, place: ServerPlace, host: Host) -> list[Argument]:
    generation = 0
    if place.first_gpu < len(host.generations):
        generation = host.generations[place.first_gpu]
    text = "triton"
    tower = "sdpa"
    reason = "these kernels need no other package, and have every dtype"
    if settings.dtype != "float32":
        if generation == 9 and host.has_fa3:
            text = tower = "fa3"
            reason = "Hopper, and sgl_kernel has FlashAttention-3"
        elif generation in (8, 9):
            # SGLang's sdpa copies a mask of all pairs of patches from the host in every layer.
            tower = "triton_attn"
    return [Argument(("--attention-backend", text), reason), Argument(("--mm-attention-backend", tower))]


def _graphs(settings: SGLangSettings) -> list[Argument]:
    """Return what is captured as CUDA graphs: decode steps of as many rows as a server may have sessions."""
    mean = settings.max_sessions / settings.num_servers
    sessions = min(settings.max_sessions, math.ceil(most_sessions(mean)))
    of_both = ("--disable-cuda-graph", "--cuda-graph-config")
    decode = ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode", "--cuda-graph-bs", "--cuda-graph-backend-decode")
    prefill = ("--cuda-graph-backend-prefill", "--cuda-graph-bs-prefill", "--cuda-graph-max-bs-prefill")
    old = ("--enable-breakable-cuda-graph", "--enforce-piecewise-cuda-graph", "--piecewise-cuda-graph-tokens")
    return [
        Argument(
            ("--cuda-graph-bs-decode", *map(str, capture_sizes(min(sessions, MAX_CAPTURED)))),
            f"up to {sessions} sessions at once; few sizes are captured sooner",
            (*of_both, *decode, "--disable-decode-cuda-graph", "--disable-cuda-graph-padding"),
        ),
        Argument(
            ("--disable-prefill-cuda-graph",),
            "it would capture over 50 sizes, and SGLang has none for images",
            (*of_both, *prefill, *old, "--disable-piecewise-cuda-graph", "--piecewise-cuda-graph-max-tokens"),
        ),
    ]


def capture_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes of CUDA graphs for up to `most` rows: powers of two, from 32 on with those between them.

    A batch runs in the next larger graph.

    >>> capture_sizes(100)
    (1, 2, 4, 8, 16, 32, 48, 64, 96, 100)
    """
    steps = sorted([*(2**power for power in range(10)), *(3 * 2**power for power in range(4, 8))])
    return (*(size for size in steps if size < most), most)


def _turns_together(settings: SGLangSettings) -> list[Argument]:
    """Return what lets the turns of a server be read together: whenever it reads some, all that it writes stand still.

    With `--max-running-requests`, SGLang would wait without a limit, for as many free places as it ever read at once.
    """
    if not settings.turn_wait_s:
        return []
    ratio = "--prefill-delayer-queue-min-ratio"
    most = "--prefill-delayer-max-delay-ms"
    wait_ms = f"{1000 * settings.turn_wait_s:g}"
    words = ("--enable-prefill-delayer", ratio, f"{1 / WRITTEN_FOR_ONE:g}", most, wait_ms)
    others = (ratio, most, "--max-running-requests", "--disable-overlap-schedule")
    return [Argument(words, f"turn_wait_s {settings.turn_wait_s:g}", others)]


def _context(settings: SGLangSettings) -> list[Argument]:
    longest = max_positions(settings.model_path)
    length = settings.context_length + CONTEXT_MARGIN
    # SGLang refuses to start with a longer context than the model's own.
    if not settings.context_length or longest is None or length >= longest:
        return []
    reason = f"tables have a row of it for each session; the model's own is {longest}"
    return [Argument(("--context-length", str(length)), reason)]


def _adapters(settings: SGLangSettings) -> list[Argument]:
    """Return what a server needs to take adapters. It has two places: for the one that writes and for none."""
    if not settings.lora_rank:
        return []
    return [
        Argument(("--enable-lora",), "the learner trains adapters, and sends those alone"),
        Argument(("--max-lora-rank", str(settings.lora_rank))),
        Argument(("--lora-target-modules", *settings.lora_targets)),
        Argument(("--max-loras-per-batch", "2")),
    ]


def choose_variables(dtype: str) -> dict[str, tuple[str, str]]:
    """Return the environment variables of a server, each with its value and reason; the user's own come first."""
    chosen = {
        "OMP_NUM_THREADS": ("1", "images are read 1.5 times as fast as with torch's threads"),
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": ("agents.engines.sglang.in_server", "each image crosses once"),
        "SGLANG_VLM_CACHE_SIZE_MB": (
            "1024",
            "100 hold six encoded images of 1,024 tokens at 2B: others are encoded anew",
        ),
    }
    if dtype == "float32":
        chosen["TRITON_F32_DEFAULT"] = ("ieee", "else triton multiplies float32 as TF32")
    return chosen


def server_gpus(first_gpu: int, number: int, tensor_parallel: int, num_gpus: int) -> range:
    """Return the GPUs of the `number`-th server. Servers beyond the last GPU go to the first ones.

    >>> [server_gpus(1, number, 1, num_gpus=3) for number in range(3)]
    [range(1, 2), range(2, 3), range(0, 1)]
    """
    gpu = first_gpu + number * tensor_parallel
    if num_gpus:
        gpu %= num_gpus
        if gpu + tensor_parallel > num_gpus:
            gpu = 0
    return range(gpu, gpu + tensor_parallel)
