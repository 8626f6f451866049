"""The same step on both backends: `python -m benchmarks.backends --gpus 2` (Python 3.12, Megatron, one or two GPUs).

For tiny random checkpoints of each architecture it takes one step with FSDP on one rank, the reference, and with
Megatron under each layout; it compares loss, norm of the gradient, log-probs and weights, reads the exported folder
with Transformers, resumes under another layout, and traces layer by layer where bfloat16 parts the two networks.

Each row is written as it is made. A case that fails is a row with its error; the command then ends with 1.
On a CPU (`--device cpu`) plain layers stand for those of TransformerEngine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import start_processes

from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.types import SamplingParams
from benchmarks.megatron_trace import trace
from benchmarks.report import RESULTS, commit, markdown
from tests.tiny_models import write_tiny_model
from tests.trainer.steps import random_samples, routed
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LayoutConfig, LearnerConfig, OptimConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.megatron.kernels import load_kernels
from trainer.learner.weights_io import empty_model
from trainer.types import StepStats, TrainingSample

MODELS = ("qwen3", "llama", "qwen3_vl", "qwen3_vl_moe")
OPTIM = OptimConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1)
LEARNER = LearnerConfig(max_tokens_per_microbatch=256, compile="off")
PARAMS = SamplingParams(temperature=0.7)


@dataclass(frozen=True)
class Settings:
    """What a run sets besides its layout."""

    optim: OptimConfig = OPTIM
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LEARNER
    #: Random experts for the tokens of a mixture.
    has_routes: bool = False

    def minibatches(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        """Return the samples of each update."""
        return [list(samples[number :: self.optim.minibatches]) for number in range(self.optim.minibatches)]


#: By name: flags, and the ranks that they need at least.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one rank": ({}, 1),
    "dp 2": ({}, 2),
    "tp 2": ({"tp": 2}, 2),
    "tp 2 sp": ({"tp": 2, "sp": True}, 2),
    "pp 2": ({"pp": 2}, 2),
    "cp 2": ({"cp": 2}, 2),
    "ep 2": ({"ep": 2}, 2),
    "tp 2 ep 2 sp": ({"tp": 2, "ep": 2, "sp": True}, 2),
    "tp 2 etp 2 sp": ({"tp": 2, "etp": 2, "sp": True}, 2),
    "tp 2 pp 2": ({"tp": 2, "pp": 2}, 4),
    "tp 2 cp 2 sp": ({"tp": 2, "cp": 2, "sp": True}, 4),
}
#: By name: the settings of a run besides its layout.
SETTINGS: dict[str, Settings] = {
    "plain": Settings(),
    "recomputed": Settings(learner=LEARNER.model_copy(update={"recompute": 1.0})),
    "two updates": Settings(
        optim=OPTIM.model_copy(update={"minibatches": 2}), algorithm=AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01)
    ),
    "frozen tower": Settings(learner=LEARNER.model_copy(update={"freeze_vision": True})),
    "given routes": Settings(learner=LEARNER.model_copy(update={"recompute": 1.0}), has_routes=True),
}
#: The layouts that are compared under all settings.
UNDER_ALL = ("tp 2 sp", "pp 2", "cp 2")
#: So many failures before any success have one cause, and the other cases would only take their time.
GIVE_UP = 3
#: A rank waits this long for another whose case has failed.
LIMIT = timedelta(seconds=120)


@dataclass(frozen=True)
class Case:
    """One network under one layout and settings. `packed`: several streams in one row."""

    model: str
    layout: str
    dtype: str
    packed: bool
    settings: str = "plain"

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][1]


@dataclass(frozen=True)
class Step:
    """What is left of a step, on rank 0."""

    loss: float
    grad_norm: float
    entropy: float
    logprobs: dict[tuple[int, int, int, int], Any]
    weights: dict[str, Any]


def cases(device: str, num_gpus: int) -> list[Case]:
    """Return the cases that this machine can run: float32 where the kernels have it, and packed rows in bfloat16."""
    found = []
    for model, (layout, (flags, ranks)) in itertools.product(MODELS, LAYOUTS.items()):
        shares_experts, is_moe = flags.keys() & {"ep", "etp"}, model == "qwen3_vl_moe"
        if ranks > num_gpus or (shares_experts and not is_moe) or (is_moe and "tp" in flags and "sp" not in flags):
            continue
        if "cp" not in flags:  # context parallelism cuts packed rows alone
            found.append(Case(model, layout, "float32", packed=False))
        exact = [Case(model, layout, "float32", packed=True)] if device == "cpu" else []
        rounded = Case(model, layout, "bfloat16", packed=True)
        found += [*exact, rounded]
        found += [replace(case, settings=s) for case in exact or [rounded] for s in SETTINGS if is_compared(case, s)]
        if is_moe:  # in both dtypes: free experts change where rounding does
            found += [replace(case, settings="given routes") for case in [*exact, rounded]]
    return sorted(found, key=lambda case: case.ranks)


def is_compared(case: Case, settings: str) -> bool:
    """Return whether a case is to be compared under these settings too, which need no mixture."""
    has_tower = case.model.startswith("qwen3_vl")
    is_other = settings not in ("plain", "given routes")
    return is_other and case.layout in UNDER_ALL and (has_tower or settings != "frozen tower")


def write_model(folder: Path, model_type: str) -> None:
    """Write a tiny checkpoint whose values bfloat16 holds, with a vocabulary and positions that Megatron can share."""
    write_tiny_model(folder, model_type)
    file = folder / "model.safetensors"
    weights = {name: weight.bfloat16().float() for name, weight in load_file(file).items()}
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    more = -text["vocab_size"] % 16
    text["vocab_size"] += more
    for name in weights:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weights[name] = torch.cat([weights[name], weights[name][:more]])
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        rope["original_max_position_embeddings"] = 8192
    save_file(weights, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def samples_of(folder: Path, has_routes: bool = False) -> list[TrainingSample]:
    """Return the streams of the step, each with a key of its own."""
    model = PolicyModel.load(folder)
    samples = random_samples(model)
    if has_routes:
        assert model.routing.shape, "a mixture"
        # `routed` leaves the samples of the last prompt free, which would hide how near the others are.
        last = replace(samples[0], prefix_length=1)
        samples = routed([*samples, last], model.routing.shape)[:-1]
    return [replace(sample, key=(0, 0, number)) for number, sample in enumerate(samples)]


def reference(folder: Path, settings: Settings, dtype: torch.dtype, device: str) -> Step:
    """Take the step with FSDP on one rank."""
    model, optim, algorithm = empty_model(folder), settings.optim, settings.algorithm
    learner = FSDPLearner(model, PARAMS, 5, optim, algorithm, settings.learner, device=device, dtype=dtype, path=folder)
    samples = samples_of(folder, settings.has_routes)
    return _step(learner.step(settings.minibatches(samples)), learner.weights(torch.float32, "cpu"))


def _step(stats: StepStats, weights: dict[str, torch.Tensor]) -> Step:
    kept = {name: weight.clone().numpy() for name, weight in weights.items()}
    return Step(stats.loss, stats.grad_norm, stats.entropy, dict(stats.logprobs), kept)


def megatron_learner(case: Case, folder: Path, flags: dict[str, Any], device: str) -> Any:
    """Return the learner of a case under the layout of these flags."""
    from trainer.learner.megatron.learner import MegatronLearner

    settings = SETTINGS[case.settings]
    learner = MegatronLearner(
        folder,
        PARAMS,
        5,
        settings.optim,
        settings.algorithm,
        settings.learner,
        backend=LayoutConfig(backend="megatron", **flags),
        device=device,
        dtype=getattr(torch, case.dtype),
        changed=changes(flags, device),
    )
    learner.network.is_packed = case.packed
    return learner


def run_case(case: Case, folder: Path, device: str, expected: Step) -> dict[str, Any]:
    """Take the step with Megatron on all ranks; return the differences, on rank 0."""
    from megatron.core import parallel_state

    dtype: torch.dtype = getattr(torch, case.dtype)
    flags, began = LAYOUTS[case.layout][0], time.perf_counter()
    learner = megatron_learner(case, folder, flags, device)
    layout = learner.layout
    settings, world = SETTINGS[case.settings], dist.get_world_size()
    samples = samples_of(folder, settings.has_routes)
    number, shares = layout.data_rank(dist.get_rank(), world), layout.data_parallel(world)
    mine = [update[number::shares] for update in settings.minibatches(samples)]
    ready_s, began = time.perf_counter() - began, time.perf_counter()
    stats = learner.step(mine)
    step_s = time.perf_counter() - began
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, stats.logprobs)
    stats = replace(stats, logprobs={key: value for part in gathered for key, value in part.items()})
    weights = dict(learner.stream())
    stored = {name: weight.float().cpu() for name, weight in weights.items()}
    got = _step(stats, stored)
    exported = _reload(learner, folder, samples[0], dtype, device)
    resumed = _resume(learner, samples, folder) if case.layout == "tp 2" else {}
    del learner
    parallel_state.destroy_model_parallel()
    return {"ready_s": ready_s, "step_s": step_s, **differences(got, expected), **exported, **resumed}


def differences(got: Step, expected: Step) -> dict[str, float]:
    """Return how far a step is from the reference. `weights_*` are of weights, whose update was `lr` at most."""
    gaps = np.concatenate([np.abs(got.logprobs[key] - value) for key, value in expected.logprobs.items()])
    pairs = [
        (got.weights[plain(name)], weight) for name, weight in expected.weights.items() if plain(name) in got.weights
    ]
    moved = np.concatenate([np.abs(a - b).ravel() for a, b in pairs if a.shape == b.shape])
    return {
        "loss": expected.loss,
        "loss_diff": abs(got.loss - expected.loss),
        "grad_norm": expected.grad_norm,
        "grad_norm_rel": abs(got.grad_norm - expected.grad_norm) / expected.grad_norm,
        "entropy_diff": abs(got.entropy - expected.entropy),
        "logprob_mean": float(gaps.mean()),
        "logprob_max": float(gaps.max()),
        "weights_mean": float(moved.mean()),
        "weights_max": float(moved.max()),
        "weights_compared": len(pairs),
    }


def plain(name: str) -> str:
    """Return a parameter's name in a checkpoint."""
    return name.removeprefix("backbone.")


