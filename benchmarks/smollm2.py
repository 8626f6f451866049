"""A pretrained model learns to use a tool: `python -m benchmarks.smollm2 --model FOLDER --device cuda --parallel`.

In: a checkpoint folder of SmolLM2-135M-Instruct, which was never taught to call tools. For each seed: demonstrations of
`calculator` in which the tool is seldom used, then reinforcement, which has to find out that using it pays; before and
after, accuracy on held-out problems with the tool and without. Out: a table, and a JSON file and an image of the
curves that are written anew as each seed ends. Further flags go to `trainer.run`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from envs.execution.load import load_env
from envs.problems import with_system_prompt
from envs.registry import get_spec
from envs.tool_calls import ToolCall, write_tool_call
from envs.types import Sample

ENV = "calculator"
HELD_OUT = 256
#: Problems for demonstrations are of another draw of the training split than those of any run with a small seed.
DEMONSTRATION_SEED = 1000
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
#: What every episode of the study may take; shared by training and evaluation.
EPISODE = ("--env", ENV, "--max-turns", "3", "--max-new-tokens", "96")
SUPERVISED = ("--epochs", "1", "--batch-size", "16", "--lr", "1e-4", "--save-every", "0", "--compile", "off")
REINFORCED = (
    *("--steps", "40", "--problems-per-step", "32", "--group-size", "16", "--lr", "2e-5", "--train-size", "4096"),
    *("--max-tokens-per-microbatch", "8192", "--save-every", "0", "--compile", "off"),
    *("--doctor", "warn"),  # it counts on having the GPU to itself
)
#: Episodes that the embedded engine runs at once, in training and in evaluation.
BATCHES = {**os.environ, "TRUETURN_MAX_BATCH": "512"}
#: What is kept of every step.
KEPT = ("step", "reward", "turns", "tokens_per_episode", "groups_used_frac", "entropy", "grad_norm")
KEPT += ("rollout_train_kl", "rollout_s", "train_s", "sync_s", "tool/ok", "tool/none")


@dataclass(frozen=True)
class Habits:
    """What demonstrations show: the share of prompts that describe the tool, and that of those in which it is used."""

    tools_offered: float = 0.8
    calls: float = 0.3


@dataclass(frozen=True)
class Study:
    """What all seeds share; `extra` are more flags of `trainer.run`."""

    model: Path
    device: str
    dtype: str
    folder: Path
    num_demonstrations: int
    num_held_out: int
    extra: tuple[str, ...]

    @property
    def place(self) -> tuple[str, ...]:
        """The flags that say on what the networks compute."""
        return "--device", self.device, "--dtype", self.dtype


def demonstrations(count: int, seed: int, habits: Habits = Habits()) -> list[dict[str, Any]]:
    r"""Return conversations about training problems, none of them held out, as `trainer.sft --data` reads them.

    With a call::

        system     Solve the problem with the tool calculate. Write the final answer as \boxed{}.
        user       What is 37 * 98 - 18?
        assistant  (calls calculate with {"expression": "37 * 98 - 18"})
        tool       3608
        assistant  \boxed{3608}
    """
    spec, rng = get_spec(ENV), Random(f"{ENV} demonstrations {seed}")
    build_env, prompt = load_env(spec), spec.load_system_prompt()
    held_out = {_question(sample) for sample in spec.load_dataset("heldout", HELD_OUT, 0)}
    source = with_system_prompt(spec.load_dataset("train", 2 * count, DEMONSTRATION_SEED + seed), prompt)
    samples = [sample for index in range(len(source)) if _question(sample := source[index]) not in held_out]
    rows = []
    for sample in samples[:count]:
        messages, env = list(sample.prompt), build_env(sample, spec.args(tool_format="hermes"))
        offered = rng.random() < habits.tools_offered
        if offered and rng.random() < habits.calls:
            expression = _question(sample).removeprefix("What is ").removesuffix("?")
            call = ToolCall("calculate", {"expression": expression})
            function = {"name": call.name, "arguments": call.arguments}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
            observation = env.step(write_tool_call(call, "hermes"))[0]
            messages.extend(observation["messages"])
        messages.append({"role": "assistant", "content": env.solution()[-1]})
        rows.append({"messages": messages, **({"tools": list(env.tools)} if offered else {})})
    return rows


def _question(sample: Sample) -> str:
    return str(sample.prompt[-1]["content"])


def run_command(words: Sequence[str | Path], log: Path) -> None:
    """Run a module of this project; what it prints goes to `log`. Raises `RuntimeError` with the last lines of it."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ python {shlex.join(map(str, words))}\n")
        file.flush()
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=BATCHES, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        raise RuntimeError(f"exit code {done.returncode} of {words[1]}:\n" + "\n".join(lines))


