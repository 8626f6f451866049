"""Where the time of a training step goes: one call under the profiler in, seconds by kind of kernel out.

Kernels are told apart by name; among matrix products those of the output layer and of the vision tower by shape.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import markdown

#: The first that matches counts. Names are those of CUDA kernels, and of ATen's operators on a CPU.
KINDS = (
    ("communication", r"nccl|all_gather|reduce_scatter|all_reduce|AllGather|ReduceScatter"),
    ("attention", r"flash|fmha|scaled_dot|varlen|efficient_attention|attn"),
    (
        "gemm",
        r"gemm|nvjet|cutlass|xmma|wgmma|cublas|splitK|aten::mm\b|addmm|aten::bmm|convolution|conv_depthwise|dgrad",
    ),
    ("optimizer", r"[Aa]dam"),
    ("foreach", r"multi_tensor_apply|foreach|lpnorm"),
    ("memcpy, memset", r"[Mm]emcpy|[Mm]emset"),
    ("norm", r"layer_?norm|rms"),
    ("softmax, logsumexp", r"softmax|logsumexp|cross_entropy"),
    ("gather, scatter, cat", r"index|gather|scatter|CatArray|aten::cat|embedding|[Nn]onzero|sort"),
    ("copy, cast", r"direct_copy|aten::copy_|bfloat16_copy|float_copy"),
    ("reduce", r"reduce|aten::sum|aten::mean"),
    ("compiled", r"triton"),
    ("elementwise", r"elementwise|vectorized|aten::(mul|add|div|sub|neg|silu|gelu|pow|rsqrt|exp|sigmoid|cos|sin)"),
)
CONVOLUTIONS = {"aten::convolution", "aten::cudnn_convolution", "aten::convolution_backward"}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", *CONVOLUTIONS}


def kind_of(name: str) -> str:
    """Return the kind of a kernel.

    >>> kind_of("nvjet_tst_128x256_64x4_bz_TNT"), kind_of("void pytorch_flash::flash_fwd_kernel<...>")
    ('gemm', 'attention')
    """
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def breakdown(step: Callable[[], object], network: Any, device: str) -> dict[str, Any]:
    """Take one step under the profiler. Returns seconds by kind, their sum, and the longest kernels.

    `busy_s` is the time in which any kernel ran, `idle_s` the rest of the profiled step; the profiler itself slows the
    host down, so hold `busy_s` against the time of an unprofiled step.
    """
    on_gpu = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - started
    events: Any = profiler.events()
    vocabulary, tower = network.config.get_text_config().vocab_size, _vision_shapes(network)
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in events:
        if on_gpu and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
            seconds = (event.time_range.end - event.time_range.start) * 1e-6
        elif not on_gpu and event.device_type == DeviceType.CPU:
            seconds = event.self_cpu_time_total * 1e-6
        else:
            continue
        kinds[kind_of(event.name)] += seconds  # type: ignore[assignment]
        names[event.name] += seconds  # type: ignore[assignment]
    for event in events:
        if event.device_type != DeviceType.CPU or event.name not in PRODUCTS:
            continue
        where = _place(event.input_shapes or [], vocabulary, tower)
        kernels = [kernel.duration for kernel in event.kernels if kind_of(kernel.name) == "gemm"]
        seconds = (sum(kernels) if on_gpu else event.self_cpu_time_total) * 1e-6
        if where != "body":
            kinds[f"gemm, {where}"] += seconds  # type: ignore[assignment]
            kinds["gemm"] -= seconds  # type: ignore[assignment]
    kinds["gemm, body"] = kinds.pop("gemm", 0)
    busy = _covered(spans) * 1e-6 if on_gpu else sum(kinds.values())
    return {
        "wall_s": wall,
        "busy_s": busy,
        "idle_s": max(0.0, wall - busy),
        "kernels": len(spans),
        "kinds_s": dict(kinds.most_common()),
        "longest": [[name[:100], seconds] for name, seconds in names.most_common(25)],
    }


def print_breakdown(found: dict[str, Any], step_s: float) -> None:
    """Print shares of the GPU's time, idle time taken from the unprofiled step."""
    busy = found["busy_s"]
    rows = [[kind, f"{s:.3f}", f"{s / step_s:.3f}"] for kind, s in found["kinds_s"].items()]
    rows.append(["idle", f"{max(0.0, step_s - busy):.3f}", f"{max(0.0, step_s - busy) / step_s:.3f}"])
    print(markdown(("kind", "seconds", f"share of {step_s:.3f} s"), rows), flush=True)


def _vision_shapes(network: Any) -> set[frozenset[int]]:
    """Return the sides of the vision tower's matrices, less those that the decoder has too."""
    tower, rest = set(), set()
    for name, parameter in network.named_parameters():
        if parameter.dim() >= 2:
            sides = frozenset((parameter.shape[0], parameter[0].numel()))
            (tower if "visual" in name else rest).add(sides)
    return tower - rest


def _place(shapes: list[Any], vocabulary: int, tower: set[frozenset[int]]) -> str:
    """Return the part of the network that a matrix product belongs to, going by the shapes it is given."""
    factors = [shape for shape in shapes if len(shape) >= 2]
    sides = {int(side) for shape in factors for side in shape[-2:]}
    if any(len(shape) > 3 for shape in factors):
        return "vision tower"
    if vocabulary in sides:
        return "output layer"
    return "vision tower" if any(shape <= sides for shape in tower) else "body"


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> _covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