def changes(flags: dict[str, Any], device: str) -> Callable[[Any], None]:
    """Return what a tiny network needs: three layers on two stages, the first with those that DeepStack enters."""

    def change(provider: Any) -> None:
        if device == "cpu":
            from tests.megatron_cpu import without_kernels

            without_kernels(provider)
        if flags.get("pp", 1) > 1:
            provider.num_layers_in_first_pipeline_stage = 2

    return change


def _reload(learner: Any, folder: Path, sample: TrainingSample, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Export the trained weights; return how far Transformers' log-probs are from Megatron's on one stream."""
    own = learner.score(sample.ids_T.tolist(), sample.images)
    target = folder.parent / f"{folder.name}-exported"
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
    dist.barrier()
    learner.save(target, dtype)
    if dist.get_rank():
        return {}
    model = PolicyModel.load(target, dtype).to(device)
    theirs = stream_logprobs(model, sample.ids_T.tolist(), sample.images, device, dtype)
    return {
        "export_logprob_mean": float(np.abs(own - theirs).mean()),
        "export_logprob_max": float(np.abs(own - theirs).max()),
    }


def _resume(learner: Any, samples: list[TrainingSample], folder: Path) -> dict[str, float]:
    """Write a checkpoint with TP 2, and go on; `resume_pp` compares with what PP 2 does from it."""
    target = folder.parent / f"{folder.name}-{learner.dtype}".replace("torch.", "") / "checkpoint"
    learner.begin_checkpoint(target)
    learner.is_checkpoint_written(wait=True)
    second = learner.step([samples])
    return {"second_loss": second.loss, "second_grad_norm": second.grad_norm}


def resume_case(case: Case, folder: Path, device: str) -> dict[str, Any]:
    """Read with PP 2 what TP 2 wrote; return the next step's loss and norm, to compare with `second_*` of TP 2."""
    from megatron.core import parallel_state

    learner = megatron_learner(case, folder, {"pp": 2}, device)
    learner.restore(folder.parent / f"{folder.name}-{case.dtype}" / "checkpoint")
    stats = learner.step([samples_of(folder)])
    del learner
    parallel_state.destroy_model_parallel()
    return {"resumed_loss": stats.loss, "resumed_grad_norm": stats.grad_norm}


def rank_main(rank: int, chosen: Sequence[Case], work: Path, out: Path, device: str) -> None:
    """Run cases one after another on this rank; rank 0 writes the rows, and each rank its error."""
    logging.getLogger().setLevel(logging.WARNING)
    for number, case in enumerate(chosen):
        (work / f"at-{rank}").write_text(str(number))
        folder, kept = work / case.model, work / f"{case.model}-{case.dtype}-{case.settings}.pt"
        expected: Step = torch.load(kept, weights_only=False)
        try:
            row = run_case(case, folder, device, expected)
            if case.layout == "tp 2":
                row |= resume_case(case, folder, device)
        except Exception:
            (work / f"error-{rank}").write_text(traceback.format_exc())
            raise
        if rank == 0:
            write(out, {"kind": "step", **asdict(case), **row})
    (work / f"at-{rank}").write_text(str(len(chosen)))


def reference_main(rank: int, wanted: Sequence[tuple[str, str, str]], work: Path, device: str) -> None:
    """Take the steps of FSDP."""
    assert rank == 0, rank
    for name, dtype, settings in wanted:
        step = reference(work / name, SETTINGS[settings], getattr(torch, dtype), device)
        torch.save(step, work / f"{name}-{dtype}-{settings}.pt")


def trace_main(rank: int, names: Sequence[str], work: Path, out: Path, device: str) -> None:
    """Write the rows of the trace."""
    assert rank == 0, rank
    for name in names:
        sample = samples_of(work / name)[-1]
        for row in trace(work / name, sample, device, changes({}, device), packed=True):
            write(out, {"kind": "trace", "model": name, **row})


def run_ranks(main: Callable[..., None], num_ranks: int, store: Path, device: str, *args: Any) -> None:
    """Run `main(rank, *args, device)` in the ranks of a process group; raises the first error of a rank."""
    start_processes(_rank, (num_ranks, str(store), device, main, args), num_ranks, start_method="spawn")


def _rank(rank: int, num_ranks: int, store: str, device: str, main: Callable[..., None], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    own, backend = torch.device(device), "gloo"
    if device == "cuda":
        own, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        load_kernels()
        torch.cuda.set_device(own)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=LIMIT)
    if device == "cpu" and main is not reference_main:
        from tests.megatron_cpu import on_cpu

        on_cpu()
    main(rank, *args, str(own))
    dist.destroy_process_group()


def write(out: Path, row: dict[str, Any]) -> None:
    """Append a row, and show it."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    shown = {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in row.items()}
    print(json.dumps(shown), flush=True)


def run_all(chosen: list[Case], work: Path, out: Path, device: str) -> int:
    """Run the cases, those of a network on as many ranks in the same processes; return how many failed.

    Each case leaves threads of its process groups behind. If the first `GIVE_UP` cases fail, the others do not run.
    """
    failed = succeeded = 0
    for ranks, model in sorted({(case.ranks, case.model) for case in chosen}):
        left = [case for case in chosen if (case.ranks, case.model) == (ranks, model)]
        while left:
            for file in [*work.glob("at-*"), *work.glob("error-*")]:
                file.unlink()
            try:
                run_ranks(rank_main, ranks, work / f"store-{time.monotonic_ns()}", device, left, work, out)
                succeeded += len(left)
                break
            except Exception as error:  # the case is a row, and the next ones get new processes
                at = min((int(file.read_text()) for file in work.glob("at-*")), default=0)
                texts = [file.read_text() for file in sorted(work.glob("error-*"))]
                case = left[min(at, len(left) - 1)]  # after the last case, the processes failed as they ended
                write(out, {"kind": "error", **asdict(case), "error": (texts or [str(error)])[0][-2000:]})
                failed, succeeded, left = failed + 1, succeeded + at, left[at + 1 :]
                if failed == GIVE_UP and not succeeded:
                    return failed
    return failed


def table(out: Path) -> Iterator[str]:
    """Yield the lines of the tables."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    columns = ("model", "layout", "settings", "dtype", "packed")
    figures = ("loss_diff", "grad_norm_rel", "logprob_mean", "logprob_max", "weights_max", "export_logprob_max")
    steps = [row for row in rows if row["kind"] == "step"]
    yield markdown(
        (*columns, *figures), [[*(r[c] for c in columns), *(f"{r.get(f, 0):.2g}" for f in figures)] for r in steps]
    )
    for row in steps:
        if "resumed_loss" in row:
            names = ("second_loss", "resumed_loss", "second_grad_norm", "resumed_grad_norm")
            yield f"{row['model']} {row['dtype']} TP 2 -> PP 2: " + ", ".join(f"{n} {row[n]:.6g}" for n in names)
    for row in rows:
        if row["kind"] == "error":
            names = " ".join(str(row[name]) for name in ("model", "layout", "settings", "dtype"))
            yield f"FAILED {names}: {row['error'].splitlines()[-1]}"


def is_chosen(case: Case, options: argparse.Namespace) -> bool:
    """Return whether the flags ask for a case."""
    return case.model in options.models and case.layout in options.layouts and case.settings in options.settings


def main() -> None:
    """Run everything that the machine can."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=2, help="GPUs, or processes on a CPU")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=tuple(LAYOUTS), choices=tuple(LAYOUTS))
    parser.add_argument("--settings", nargs="+", default=tuple(SETTINGS), choices=tuple(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS / "backends.jsonl")
    parser.add_argument("--work", type=Path, default=Path("/tmp/backends"))
    options = parser.parse_args()
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # TransformerEngine multiplies float32 matrices in TF32
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    options.out.unlink(missing_ok=True)
    for name in options.models:
        write_model(options.work / name, name)
    chosen = [c for c in cases(options.device, options.gpus) if is_chosen(c, options)]
    write(options.out, {"kind": "machine", "device": options.device, "commit": commit(), "torch": torch.__version__})
    wanted = sorted({(case.model, case.dtype, case.settings) for case in chosen})
    run_ranks(reference_main, 1, options.work / "store-reference", options.device, wanted, options.work)
    failed = run_all(chosen, options.work, options.out, options.device)
    try:
        run_ranks(
            trace_main, 1, options.work / "store-trace", options.device, options.models, options.work, options.out
        )
    except Exception as error:  # the tables are worth more than the trace
        failed += 1
        write(
            options.out,
            {"kind": "error", "model": "trace", "layout": "", "settings": "", "dtype": "", "error": str(error)[-2000:]},
        )
    print(*table(options.out), sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
