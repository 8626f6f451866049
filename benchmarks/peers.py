"""Ours beside TRL and verl on the same work: `python -m benchmarks.peers --peers ours trl verl`. Wants one GPU.

Every trainer has a process of its own and the whole GPU: the same network, problems, tools and images (`peers_task`),
the settings that suit it best (`peers_trainers`, `peers_verl`), and an environment of its own with pinned versions.
That is a folder of `--sites`, which is made with pip if it is not there. A trainer that cannot run says why.

Prints a table, and writes `benchmarks/results/peers.json`. Seconds, tokens and the GPU's idle share are those between
the end of the first step and that of the last. The GPU is idle while no kernel runs, by nvidia-smi; its peak memory
counts all processes. KL is that of rollout against training; TRL does not compute it where Transformers generates.

    python -m benchmarks.peers --peers ours trl --device cpu --shape starter --problems 4 --text 40 --text-only
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers_task import PINS, STEPS, WITH_SGLANG, Task
from benchmarks.report import RESULTS, ROOT, commit, install, markdown, write_result

MODULES = {"ours": "benchmarks.peers_trainers", "trl": "benchmarks.peers_trainers", "verl": "benchmarks.peers_verl"}
COLUMNS = ("samples/s", "tokens/s", "written tokens/s", "s a step", "GPU idle", "KL", "GPU peak, GiB")
Row = dict[str, Any]


class Gpu:
    """Samples of the GPU's use and memory while a trainer runs; without `nvidia-smi` there are none."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample five times a second."""
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        query = ["nvidia-smi", "-i", card, "--query-gpu=utilization.gpu,memory.used", "-lms", "200"]
        try:
            process = subprocess.Popen([*query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True)
        except OSError:
            yield
            return
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            process.kill()
            reader.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):  # a card that does not tell
                used, memory = map(float, line.split(","))
                self.samples.append((time.time(), used, memory / 1024))

    def figures(self, begun: float, ended: float) -> Row:
        """Return the share of a time in which no kernel ran, and the peak of all memory."""
        used = [use for at, use, _ in self.samples if begun <= at <= ended]
        if not used:
            return {}
        peak = max(memory for _, _, memory in self.samples)
        return {"GPU idle": round(1 - sum(used) / len(used) / 100, 3), "GPU peak, GiB": round(peak, 1)}


def search_path(peer: str, sites: Path) -> str:
    """Return the PYTHONPATH of a trainer; make its environment where it has none.

    Raises:
        subprocess.CalledProcessError: pip found no such versions.
    """
    given = list(filter(None, [os.environ.get("PYTHONPATH")]))
    if peer == "ours":
        return os.pathsep.join([str(ROOT), *given])
    site = sites / peer
    name, wanted = PINS[peer][0].split("==")
    if not site.exists() and not _has(name, wanted):
        install(site, PINS[peer])
    # TRL takes the Transformers of the interpreter, verl that of SGLang.
    beside = given if peer in WITH_SGLANG else []
    return os.pathsep.join([str(site), str(ROOT), *beside])


def _has(name: str, wanted: str) -> bool:
    try:
        return importlib.metadata.version(name) == wanted
    except importlib.metadata.PackageNotFoundError:
        return False


def run(peer: str, module: str, folder: Path, path: str, limit_s: float) -> str:
    """Run a trainer; return why it ended early, or nothing. What it started ends with it."""
    log = folder / f"{peer}.log"
    environment = {**os.environ, "PYTHONPATH": path}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, peer, str(folder)],
            env=environment,
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
        finally:
            end_group(process)
    if code == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit code {code}"])[-1].strip()[:300]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a trainer and its servers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def figures(task: Task, steps: Sequence[Mapping[str, float]], gpu: Gpu) -> Row:
    """Return the row of a trainer; the first step, which compiles and captures, does not count."""
    first, *timed = steps
    seconds = timed[-1]["at"] - first["at"]
    row: Row = {
        "samples/s": round(task.samples * len(timed) / seconds, 2),
        "tokens/s": round(sum(step["tokens"] for step in timed) / seconds),
        "written tokens/s": round(sum(step["written"] for step in timed) / seconds),
        "s a step": round(seconds / len(timed), 2),
        **gpu.figures(first["at"], timed[-1]["at"]),
    }
    if "kl" in first:
        row["KL"] = f"{max(step['kl'] for step in timed):.1e}"
    return row


