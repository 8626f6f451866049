"""What every benchmark leaves: a table on screen, and a JSON file that says what ran where."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def processor() -> str:
    """Return the processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Return the commit, marked where the tree differs from it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def install(site: Path, packages: Sequence[str]) -> None:
    """Put pinned packages of another trainer into a folder, without what they need: that stands beside torch already.

    Raises:
        subprocess.CalledProcessError: there are no such versions; `stderr` says why.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *packages]
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)


def run_beside(folders: Sequence[Path], packages: Sequence[str], module: str, arguments: Sequence[str]) -> str:
    """Run a module in a process that finds another trainer's packages in folders.

    The packages are put into the first of them if it is not there.

    Returns:
        Why it failed, in a line; empty if it did not.
    """
    site = folders[0]
    held = {f"{each.name}=={each.version}".replace("_", "-") for each in distributions(path=[str(site)])}
    if not held.issuperset(packages):
        if site.exists():
            return f"{site} has other versions of its packages; remove it"
        try:
            install(site, packages)
        except subprocess.CalledProcessError as error:
            return error.stderr.strip().splitlines()[-1]
    path = os.pathsep.join(str(folder.absolute()) for folder in (site, ROOT, *folders[1:]))
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def write_result(path: Path, command: str, figures: Mapping[str, Any], at: str, packages: Sequence[str] = ()) -> None:
    """Write figures with command, commit (`at`, as it was when they were taken), hardware and versions."""
    result = {
        "command": command,
        "commit": at,
        "hardware": processor(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        **figures,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def train_all(
    module: str,
    wanted: Sequence[tuple[str, int]],
    train: Callable[[str, int, Path], dict[str, Any]],
    jobs: int,
    out: Path,
    packages: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the runs that `train(variant, seed, folder)` makes, `jobs` at once, in the order in which they are wanted.

    All that are done are in the result file after each run, since a benchmark may be stopped before its last.
    """
    at = commit()
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    done: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(train, *each, Path(folder)): each for each in wanted}
        for run in as_completed(running):
            done[running[run]] = run.result()
            runs = [done[each] for each in wanted if each in done]
            write_result(out, command, {"runs_at_once": jobs, "runs": runs}, at, packages)
    return [done[each] for each in wanted]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
