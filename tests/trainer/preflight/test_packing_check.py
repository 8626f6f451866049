"""Claims about the doctor's check of packed streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agents.model.attention import Segments, Span
from agents.model.state_plan import StatePlan
from agents.types import SamplingParams
from envs.checks import Verdict
from tests.builders import fresh_model
from tests.trainer.steps import Case
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.preflight.checks.packing import check_packing


def as_one(spans: Sequence[Span]) -> list[Span]:
    return [Span(0, sum(span.length for span in spans))]


def verdict(case: Case) -> Verdict:
    learner = FSDPLearner(fresh_model(case.checkpoint), SamplingParams(), 1)
    return asyncio.run(check_packing(learner, case.samples[:4], 1, "float32"))


def test_streams_that_see_each_other_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.write(tmp_path / "qwen3_5", "qwen3_5")
    assert verdict(case).status == "ok"
    for kind in (StatePlan, Segments):
        right = kind.build

        def leaking(spans: Sequence[Span], *rest: Any, right: Any = right) -> Any:
            return right(as_one(spans), *rest)

        monkeypatch.setattr(kind, "build", leaking)
        found = verdict(case)
        assert found.status == "fault" and "nats off those of streams alone" in found.found
        monkeypatch.undo()
