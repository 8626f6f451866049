"""Chooses the arguments of an SGLang server that we start, each with the reason for it.

Facts about the GPU, the installed kernels, the checkpoint and the run come in, arguments go out: `choose_arguments` is
a pure function; `agents.engines.sglang.server_facts` finds the facts. The user's arguments have the last word
(`without_given`). Names and rules are those of SGLang 0.5.15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from agents.engines.sglang.server_facts import Gpu, ServedModel
from envs.errors import UserError

#: Largest batch to capture for each GiB of the GPU. SGLang counts 2 MiB for a row of a graph: this is 2 % of the GPU.
ROWS_PER_GIB = 8
MAX_CAPTURED = 1024
#: So many turns that are written let one more wait to be read: with 128, sixteen are read at once.
WRITTEN_FOR_ONE = 8
#: Tokens of SGLang's context beyond ours, because it counts a few as reserved.
CONTEXT_MARGIN = 64


@dataclass(frozen=True)
class Argument:
    """One argument of the server, why it is given, and the other names by which a user decides the same.

    Example: `Argument(("--grammar-backend", "none"), "no request has a grammar")`.
    """

    words: tuple[str, ...]
    reason: str = ""
    other_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that decides it."""
        return (self.words[0], *self.other_names)


@dataclass(frozen=True)
class ServerFacts:
    """What the arguments of one server depend on.

    `sessions` is the most that it serves at once; a turn waits up to `turn_wait_s` for others. `mem_fraction` is the
    share of its GPU's memory that its `servers_on_gpu` servers may take together. Unknown facts are None, or 0 for
    `context_length`.
    """

    gpu: Gpu | None = None
    has_fa3: bool = False
    checkpoint: ServedModel | None = None
    dtype: str = "bfloat16"
    context_length: int = 0
    sessions: int = 256
    turn_wait_s: float = 0.2
    mem_fraction: float = 0.4
    servers_on_gpu: int = 1
    tensor_parallel: int = 1


def choose_arguments(facts: ServerFacts) -> tuple[Argument, ...]:
    """Return the arguments with which a server is fast and right for what a run asks of it.

    Example, the first two for Qwen3-VL in bfloat16 on an H100 with all of sgl_kernel::

        Argument(("--attention-backend", "fa3"), "Hopper, and sgl_kernel has FlashAttention-3")
        Argument(("--mm-attention-backend", "fa3"), "Hopper, and sgl_kernel has FlashAttention-3")

    Raises:
        UserError: several servers share a GPU, and one's part does not hold the weights and a stream.
    """
    return (
        *_attention(facts),
        Argument(
            ("--sampling-backend", "pytorch"),
            "requests have no top-k and top-p: every backend draws with torch, and this one compiles nothing",
        ),
        Argument(("--grammar-backend", "none"), "no request has a grammar"),
        Argument(("--skip-server-warmup",), "the first request compiles the same kernels"),
        *_graphs(facts),
        *_turns_together(facts),
        *_context(facts),
        *_memory(facts),
    )


def _attention(facts: ServerFacts) -> list[Argument]:
    major = facts.gpu.capability[0] if facts.gpu else 0
    if facts.dtype == "float32":
        backend = "triton"
        reason = "the other kernels have no float32"
    elif major == 9 and facts.has_fa3:
        backend = "fa3"
        reason = "Hopper, and sgl_kernel has FlashAttention-3"
    elif major == 9:
        backend = "triton"
        reason = "Hopper, but sgl_kernel has no FlashAttention-3 here"
    else:
        if major >= 10:
            kind = "Blackwell"
        elif major:
            kind = "not Hopper"
        else:
            kind = "GPU not known"
        backend = "triton"
        reason = f"{kind}: FlashAttention-3 is for Hopper, and these kernels need no other package"
    chosen = [Argument(("--attention-backend", backend), reason)]
    if facts.checkpoint is None or facts.checkpoint.reads_images:
        chosen.append(_tower_attention(backend, major, facts.dtype, reason))
    return chosen


def _tower_attention(backend: str, major: int, dtype: str, reason: str) -> Argument:
    """Return the attention of the vision tower. SGLang's own choice for Ampere reads no float32."""
    if backend == "triton" and major in (8, 9) and dtype != "float32":
        why = "sdpa copies a mask of all pairs of patches from the host in every layer: 16 MiB for 1,024 tokens"
        return Argument(("--mm-attention-backend", "triton_attn"), f"{reason}; {why}")
    return Argument(("--mm-attention-backend", "fa3" if backend == "fa3" else "sdpa"), reason)


