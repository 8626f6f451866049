"""Claims about `agents.check_engine`: sound engines pass every check, and each fault is found by its check."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.check_engine import run
from agents.checking import turns
from agents.checking.checker import CHECKS, check_engine, setup_of
from agents.engines.base import EngineSetup
from agents.engines.own import make_embedded
from agents.types import Completion, GenerateRequest
from envs.checks import Finding
from envs.config.cli import exit_code
from tests.agents.engines.faulty import FAULTS, Blocks, Hangs
from tests.agents.engines.plain_engine import make_engine
from tests.agents.engines.routed_engine import RoutedEngine
from tests.paths import DOCS
from tests.tiny_models import write_tiny_model

PLAIN, FAULTY = (str(Path(__file__).with_name(name)) for name in ("plain_engine.py", "faulty.py"))


@pytest.fixture
def setup(checkpoint: Path, tmp_path: Path) -> EngineSetup:
    return setup_of(str(checkpoint), tmp_path, context_length=1024, max_batch=3)


def failed(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.passed is False]


@pytest.mark.parametrize("make", [make_embedded, make_engine])
def test_a_sound_engine_passes_every_check(make: Callable[[EngineSetup], Any], setup: EngineSetup) -> None:
    findings = check_engine(make, setup)
    others = [(finding.check, finding.passed, finding.detail) for finding in findings if not finding.passed]
    assert others == [("routes", None, "the model is no mixture of experts")]
    assert [finding.check for finding in findings] == ["building", *CHECKS, "closing"]


class Shifted(RoutedEngine):
    """Counts tokens from 1."""

    def experts(self, request: GenerateRequest, completion: Completion) -> Any:
        return super().experts(request, completion)[1:]


class Twice(RoutedEngine):
    """Sends each token twice to one expert."""

    def experts(self, request: GenerateRequest, completion: Completion) -> Any:
        return super().experts(request, completion)[..., :1].repeat(2, axis=-1)


@pytest.mark.parametrize(
    ("make", "passed", "words"),
    [
        (RoutedEngine, True, "tokens in 3 layers, over two turns"),
        (make_engine, None, "its capabilities lack gives_routes"),
        (Shifted, False, "turn 1: experts of shape "),
        (Twice, False, "goes to ["),
    ],
)
def test_the_experts_of_a_mixture_are_checked(
    make: Callable[[EngineSetup], Any], passed: bool | None, words: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model", "qwen3_vl_moe")
    setup = setup_of(str(tmp_path / "model"), tmp_path, context_length=1024, max_batch=3)
    found = {finding.check: finding for finding in check_engine(make, setup, only=("routes", "protocol"))}
    assert found["routes"].passed is passed and words in found["routes"].detail


@pytest.mark.parametrize("make", FAULTS)
def test_each_fault_is_found_by_the_check_of_its_name(
    make: Callable[[EngineSetup], Any], setup: EngineSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, words = FAULTS[make]
    monkeypatch.setattr(turns, "END_S", 1.0)
    limit_s = 4.0 if make in (Hangs, Blocks) else 60.0
    findings = check_engine(make, setup, only=(check, "protocol"), limit_s=limit_s)
    (found,) = [finding for finding in failed(findings) if finding.check == check]
    assert words in found.detail


def test_nothing_is_tried_after_a_check_that_hangs(setup: EngineSetup) -> None:
    found = {finding.check: finding for finding in check_engine(Hangs, setup, limit_s=2.0)}
    assert found["score"].passed is False and found["completion"].passed
    assert {found[name].detail for name in list(CHECKS)[3:]} == {"the check stopped before it"}
    assert found["closing"].passed


def test_a_factory_that_hangs_or_raises_is_found(setup: EngineSetup) -> None:
    def hangs(setup: EngineSetup) -> None:
        time.sleep(4)

    def raises(setup: EngineSetup) -> None:
        raise RuntimeError("no such device")

    for make, words in ((hangs, "did not end within 1 s"), (raises, "RuntimeError: no such device")):
        first, *others = check_engine(make, setup, limit_s=1.0)
        assert (first.check, first.passed) == ("building", False) and words in first.detail
        assert {finding.passed for finding in others} == {None}


def test_no_check_begins_when_the_time_is_up(setup: EngineSetup) -> None:
    found = {finding.check: finding.passed for finding in check_engine(make_embedded, setup, max_seconds=0)}
    assert found == {"building": True, "closing": True} | dict.fromkeys(CHECKS)


def test_the_command_takes_a_file_and_the_names_of_checks(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(checkpoint), "--only", "log-probs"]
    assert run([f"{PLAIN}:make_engine", *flags]) == 0
    assert "plain_engine.py:make_engine: 3 passed, 0 failed, 0 not applicable" in capsys.readouterr().out
    assert run([f"{FAULTY}:Shifted", *flags]) == 1
    assert "log-probs are not the network's" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["hff"], "ENGINE: must be 'hf', or module:NAME or file.py"),
        ([f"{PLAIN}:missing"], "must define it, got missing"),
        (["hf", "--only", "logprobs"], "--only: must be a check, got logprobs; did you mean 'log-probs'?"),
        (["hf", "--model", "nowhere"], "--model"),
    ],
)
def test_what_a_user_can_mend_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(argv)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_every_check_is_on_the_page() -> None:
    page = (DOCS / "engines.md").read_text(encoding="utf-8").split("## Engines of your own")[1]
    named = re.findall(r"^\| ([a-z -]+) \| ", page.split("| check | claim |")[1].split("\n\n")[0], re.MULTILINE)
    assert named == ["building", *CHECKS, "closing"]
