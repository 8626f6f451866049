"""Runs all checks of an engine, each with a time limit, and returns what they found."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from agents.checking.loop_thread import Hung, LoopThread
from agents.checking.probabilities import (
    check_drawing,
    check_greedy,
    check_images,
    check_log_probs,
    check_score,
    check_suppressed,
    check_temperature,
    check_verbatim,
)
from agents.checking.reference import Reference
from agents.checking.trial import Broken, NotApplicable, Trial
from agents.checking.turns import (
    END_S,
    check_budget,
    check_cancelling,
    check_closing,
    check_completion,
    check_concurrency,
    check_prompt_length,
    check_protocol,
    check_second_turn,
    check_seeds,
    check_stop,
)
from agents.checking.weights import check_new_weights, check_pausing
from agents.engines.base import EngineSetup
from agents.engines.own import MakeEngine
from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from envs.checking.findings import Finding
from envs.config.plugins import import_cause
from envs.workers.process_info import children

#: By the name of the row. The last one, "closing", is added by `check_engine`.
CHECKS: Mapping[str, Callable[[Trial], Awaitable[str]]] = {
    "protocol": check_protocol,
    "completion": check_completion,
    "prompt length": check_prompt_length,
    "score": check_score,
    "log-probs": check_log_probs,
    "temperature": check_temperature,
    "greedy": check_greedy,
    "drawing": check_drawing,
    "seeds": check_seeds,
    "verbatim ids": check_verbatim,
    "suppressed ids": check_suppressed,
    "stop ids": check_stop,
    "budget": check_budget,
    "images": check_images,
    "second turn": check_second_turn,
    "many at once": check_concurrency,
    "cancelling": check_cancelling,
    "pausing": check_pausing,
    "new weights": check_new_weights,
}
#: Without these two rows no other can be tried.
FIRST = ("building", "protocol")
#: What the scripted engine writes.
SCRIPT = "The answer is \\boxed{7}."


@dataclass(eq=False)
class _Checker:
    """Runs named steps one after the other on an event loop of their own, until one hangs or the time is up."""

    limit_s: float
    end: float
    on_check: Callable[[str], None]

    def __post_init__(self) -> None:
        self._loop = LoopThread()
        self.findings: list[Finding] = []
        self.doing: Callable[[], str] = lambda: "the engine's function"
        self.has_hung = False

    def add(self, name: str, check: Callable[[], Awaitable[str]], limit_s: float | None = None) -> bool:
        """Run a check and add its finding; return whether it passed."""
        self.on_check(name)
        limit_s = min(limit_s or self.limit_s, max(END_S, self.end - time.monotonic()))
        try:
            detail = self._loop.run(_awaited(check), limit_s)
            passed = True
        except NotApplicable as reason:
            detail = str(reason)
            passed = None
        except Broken as broken:
            detail = str(broken)
            passed = False
        except Hung as hung:
            detail = f"{self.doing()} {hung}; return, or let others run meanwhile"
            passed = False
            self.has_hung = True
        except Exception as error:  # whatever the user's engine raises
            detail = f"{self.doing()}: {import_cause(error)}; it must not raise"
            passed = False
        self.findings.append(Finding(name, passed, detail))
        return passed is not False

    def skip(self, name: str, reason: str) -> None:
        """Add a check that did not run."""
        self.findings.append(Finding(name, None, reason))

    def stop(self) -> None:
        """End the event loop."""
        self._loop.stop()

    @property
    def is_over(self) -> bool:
        """Whether no check may begin any more."""
        return self.has_hung or time.monotonic() > self.end


async def _awaited(check: Callable[[], Awaitable[str]]) -> str:
    return await check()


def check_engine(
    make: MakeEngine,
    setup: EngineSetup,
    with_network: bool = True,
    limit_s: float = 60.0,
    max_seconds: float = 600.0,
    only: Collection[str] = (),
    on_check: Callable[[str], None] = lambda name: None,
) -> list[Finding]:
    """Make an engine, try it, and return what each check found: "building", those of `CHECKS`, "closing".

    `only` names the checks of `CHECKS` to run; empty: all. No check begins after one that hangs, or after
    `max_seconds`.

    Example, as a test::

        findings = check_engine(make_engine, setup_of("starter", tmp_path))
        assert [finding for finding in findings if finding.passed is False] == []

    Raises:
        UserError: the model cannot be used.
    """
    logging.disable_progress_bar()
    renderer = Renderer.from_checkpoint(setup.model_path)
    reference = Reference.load(setup.model_path, setup.dtype, setup.device) if with_network else None
    run = _Checker(limit_s, time.monotonic() + max_seconds, on_check)
    num_children = len(children())
    trials = list[Trial]()

    async def build() -> str:
        engine = await asyncio.to_thread(make, setup)
        if not hasattr(engine, "start"):
            raise Broken(f"returned {type(engine).__name__}", "return an Engine of agents/engines/base.py")
        trials.append(Trial(engine, setup, renderer, reference, Path(folder)))
        await engine.start()
        return f"made and started {type(engine).__name__}"

    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        can_go_on = run.add("building", build)
        if trials:
            trials[0].load_other()
            run.doing = lambda: trials[0].doing
        for name, check in CHECKS.items():
            if not can_go_on or run.is_over:
                run.skip(name, "the check stopped before it")
            elif (not only or name in only) and not run.add(name, lambda check=check: check(trials[0])):
                can_go_on = name not in FIRST
        if trials:
            run.add("closing", lambda: check_closing(trials[0], num_children, can_go_on and not run.is_over), 4 * END_S)
    run.stop()
    return run.findings


def setup_of(
    model: str,
    log_folder: Path,
    dtype: str = "float32",
    device: str = "cpu",
    context_length: int = 4096,
    max_batch: int = 8,
) -> EngineSetup:
    """Return the setup that a run on a model would give to an engine."""
    path = model_folder(model)
    image_token_id = Renderer.from_checkpoint(path).image_token_id
    return EngineSetup(path, dtype, device, context_length, max_batch, image_token_id, log_folder)


def make_scripted(setup: EngineSetup) -> ScriptedEngine:
    """Return an engine that always writes the same text."""
    tokenizer = Renderer.from_checkpoint(setup.model_path).tokenizer
    return ScriptedEngine(tokenizer, lambda turn, request: SCRIPT, setup.context_length)