def _graphs(facts: ServerFacts) -> list[Argument]:
    gib = facts.gpu.num_bytes / 2**30 if facts.gpu else 80
    sizes = capture_sizes(min(facts.sessions, MAX_CAPTURED, max(1, int(ROWS_PER_GIB * gib))))
    of_both = ("--disable-cuda-graph", "--cuda-graph-config")
    decode = ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode", "--cuda-graph-bs", "--cuda-graph-backend-decode")
    prefill = ("--cuda-graph-backend-prefill", "--cuda-graph-bs-prefill", "--cuda-graph-max-bs-prefill")
    old = ("--enable-breakable-cuda-graph", "--enforce-piecewise-cuda-graph", "--piecewise-cuda-graph-tokens")
    return [
        Argument(
            ("--cuda-graph-bs-decode", *map(str, sizes)),
            f"up to {facts.sessions} sessions at once; few sizes are captured sooner",
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

    The last one is the next size that SGLang itself would capture. A batch runs in the next larger graph.

    >>> capture_sizes(100)
    (1, 2, 4, 8, 16, 32, 48, 64, 96, 104)
    """
    if most > 12:
        if most <= 256:
            unit = 8
        else:
            unit = 16 if most <= 512 else 32
        most = math.ceil(most / unit) * unit
    steps = sorted([*(2**power for power in range(10)), *(3 * 2**power for power in range(4, 9))])
    return (*(size for size in steps if size < most), most)


def _turns_together(facts: ServerFacts) -> list[Argument]:
    """Return what lets the turns of a server be read together: whenever it reads some, all that it writes stand still.

    With `--max-running-requests`, SGLang would wait without a limit, for as many free places as it ever read at once.
    """
    if not facts.turn_wait_s:
        return []
    ratio = "--prefill-delayer-queue-min-ratio"
    most = "--prefill-delayer-max-delay-ms"
    words = ("--enable-prefill-delayer", ratio, f"{1 / WRITTEN_FOR_ONE:g}", most, f"{1000 * facts.turn_wait_s:g}")
    others = (ratio, most, "--max-running-requests", "--disable-overlap-schedule")
    return [Argument(words, f"turn_wait_s {facts.turn_wait_s:g}", others)]


def _context(facts: ServerFacts) -> list[Argument]:
    if not facts.context_length or facts.checkpoint is None:
        return []
    length = facts.context_length + CONTEXT_MARGIN
    reason = f"tables have a row of it for each session; the model's own is {facts.checkpoint.max_positions}"
    if length < facts.checkpoint.max_positions:
        return [Argument(("--context-length", str(length)), reason)]
    return []


def _memory(facts: ServerFacts) -> list[Argument]:
    """Return how much memory a server may take.

    While it starts, SGLang counts what other processes take as its own. So servers that share a GPU get a number of
    tokens, which is that of their part less the weights, and a fraction that does not bind.
    """
    name = "--mem-fraction-static"
    count = facts.servers_on_gpu
    whole = facts.mem_fraction
    if count == 1:
        return [Argument((name, f"{whole:g}"), "--mem-fraction")]
    reason = f"--mem-fraction {whole:g} for {count} servers on the GPU"
    if facts.checkpoint is None or facts.gpu is None:
        return [Argument((name, f"{whole / count:.3f}"), reason)]
    weights = facts.checkpoint.weight_bytes // facts.tensor_parallel
    token = facts.checkpoint.token_bytes // facts.tensor_parallel
    tokens = (int(whole * facts.gpu.num_bytes) // count - weights) // token
    if tokens < max(1, facts.context_length):
        least = (weights + facts.context_length * token) * count / facts.gpu.num_bytes
        rule = f"must hold {count} servers on a GPU, each with its weights and one stream"
        raise UserError("--mem-fraction", rule, f"{whole:g}", f"give more than {least:.2f}, or less --num-servers")
    return [
        Argument((name, f"{(1 + whole) / 2:g}"), "what the other servers on the GPU take counts as this one's"),
        Argument(("--max-total-tokens", str(tokens)), reason, (name,)),
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


def without_given(chosen: Sequence[Argument], given: Sequence[str]) -> list[Argument]:
    """Return the arguments that the user's do not decide, in whatever words; SGLang's parser takes abbreviations too.

    >>> chosen = [Argument(("--skip-server-warmup",)), Argument(("--attention-backend", "triton"))]
    >>> [argument.words for argument in without_given(chosen, ["--attention-backend=fa3"])]
    [('--skip-server-warmup',)]
    """
    names = given_names(given)
    known = {name for argument in chosen for name in argument.names}

    def is_decided(argument: Argument) -> bool:
        return any(
            name in argument.names if name in known else any(own.startswith(name) for own in argument.names)
            for name in names
        )

    return [argument for argument in chosen if not is_decided(argument)]


def given_names(given: Sequence[str]) -> list[str]:
    """Return the names of the user's arguments, those of a file named by `--config` too, which SGLang reads first."""
    names = [word.partition("=")[0] for word in given if word.startswith("--") and len(word) > 2]
    for word, file in pairwise(given):
        if word == "--config":
            try:
                values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError, yaml.YAMLError):  # SGLang says what is wrong with it
                continue
            names += [f"--{key}".replace("_", "-") for key in values] if isinstance(values, Mapping) else []
    return names


def server_gpus(first_gpu: int, number: int, tensor_parallel: int, num_gpus: int) -> range:
    """Return the GPUs of the `number`-th server. Servers beyond the last GPU share the GPUs, from the first on.

    >>> [server_gpus(1, number, 1, num_gpus=2) for number in range(3)]
    [range(1, 2), range(0, 1), range(1, 2)]
    """
    gpu = first_gpu + number * tensor_parallel
    if num_gpus:
        gpu %= num_gpus
        if gpu + tensor_parallel > num_gpus:
            gpu = 0
    return range(gpu, gpu + tensor_parallel)