def measure_base(study: Study) -> dict[str, Any]:
    """Return what the model does before it has learnt anything here."""
    words = [
        "-m",
        "trainer.evaluate",
        *EPISODE,
        "--model",
        study.model,
        *study.place,
        "--size",
        str(study.num_held_out),
    ]
    words += ["--out", study.folder, "--name", "base"]
    run_command(words, study.folder / "base.log")
    report = json.loads((study.folder / "base" / "evaluation.json").read_text(encoding="utf-8"))
    return {"ways": report["ways"], "seconds": report["seconds"]}


def run_seed(study: Study, seed: int) -> dict[str, Any]:
    """Teach the habits, reinforce, and return the summaries with the rewards of every step."""
    folder, started = study.folder / f"seed{seed}", time.perf_counter()
    folder.mkdir(parents=True)
    demos, log = folder / "demos.jsonl", folder / "log.txt"
    rows = demonstrations(study.num_demonstrations, seed)
    demos.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    where, model = [*study.place, "--seed", str(seed), "--out", folder], study.model
    if rows:
        words = ["-m", "trainer.sft", "--data", demos, "--model", study.model, *where, "--name", "sft", *SUPERVISED]
        run_command(words, log)
        model = folder / "sft" / "model"
    words = ["-m", "trainer.run", *EPISODE, "--model", model, *where, "--name", "run", *REINFORCED]
    words += ["--eval-size", str(study.num_held_out), *study.extra]
    run_command(words, log)
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        "seed": seed,
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "num_demonstrations": len(rows),
        "num_calls_demonstrated": sum(len(row["messages"]) > 3 for row in rows),
        "supervised": _summary(folder / "sft") if rows else None,
        "reinforced": _summary(folder / "run"),
        "steps": [{name: row[name] for name in KEPT if name in row} for row in steps],
    }


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


class GpuWatch:
    """Notes the name of the first GPU, and the most memory that all processes together have held on it, in GiB."""

    def __init__(self, device: str) -> None:
        self.name, self.peak_gib = "", 0.0
        self._is_over = threading.Event()
        if device.startswith("cuda"):
            self.name = _ask_gpu("name")
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over.wait(2.0):
            if (used := _ask_gpu("memory.used")).isdigit():
                self.peak_gib = max(self.peak_gib, int(used) / 1024)

    def close(self) -> None:
        """Stop watching."""
        self._is_over.set()


def _ask_gpu(what: str) -> str:
    words = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def calls_made(evaluation: Mapping[str, Any]) -> float:
    """Return how many tool calls that worked an episode had on average."""
    return evaluation["tool_outcomes"].get("ok", 0) / (evaluation["num_problems"] * evaluation["num_samples"])


