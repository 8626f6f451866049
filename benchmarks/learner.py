"""One training step: seconds, tokens per second, share of the machine, memory; held against other ways to take it.

`python -m benchmarks.learner --model 2b --device cuda` prints tables and writes `learner_MODEL.json` after every row.
`--model tiny --device cpu` runs every part in seconds, which shows that it works and nothing else. Several GPUs:
`benchmarks.scaling`.

MFU is the counted operations (`benchmarks.flops`; a training step is three forwards, recomputation not counted) over
the seconds and the rate of a large matrix product on the same machine in the same run: `needed` counts a prompt shared
by samples once, `whole` every stream and its images by itself.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.types import SamplingDistribution
from benchmarks.learner_ours import Options, fresh_model, our_step
from benchmarks.learner_peers import image_inputs, plain_step
from benchmarks.learner_profile import breakdown, print_breakdown
from benchmarks.learner_tools import (
    RESULT,
    Bench,
    Row,
    attempt,
    gemm_rates,
    in_fresh_process,
    release,
    show,
    timed,
    wait,
)
from benchmarks.learner_trl import TrlOptions, run_trl
from benchmarks.learner_workload import (
    GEO3K,
    MODELS,
    RECIPE,
    SMALL_IMAGES,
    TINY,
    TINY_IMAGES,
    known_model,
    make_samples,
    plain_network,
    shape_config,
    to_bfloat16,
)
from benchmarks.report import RESULTS, commit, write_result
from trainer.data.packing import balanced_bins, collate, pack_rows
from trainer.types import TrainingSample

PARTS = ("gemm", "ours", "plain", "trl", "vision", "memory")
OURS = (
    "8192:recompute",
    "16384:recompute:profile",
    "32768:recompute",
    "8192",
    "16384:compile:profile",
    "16384:unshared",
)
TRL = ("8", "8:liger", "8:liger:trim")
VISION = ("starter:98304",)
MEMORY = ("2b:16384:recompute", "4b:8192:recompute", "4b:8192:recompute:lora32", "8b:8192:recompute:lora32")


def ours(bench: Bench) -> Iterator[Row]:
    """Our learner with each set of options, and the breakdown of those that ask for one."""
    for text in bench.args.ours:
        yield attempt(text, lambda text=text: _ours(bench, Options.parse(text)))


def _ours(bench: Bench, options: Options) -> Row:
    everything = bench.samples(shared=not options.unshared)
    torch.compiler.reset()  # nothing that was compiled for the row before, and no limit on how often reached
    model = fresh_model(bench.config, bench.device)
    computed: list[int] = []
    embedding = model.architecture.decoder(model.backbone).embed_tokens
    step = our_step(model, everything, options, bench.device)
    counter = embedding.register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].numel()))
    started = time.perf_counter()
    stats = step()
    wait(bench.device)
    first_s = time.perf_counter() - started
    counter.remove()
    timing, _ = timed(step, bench.device, 1, bench.args.repeats)
    row = {**bench.figures(timing["seconds"], everything), **timing, "first_s": first_s, **_agreement(stats)}
    row["computed_tokens_per_s"] = sum(computed) / timing["seconds"]
    row["microbatches"] = len(computed)
    if options.profile:
        row["breakdown"] = breakdown(step, model, bench.device)
        print_breakdown(row["breakdown"], timing["seconds"])
    return row


def _agreement(stats: Any) -> Row:
    """Return what must agree between paths, of the first step."""
    row = {"loss": stats.loss, "grad_norm": stats.grad_norm}
    return row | {
        name: getattr(stats, name) for name in ("logprob_gap_mean", "logprob_gap_max") if hasattr(stats, name)
    }


def plain(bench: Bench) -> Iterator[Row]:
    """Padded rows through Transformers, in micro-batches of several sizes."""
    samples = bench.samples()
    for size in bench.args.plain:
        yield attempt(f"padded {size}", lambda size=size: _plain(bench, samples, size))


def _plain(bench: Bench, samples: Sequence[TrainingSample], size: int) -> Row:
    network = plain_network(bench.config, bench.device)
    step = plain_step(network, samples, size, RECIPE, bench.device, bfloat16=bench.on_gpu)
    timing, first = timed(lambda: step(True), bench.device, 1, bench.args.repeats)
    return {**bench.figures(timing["seconds"], samples), **timing, **asdict(first)}


def trl(bench: Bench) -> Iterator[Row]:
    """TRL's trainer, each setting in a fresh process: its layer kernels replace functions of Transformers for good."""
    bench.samples()
    for text in bench.args.trl:
        yield attempt(f"trl {text}", lambda text=text: in_fresh_process(bench, f"trl {text}"))


