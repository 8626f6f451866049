"""Chooses the arguments of an SGLang server that we start.

What the run wants (`SGLangSettings`), where the server goes and what its host has come in, arguments go out. The user's
arguments have the last word. Names and rules are those of SGLang 0.5.15.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from agents.engines.sglang.routing import most_sessions
from agents.engines.sglang.server_facts import Host, max_positions, state_bytes, text_config, token_bytes
from agents.engines.sglang.settings import ServerPlace, SGLangSettings

#: What ties a server to the life of this process.
LAUNCH = Path(__file__).with_name("launch.py")
#: The words of one argument: its name and its values.
Words = tuple[str, ...]
#: The largest batch that is captured as a CUDA graph. SGLang counts 2 MiB for each of its rows.
MAX_CAPTURED = 512
#: So many turns that are written let one more wait to be read: with 128, sixteen are read at once.
WRITTEN_FOR_ONE = 8
#: States that SGLang has room for beside each stream that it writes: two to go back to, two of its prefixes, its own.
STATES_A_STREAM = 5
#: SGLang's own memory of states, in parts of that of keys and values.
STATES_SHARE = 0.9
#: Tokens of SGLang's context beyond ours, because it counts a few as reserved.
CONTEXT_MARGIN = 64
#: The port at which the processes of a server meet, counted from its own (`agents.engines.sglang.process`).
MEETING_PORT = 50

_GRAPHS = ("--disable-cuda-graph", "--cuda-graph-config")
_DECODE_GRAPHS = ("--cuda-graph-max-bs", "--cuda-graph-bs", "--cuda-graph-bs-decode", "--cuda-graph-backend-decode")
_PREFILL_GRAPHS = ("--cuda-graph-backend-prefill", "--cuda-graph-bs-prefill", "--cuda-graph-max-bs-prefill")
#: By the name of a chosen argument: the user's arguments beside which it is not given.
NOT_BESIDE: dict[str, Words] = {
    # Each data-parallel worker needs a port of its own.
    "--nccl-port": ("--dp-size", "--data-parallel-size"),
    "--cuda-graph-max-bs-decode": (
        *_GRAPHS,
        *_DECODE_GRAPHS,
        "--disable-decode-cuda-graph",
        "--disable-cuda-graph-padding",
    ),
    "--disable-prefill-cuda-graph": (
        *_GRAPHS,
        *_PREFILL_GRAPHS,
        "--enable-breakable-cuda-graph",
    ),
    # With the third, SGLang would wait without a limit, for as many free places as it ever read at once.
    "--enable-prefill-delayer": (
        "--prefill-delayer-queue-min-ratio",
        "--prefill-delayer-max-delay-ms",
        "--max-running-requests",
        "--disable-overlap-schedule",
    ),
}


def choose_arguments(settings: SGLangSettings, place: ServerPlace, host: Host) -> list[Words]:
    """Return the arguments with which a server is fast and right for what a run asks of it.

    Example, two of those for Qwen3-VL in bfloat16 on an H100 with all of sgl_kernel::

        ("--attention-backend", "fa3"), ("--mm-attention-backend", "fa3")
    """
    text, tower = _attention(settings, place, host)
    chosen: list[Words] = [
        ("--model-path", settings.model_path),
        ("--tp-size", str(settings.tensor_parallel)),
        ("--port", str(place.port)),
        ("--host", place.address),
        ("--dtype", settings.dtype),
        ("--base-gpu-id", str(place.first_gpu)),
        ("--weight-version", "0"),
        ("--log-level", "warning"),
        ("--mem-fraction-static", f"{settings.mem_fraction:g}"),
        # The port that SGLang chooses is anybody's until the weights are loaded.
        ("--nccl-port", str(place.port + MEETING_PORT)),
        ("--attention-backend", text),
        ("--mm-attention-backend", tower),
        # Without top-k every backend draws with torch, and this one compiles nothing.
        ("--sampling-backend", "pytorch"),
        # No request has a grammar.
        ("--grammar-backend", "none"),
        # The first request compiles the same kernels.
        ("--skip-server-warmup",),
        ("--cuda-graph-max-bs-decode", str(min(_sessions(settings), MAX_CAPTURED))),
        # It would capture over 50 sizes, and SGLang has none for images.
        ("--disable-prefill-cuda-graph",),
        *_turns_together(settings),
        *_context(settings),
        *_states(settings),
    ]
    if settings.lora_rank:
        chosen += [
            ("--enable-lora",),
            ("--max-lora-rank", str(settings.lora_rank)),
            ("--lora-target-modules", *settings.lora_targets),
            ("--max-loras-per-batch", "2"),  # the one that writes, and none
        ]
    if settings.frees_memory and host.has_memory_saver:
        chosen.append(("--enable-memory-saver",))
    if settings.routes:
        chosen.append(("--enable-return-routed-experts",))
    if settings.dtype != "float32":
        # The learner's log-probs come from float32 logits too: `agents.model.policy.float32_logits`.
        chosen.append(("--enable-fp32-lm-head",))
    given = {word.partition("=")[0] for word in settings.arguments}
    return [words for words in chosen if given.isdisjoint((words[0], *NOT_BESIDE.get(words[0], ())))]


def launch_command(settings: SGLangSettings, chosen: Sequence[Words]) -> list[str]:
    """Return the command that starts a server with chosen arguments, and then the user's.

    Of an argument that is given twice, in whatever spelling, SGLang's parser takes the last.
    """
    words = [word for argument in chosen for word in argument]
    # As a file: as a module it would import its package first, which takes half a second.
    return [sys.executable, str(LAUNCH), *settings.command, *words, *settings.arguments]


def _attention(settings: SGLangSettings, place: ServerPlace, host: Host) -> tuple[str, str]:
    """Return the attention of the decoder and of the vision tower; triton and sdpa have every dtype on every GPU."""
    generation = 0
    if place.first_gpu < len(host.generations):
        generation = host.generations[place.first_gpu]
    if settings.dtype == "float32" or generation not in (8, 9):
        return "triton", "sdpa"
    if generation == 9 and host.has_fa3:
        return "fa3", "fa3"
    # Here SGLang's sdpa would copy a mask of all pairs of patches from the host in every layer.
    return "triton", "triton_attn"


def _sessions(settings: SGLangSettings) -> int:
    """Return how many sessions one server may have at once."""
    mean = settings.max_sessions / settings.num_servers
    return min(settings.max_sessions, math.ceil(most_sessions(mean)))


def _turns_together(settings: SGLangSettings) -> list[Words]:
    """Return what lets turns be read together: whenever a server reads some, all that it writes stand still."""
    if not settings.turn_wait_s:
        return []
    ratio = ("--prefill-delayer-queue-min-ratio", f"{1 / WRITTEN_FOR_ONE:g}")
    most = ("--prefill-delayer-max-delay-ms", f"{1000 * settings.turn_wait_s:g}")
    return [("--enable-prefill-delayer", *ratio, *most)]


def _context(settings: SGLangSettings) -> list[Words]:
    """Return a context that is shorter than the model's: SGLang's tables have a row of it for each session."""
    longest = max_positions(settings.model_path)
    length = settings.context_length + CONTEXT_MARGIN
    # SGLang refuses to start with a longer context than the model's own.
    if not settings.context_length or longest is None or length >= longest:
        return []
    return [("--context-length", str(length))]


def _states(settings: SGLangSettings) -> list[Words]:
    """Return a larger share of the cache's memory for the states of linear attention, if streams are short.

    With SGLang's own share, half as many streams of 4,096 tokens of a 2B network run as keys and values have room for.
    """
    text = text_config(settings.model_path)
    states = STATES_A_STREAM * state_bytes(text)
    if not states:
        return []
    longest = settings.context_length or text["max_position_embeddings"]
    ratio = states / (longest * token_bytes(text))
    # Most streams are shorter than the longest: less than SGLang's own share would be wrong.
    if ratio <= STATES_SHARE:
        return []
    return [("--mamba-full-memory-ratio", f"{ratio:.3g}")]


def choose_variables(dtype: str) -> dict[str, str]:
    """Return the environment variables of a server; those that are set already come first."""
    chosen = {
        # Images are read 1.5 times as fast as with torch's threads.
        "OMP_NUM_THREADS": "1",
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "agents.engines.sglang.in_server",
        # SGLang's own 100 hold six encoded images of 1,024 tokens at 2B; others would be encoded anew.
        "SGLANG_VLM_CACHE_SIZE_MB": "1024",
    }
    if dtype == "float32":
        chosen["TRITON_F32_DEFAULT"] = "ieee"  # else triton multiplies as TF32
        chosen["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # else what a convolution looks back on is rounded
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