def table(base: Mapping[str, Any] | None, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: the model as it came, each seed after the demonstrations and after reinforcement."""
    columns = ("seed", "weights", "with tool", "without tool", "calls", "turns", "reward", "minutes", "largest KL")
    stages = [("base", base["ways"], ["-"] * 3)] if base else []
    for run in runs:
        summary, steps = run["reinforced"], run["steps"]
        edge = max(1, min(5, len(steps) // 2))
        first, last = ([f"{mean(row['reward'] for row in part):.3f}"] for part in (steps[:edge], steps[-edge:]))
        start = "demonstrations" if run["num_demonstrations"] else "base"
        stages.append((start, summary["evaluation_before"], [*first, "-", "-"]))
        own = [*last, f"{run['minutes']:.1f}", f"{summary['max_rollout_train_kl']:.1e}"]
        stages.append(("reinforced", summary["evaluation_after"], own))
    names = ["-"] * bool(base) + [str(run["seed"]) for run in runs for _ in range(2)]
    rows = []
    for name, (title, ways, own) in zip(names, stages, strict=True):
        with_tool = ways["with_tool"]
        accuracies = [_interval(ways[way]["accuracy"]) for way in ("with_tool", "without_tool")]
        rows.append([name, title, *accuracies, f"{calls_made(with_tool):.2f}", f"{with_tool['mean_turns']:.2f}", *own])
    return markdown(columns, rows)


def _interval(accuracy: Mapping[str, float]) -> str:
    return f"{accuracy['value']:.3f} ({accuracy['low']:.3f} to {accuracy['high']:.3f})"


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the training reward of every seed, their mean thick, and held-out accuracy before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rewards = [[row["reward"] for row in run["steps"]] for run in runs]
    for run, values in zip(runs, rewards, strict=True):
        axes.plot(range(1, len(values) + 1), values, linewidth=1, alpha=0.5, label=f"reward, seed {run['seed']}")
    means = [mean(values) for values in zip(*rewards, strict=False)]
    axes.plot(range(1, len(means) + 1), means, linewidth=3, color="black", label="mean")
    for way, colour in (("with_tool", "C2"), ("without_tool", "C3")):
        ends = [mean(run["reinforced"][f"accuracy_{when}"][way] for run in runs) for when in ("before", "after")]
        label = f"held-out, {way.replace('_', ' ')}"
        axes.plot([0, len(means) + 1], ends, "o--", color=colour, alpha=0.7, label=label)
    axes.set(xlabel="step", ylabel="reward, accuracy", ylim=(-0.02, 1.02), title="SmolLM2-135M learns `calculator`")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Run the command line; 1 if a part of the study failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--demonstrations", type=int, default=256, help="conversations learnt from first; 0: none")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="problems of each evaluation")
    parser.add_argument("--parallel", action="store_true", help="run everything at once, on the one device")
    parser.add_argument("--work", type=Path, help="folder for run folders; empty: a temporary one")
    parser.add_argument("--out", type=Path, default=RESULTS / "smollm2.json")
    args, extra = parser.parse_known_args()
    at, command = commit(), f"python -m benchmarks.smollm2 {shlex.join(sys.argv[1:])}"
    watch, failures, base, runs = GpuWatch(args.device), [], None, []
    num_workers = len(args.seeds) + 1 if args.parallel else 1
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(num_workers) as pool:
        folder = (args.work or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        study = Study(
            args.model.absolute(), args.device, args.dtype, folder, args.demonstrations, args.held_out, tuple(extra)
        )
        jobs: dict[Future[dict[str, Any]], str] = {pool.submit(measure_base, study): "base"}
        jobs |= {pool.submit(run_seed, study, seed): f"seed {seed}" for seed in args.seeds}
        for job in as_completed(jobs):
            error = job.exception()
            if error:
                failures.append(f"{jobs[job]}: {error}")
                print(f"failed: {failures[-1]}", file=sys.stderr, flush=True)
            elif jobs[job] == "base":
                base = job.result()
            else:
                runs = sorted([*runs, job.result()], key=lambda run: run["seed"])
                draw(runs, args.out.with_suffix(".png"))
            print(f"{jobs[job]} is done", flush=True)
            gpu = {"gpu": watch.name, "peak_gpu_gib": round(watch.peak_gib, 2)} if watch.name else {}
            figures = {**gpu, "base": base, "runs": runs, "failures": failures}
            write_result(args.out, command, figures, at, PACKAGES)
    watch.close()
    print(table(base, runs))
    if watch.name:
        print(f"{watch.name}; most memory held on it, by all processes together: {watch.peak_gib:.1f} GiB")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