def _trl(bench: Bench, text: str) -> Row:
    first, *words = text.split(":")
    options = TrlOptions(int(first), **dict.fromkeys(words, True))
    samples = bench.samples()
    network = plain_network(bench.config, bench.device)
    timing = run_trl(network, samples, options, RECIPE, bench.device, 1 + bench.args.trl_repeats)
    seconds = statistics.median(timing.seconds[1:])
    row = {**bench.figures(seconds, samples), "all_seconds": timing.seconds, "peak_gib": timing.peak_gib}
    return {**row, **asdict(timing.first), "computed_tokens_per_s": timing.computed_tokens / seconds}


def vision(bench: Bench) -> Iterator[Row]:
    """Many small images: tower, forward pass and step, ours against Transformers."""
    for text in bench.args.vision:
        name, rest = text.split(":", 1)
        config, options = shape_config(name), Options.parse(rest)
        samples = make_samples(config, TINY_IMAGES if name == "tiny" else SMALL_IMAGES)
        for what, measure in (
            ("tower", _towers),
            ("network", _networks),
            ("forward", partial(_passes, learn=False)),
            ("step", partial(_passes, learn=True)),
        ):
            call = partial(measure, bench, config, samples, options)
            yield attempt(f"{text} {what}", call)


def _ratio(bench: Bench, mine: Callable[[], Any], theirs: Callable[[], Any]) -> Row:
    our, _ = timed(mine, bench.device, 2, bench.args.repeats)
    their, _ = timed(theirs, bench.device, 2, bench.args.repeats)
    names = {"ours_s": our["seconds"], "plain_s": their["seconds"], "ratio": their["seconds"] / our["seconds"]}
    return {**names, "ours_all": our["all_seconds"], "plain_all": their["all_seconds"]}


def _towers(bench: Bench, config: Any, samples: Sequence[TrainingSample], _: Options) -> Row:
    """The vision tower alone, without gradient."""
    model, network = fresh_model(config, bench.device), plain_network(config, bench.device)
    if bench.on_gpu:
        to_bfloat16(model)
        to_bfloat16(network)
    inputs = image_inputs([image for s in samples for image in s.images], bench.device)
    pixels, grids = inputs["pixel_values"], [image.grid_thw for s in samples for image in s.images]
    kind = next(network.parameters()).dtype
    with torch.no_grad():
        return _ratio(
            bench,
            lambda: model.encode_images(pixels, grids),
            lambda: network.model.visual(pixels.to(kind), grid_thw=inputs["image_grid_thw"]),
        )


def _networks(bench: Bench, config: Any, samples: Sequence[TrainingSample], options: Options) -> Row:
    """The whole network's forward pass, without gradient: what it reads is on the device beforehand on both sides."""
    network = plain_network(config, bench.device)
    theirs = plain_step(network, samples, options.max_tokens, RECIPE, bench.device, False, bench.on_gpu)
    model, dtype = fresh_model(config, bench.device), torch.float32
    if bench.on_gpu:
        to_bfloat16(model)
        dtype = torch.bfloat16
    bins = balanced_bins(pack_rows(samples, options.max_tokens), options.max_tokens)
    batches = [collate(rows, model.image_token_id, bench.device, dtype).packed for rows in bins]

    @torch.no_grad()
    def mine() -> None:
        for packed in batches:
            model.token_scores(packed, SamplingDistribution())

    return _ratio(bench, mine, lambda: theirs(False))


def _passes(bench: Bench, config: Any, samples: Sequence[TrainingSample], options: Options, learn: bool) -> Row:
    """A whole step, or all of it that comes before the gradient: samples without advantage are only measured."""
    network = plain_network(config, bench.device)
    recompute = options.recompute > 0
    theirs = plain_step(network, samples, options.max_tokens, RECIPE, bench.device, recompute, bench.on_gpu)
    chosen = samples if learn else [replace(s, advantage=0.0) for s in samples]
    mine = our_step(fresh_model(config, bench.device), chosen, options, bench.device)
    return {**_ratio(bench, mine, lambda: theirs(learn)), "microbatch_tokens": options.max_tokens}


