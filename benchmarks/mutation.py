"""Small faults put into the code one by one, and whether a test notices: `python -m benchmarks.mutation`.

The core is mutated module by module with the operators of mutmut (`benchmarks.mutants`). A mutant is written into a
copy of the tree, and the tests of the module that run its lines are run on it, in a fork of this process that has
imported torch and the like already. A mutant is caught where one fails, or they take far longer than without it.

Prints a table and writes `benchmarks/results/mutation.json`: for each module how many mutants there are, how many of
them were tried, how many were caught, and every one that was not. Those that change nothing that anybody could notice
are named with the reason in `benchmarks/mutation_kept.json`; they do not count. Needs `pip install mutmut coverage`.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mutants import Mutant, mutants
from benchmarks.mutation_tests import Plan, all_pass, measure
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result

KEPT = ROOT / "benchmarks" / "mutation_kept.json"
_ALGORITHMS = ("advantages", "aggregation", "importance_sampling", "objective", "policy_loss")
_GRADING = (
    "algebra", "algebra_worker", "arithmetic", "equality", "extraction", "graders", "normal_form", "screening",
)  # fmt: skip


#: The step, the update, and what is counted of them: not checkpoints, weights and start.
_LEARNER = (
    "step", "_step", "_score", "_update", "_split_rows", "_batches_of_updates", "_bins", "_batches",
    "batch", "_loss", "_set_lr", "_step_optimizer", "_max_over_ranks", "_by_sample", "_of", "zero", "measure", "add",
    "add_update", "stats", "_by_key",
)  # fmt: skip
#: What takes long to import and is not mutated.
PRELOADED = (
    "_pytest.assertion.rewrite", "aiohttp.web", "math_verify", "pytest", "sympy", "torch.distributed.fsdp",
    "torch.distributed.tensor", "transformers.models.qwen3_vl.modeling_qwen3_vl",
)  # fmt: skip


@dataclass(frozen=True)
class Module:
    """Files that are mutated together, or some of their functions, and the tests that hold what they promise."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    #: How many mutants are tried where `--sample` does not say; 0: all.
    sample: int = 60
    functions: tuple[str, ...] = ()

    def mutants(self, root: Path) -> list[Mutant]:
        """Return all mutants of the files below `root`, in the order of the text."""
        found: list[Mutant] = []
        for path in self.files:
            source = (root / path).read_text(encoding="utf-8")
            lines = _lines_of(source, self.functions)
            found += [mutant for mutant in mutants(path, source) if not self.functions or mutant.first in lines]
        return found


