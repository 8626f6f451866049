"""Claims about layouts, settings and whole runs of the Megatron backend: they go as with FSDP2.

They run Megatron-core and Megatron-Bridge themselves on a CPU (`tests.megatron_cpu`), where these are installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.backends import Case, cases, reference_main, run_all, run_ranks, write_model
from tests.paths import ROOT

pytest.importorskip("megatron", reason="needs Megatron")
pytestmark = pytest.mark.slow

LAYOUTS = ("tp 2 sp", "cp 2", "pp 2", "ep 2", "tp 2 ep 2 sp", "tp 2 etp 2 sp")
MODELS = ("qwen3_vl", "qwen3_vl_moe")
CHOSEN = [
    case
    for case in cases("cpu", 2)
    if case.model in MODELS
    and case.layout in LAYOUTS
    and (case.dtype, case.packed) == ("float32", True)
    and (case.model == "qwen3_vl" or case.settings in ("plain", "recomputed"))
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """What is left of the step of each case, compared with FSDP's."""
    work = tmp_path_factory.mktemp("backends")
    for model in MODELS:
        write_model(work / model, model)
    wanted = sorted({(case.model, case.dtype, case.settings) for case in CHOSEN})
    run_ranks(reference_main, 1, work / "store", "cpu", wanted, work)
    assert run_all(CHOSEN, work, work / "rows.jsonl", "cpu") == 0, (work / "rows.jsonl").read_text()
    lines = [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]
    return {Case(*(line[name] for name in Case.__dataclass_fields__)): line for line in lines}


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: f"{case.model}-{case.layout}-{case.settings}")
def test_a_step_is_that_of_the_other_backend_under_every_layout_and_setting(
    rows: dict[Case, dict[str, Any]], case: Case
) -> None:
    row = rows[case]
    assert row["loss_diff"] < 1e-6 and row["grad_norm_rel"] < 1e-4 and row["logprob_max"] < 1e-4
    assert row["weights_mean"] < 1e-6  # a weight moves by 1e-3
    assert row["export_logprob_max"] < 1e-4


def trained(folder: Path, module: str, *flags: str) -> list[dict[str, float]]:
    """Train the starter; return the metrics of each step."""
    argv = [sys.executable, "-m", module, "--out", str(folder.parent), "--name", folder.name, *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def differing(rows: list[dict[str, float]], others: list[dict[str, float]]) -> set[str]:
    """Return the metrics in which two runs differ, of those that tell what was played and learnt."""
    names = ("reward", "entropy", "grad_norm", "loss", "num_tokens", "groups_trained")
    return {
        name
        for row, other in zip(rows, others, strict=True)
        for name in names
        if row[name] != pytest.approx(other[name], rel=1e-3, abs=1e-6)
    }


def test_a_run_goes_as_with_the_other_backend_also_resumed_under_another_layout(tmp_path: Path) -> None:
    flags = ["--env", "geo3k", "--max-turns", "2", "--problems-per-step", "4", "--group-size", "4", "--steps", "3"]
    flags += ["--eval-size", "0", "--tracker=", "--num-learners", "2", "--save-every", "2"]
    flags += ["--kl-coef", "0.01", "--minibatches", "2"]
    expected = trained(tmp_path / "fsdp", "trainer.run", *flags)
    got = trained(tmp_path / "run", "tests.megatron_run", *flags, "--backend", "megatron", "--pp", "2")
    assert not differing(got, expected)
    assert max(row["rollout_train_kl"] for row in got) < 1e-9  # the engine has the learner's weights
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3", ignore_errors=True)
    argv = [sys.executable, "-m", "tests.megatron_run", "--resume", str(tmp_path / "run"), "--pp", "1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert not differing([json.loads(line) for line in lines], expected)