def measure(peer: str, task: Task, folder: Path, sites: Path, limit_s: float) -> Row:
    """Return what a trainer did, or why it could not."""
    gpu = Gpu()
    written = folder / STEPS
    written.unlink(missing_ok=True)
    try:
        path = search_path(peer, sites)
    except subprocess.CalledProcessError as error:
        return {"ended": f"its environment could not be made: {error}"}
    with gpu.watched():
        ended = run(peer, MODULES[peer], folder, path, limit_s)
    lines = written.read_text().splitlines() if written.exists() else []
    steps = [json.loads(line) for line in lines]
    row: Row = {"steps": steps, "ended": ended}
    if len(steps) > 1:
        row |= figures(task, steps, gpu)
    return row


def table(rows: Mapping[str, Row]) -> str:
    """Return a Markdown table, and by how much ours is ahead of the best peer."""
    lines = [[peer, *(row.get(column, "-") for column in COLUMNS), row["ended"]] for peer, row in rows.items()]
    text = markdown(("trainer", *COLUMNS, "ended early"), lines)
    rates = {peer: row["samples/s"] for peer, row in rows.items() if "samples/s" in row}
    others = {peer: rate for peer, rate in rates.items() if peer != "ours"}
    if "ours" in rates and others:
        best = max(others, key=lambda peer: others[peer])
        text += f"\n\nours has {rates['ours'] / others[best]:.2f} times the samples/s of {best}"
    return text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="2b", help="a network of benchmarks.learner_workload")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--problems", type=int, default=16, help="problems a step")
    parser.add_argument("--group", type=int, default=8, help="samples a problem")
    parser.add_argument("--text", type=int, default=170, help="tokens of a turn's text; at most 380, for want of words")
    parser.add_argument("--batch", type=int, default=8, help="samples that TRL trains on at once")
    parser.add_argument("--text-only", action="store_true", help="no images, which TRL wants torchvision for")
    parser.add_argument("--limit-s", type=float, default=300, help="seconds of each trainer")
    parser.add_argument("--sites", type=Path, default=Path.home() / ".cache" / "trueturn-peers")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps model, logs and rows; a trainer whose row it has is not run"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    args = parser.parse_args()
    at = commit()
    task = Task(
        args.device, args.shape, args.steps, args.problems, args.group, args.text, args.batch, not args.text_only
    )
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        folder = (args.work or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            task.write(folder)
            failed = run("model", MODULES["ours"], folder, search_path("ours", args.sites), args.limit_s)
            if failed:
                raise SystemExit(f"the model could not be written: {failed}")
        if Task.read(folder) != task:
            raise SystemExit(f"--work: {folder} holds another task; give an empty folder")
        for peer in args.peers:
            kept = folder / f"{peer}.json"
            if kept.exists():
                rows[peer] = json.loads(kept.read_text())
            else:
                rows[peer] = measure(peer, task, folder, args.sites.absolute(), args.limit_s)
            if not rows[peer]["ended"]:
                kept.write_text(json.dumps(rows[peer]))
            print(table(rows), flush=True)
            # After each: the machine may not be there for the next.
            command = " ".join(["python -m benchmarks.peers", *sys.argv[1:]])
            found = {"task": vars(task), "gpu": gpu_name(), "pins": PINS, "rows": rows}
            write_result(args.out, command, found, at, ("torch", "transformers"))


def gpu_name() -> str:
    """Return the name of the first GPU."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return "none"


if __name__ == "__main__":
    main()