def _lines_of(source: str, functions: Sequence[str]) -> set[int]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and node.name in functions]
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _under(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


MODULES = (
    Module(
        "trainer/algorithms",
        _under("trainer/algorithms", *_ALGORITHMS),
        _under("tests/trainer/algorithms", *(f"test_{name}" for name in _ALGORITHMS)),
        sample=120,
    ),
    Module(
        "agents/rollout/stream",
        _under("agents/rollout", "stream"),
        _under("tests/agents/rollout", "test_stream"),
        sample=0,
    ),
    Module(
        "agents/rollout/invariants",
        _under("agents/rollout", "invariants"),
        _under("tests/agents/rollout", "test_invariants"),
        sample=70,
    ),
    Module(
        "agents/rollout/episode",
        _under("agents/rollout", "episode"),
        _under("tests/agents/rollout", "test_episode"),
    ),
    Module(
        "agents/engines/sglang",
        _under("agents/engines/sglang", "client", "engine", "payloads"),
        _under("tests/agents/engines", "test_sglang_protocol"),
        sample=110,
    ),
    Module(
        "envs/grading",
        _under("envs/grading", *_GRADING),
        _under("tests/envs/grading", "test_algebra", "test_arithmetic", "test_graders", "test_grading", "test_reading"),
        sample=90,
    ),
    Module(
        "envs/tool_calls",
        _under("envs/tool_calls", "formats", "hermes", "json_call", "qwen_xml", "types"),
        _under("tests/envs/tool_calls", "test_tool_calls", "test_qwen_xml_calls"),
        sample=80,
    ),
    Module(
        "trainer/learner",
        _under("trainer/learner", "fsdp_learner", "step_sums"),
        _under("tests/trainer/learner", "test_step_stats", "test_fsdp_learner"),
        functions=_LEARNER,
    ),
    Module("trainer/data/packing", _under("trainer/data", "packing"), _under("tests/trainer/data", "test_packing")),
)


@dataclass
class Score:
    """What became of a module's mutants."""

    module: str
    mutants: int = 0
    tried: int = 0
    caught: int = 0
    seconds: float = 0.0
    equivalent: list[dict[str, str]] = field(default_factory=list)
    survived: list[dict[str, str]] = field(default_factory=list)

    @property
    def percent(self) -> float:
        """The share of the mutants that were tried and matter which a test noticed."""
        return 100 * self.caught / max(1, self.tried - len(self.equivalent))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = _options(argv)
    chosen = [module for module in MODULES if not options.module or module.name in options.module]
    at = commit()
    reasons = {(k["file"], k["change"]): k["reason"] for k in json.loads(KEPT.read_text())} if KEPT.exists() else {}
    memory = _Memory(options.memory)
    _preload()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder) / "tree"
        _copy_tree(copy)
        os.environ |= {"HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder) / "hypothesis"), "PYTHONPATH": str(copy)}
        os.environ |= {"MUTATION_ROOT": str(ROOT), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for module in chosen:
            score = Score(module.name)
            for score in _scores(module, copy, options, reasons, memory):
                _write(options, score, at)
            print(_table([score]), flush=True)
    return 0


def _write(options: argparse.Namespace, score: Score, at: str) -> None:
    """Put a module's figures in the place of those that the results have of it; the others' stay."""
    before = json.loads(options.out.read_text(encoding="utf-8"))["modules"] if options.out.exists() else []
    sample = "" if options.sample is None else f" --sample {options.sample}"
    command = f"python -m benchmarks.mutation --module {score.module}{sample} --seed {options.seed}"
    entry = {"commit": at, "date": time.strftime("%Y-%m-%d"), "command": command}
    entry |= asdict(score) | {"percent": round(score.percent, 1)}
    names = [module.name for module in MODULES]
    entries = [entry, *(each for each in before if each["module"] != score.module and each["module"] in names)]
    entries.sort(key=lambda each: names.index(each["module"]))
    whole = {"modules": entries}
    write_result(options.out, "python -m benchmarks.mutation", whole, at, ("mutmut", "libcst", "pytest", "torch"))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description="Mutation tests of the core.")
    parser.add_argument("--module", action="append", choices=[module.name for module in MODULES], help="only these")
    parser.add_argument("--sample", type=int, help="try so many mutants a module, 0: all (default: 60 to 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--memory", type=Path, help="file that keeps which mutants were caught: they are not run again")
    parser.add_argument("--out", type=Path, default=RESULTS / "mutation.json")
    return parser.parse_args(argv)


class _Memory:
    """Which mutants were caught before, by the code of their file: a test that was added changes nothing there."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._caught = set(path.read_text().split()) if path and path.exists() else set()

    def __contains__(self, mutant: Mutant) -> bool:
        return _digest(mutant) in self._caught

    def add(self, mutant: Mutant) -> None:
        is_new = mutant not in self
        self._caught.add(_digest(mutant))
        if self._path and is_new:
            with self._path.open("a") as file:
                file.write(_digest(mutant) + "\n")


def _digest(mutant: Mutant) -> str:
    tree = ast.parse(mutant.code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [each for each in node.body if not _does_nothing(each)]
    return hashlib.sha256(f"{mutant.path}\n{ast.dump(tree)}".encode()).hexdigest()[:24]


def _does_nothing(node: ast.stmt) -> bool:
    """Tell whether a statement is a docstring, or an import, which may only have moved."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, (ast.Import, ast.ImportFrom))


def _scores(
    module: Module, copy: Path, options: argparse.Namespace, reasons: dict[tuple[str, str], str], memory: _Memory
) -> Iterator[Score]:
    """Try a sample of a module's mutants, in random order; yield the score after each."""
    started = time.monotonic()
    every = module.mutants(copy)
    wanted = module.sample if options.sample is None else options.sample
    sampled = random.Random(options.seed).sample(every, min(wanted or len(every), len(every)))
    plan = measure(copy, module.tests, module.files)
    score = Score(module.name, len(every))
    for score.tried, mutant in enumerate(sampled, 1):
        entry = {"file": mutant.path, "change": mutant.change}
        if reason := reasons.get((mutant.path, mutant.change)):
            score.equivalent.append(entry | {"reason": reason})
        elif mutant in memory or _is_caught(mutant, copy, plan):
            memory.add(mutant)
            score.caught += 1
        else:
            print(f"survived: {mutant.path}:{mutant.first}: {mutant.change}", flush=True)
            score.survived.append(entry)
        score.seconds = round(time.monotonic() - started, 1)
        yield score


def _is_caught(mutant: Mutant, copy: Path, plan: Plan) -> bool:
    """Write the mutant into the copy of the tree, run the tests that run its lines, and put the file back."""
    tests = plan.tests_of(mutant.path, range(mutant.first, mutant.last + 1))
    place = copy / mutant.path
    original = place.read_text(encoding="utf-8")
    try:
        _put(place, mutant.code)
        return not all_pass(copy, tests, plan)
    finally:
        _put(place, original)


def _put(place: Path, code: str) -> None:
    place.write_text(code, encoding="utf-8")
    for compiled in place.parent.glob(f"__pycache__/{place.stem}.*"):  # its key is size and second of the source
        compiled.unlink()


def _preload() -> None:
    """Import what takes long once for all forks, and keep hypothesis from shrinking what it finds."""
    import hypothesis
    import torch

    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "no-shrink", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), database=None
    )
    hypothesis.settings.load_profile("no-shrink")
    gc.freeze()


def _copy_tree(copy: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _table(scores: Sequence[Score]) -> str:
    columns = ("module", "mutants", "tried", "caught", "equivalent", "survived", "score")
    rows: list[Sequence[Any]] = [
        (s.module, s.mutants, s.tried, s.caught, len(s.equivalent), len(s.survived), f"{s.percent:.1f} %")
        for s in scores
    ]
    return markdown(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