def memory(bench: Bench) -> Iterator[Row]:
    """Two steps of 16 samples for each network and set of options, each in a fresh process."""
    for text in bench.args.memory:
        yield attempt(text, lambda text=text: in_fresh_process(bench, f"memory {text}"))


def _memory(bench: Bench, text: str) -> Row:
    name, options = text.split(":", 1)
    config = shape_config(name)
    sizes = TINY if name == "tiny" else replace(GEO3K, problems=2)
    likely = np.float32(-np.log(config.text_config.vocab_size))
    samples = [replace(s, logprobs_T=np.full_like(s.logprobs_T, likely)) for s in make_samples(config, sizes)]
    frozen = bench.on_gpu and "lora" in options  # what is only read is kept as it is computed with
    model = fresh_model(config, bench.device, torch.bfloat16 if frozen else torch.float32)
    weights = sum(parameter.numel() for parameter in model.parameters())
    step = our_step(model, samples, Options.parse(options), bench.device)
    release()
    timing, stats = timed(step, bench.device, 0, 2)
    longest = max(len(s.ids_T) for s in samples)
    return {"weights_1e9": weights / 1e9, **timing, "loss": stats.loss, "longest_stream": longest}


def child(bench: Bench, text: str) -> None:
    """Measure one row and print it for the process that asked."""
    part, rest = text.split(" ", 1)
    row = attempt(rest, lambda: (_trl if part == "trl" else _memory)(bench, rest))
    print(RESULT + json.dumps({name: value for name, value in row.items() if name not in ("name", "spent_s")}))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--model", type=known_model, default="2b", help=f"one of {', '.join(MODELS)}; 30b-a3b@4 is cut to four layers"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, in order")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--ours", nargs="+", default=OURS, help="MAX_TOKENS[:recompute][:compile][:profile]...")
    parser.add_argument("--plain", nargs="+", type=int, default=(16384, 32768, 65536), help="padded tokens")
    parser.add_argument("--trl", nargs="+", default=TRL, help="BATCH[:liger][:trim][:halved]")
    parser.add_argument("--vision", nargs="+", default=VISION, help="MODEL:MAX_TOKENS[:recompute][:compile]")
    parser.add_argument("--memory", nargs="+", default=MEMORY, help="MODEL:MAX_TOKENS[:recompute][:lora32]...")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps, after two that are not")
    parser.add_argument("--trl-repeats", type=int, default=2, help="timed steps of TRL, after one that is not")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="begin no row after so many seconds")
    parser.add_argument("--child-timeout", type=float, default=240.0, help="seconds for a row in a fresh process")
    for hidden in ("--child", "--work"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--gemm-rate", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts takes {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    """Parse, measure, write."""
    args = parse_args()
    started = time.perf_counter()
    if args.child:
        child(Bench(args, shape_config(args.model), Path(args.work), args.gemm_rate), args.child)
        return
    rates = gemm_rates(args.device)
    figures: dict[str, Any] = {"model": args.model, "gemm": rates}
    figures["gpu"] = torch.cuda.get_device_name() if args.device.startswith("cuda") else ""
    show("gemm", rates)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"learner_{args.model.replace('@', '-')}.json"
    packages = [name for name in ("torch", "transformers", "trl", "liger_kernel") if find_spec(name)]
    command, at = f"python -m benchmarks.learner {shlex.join(sys.argv[1:])}", commit()
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        bench = Bench(args, shape_config(args.model), Path(work), max(row["tflops"] for row in rates) * 1e12)
        for part in [name for name in args.parts.split(",") if name != "gemm"]:
            rows = figures[part] = []
            measured = globals()[part](bench)
            while time.perf_counter() - started < args.stop_after:
                try:
                    row = next(measured, None)
                except Exception as error:  # the other parts are still worth having
                    traceback.print_exc()
                    row, measured = {"name": part, "failed": f"{type(error).__name__}: {error}"}, iter(())
                if row is None:
                    break
                rows.append(row)
                write_result(path, command, figures, at, packages)
            show(part, rows)


if __name__ == "__main__":
    main()
