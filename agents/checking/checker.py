"""Runs all checks of an engine, each with a time limit, and returns what they found."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from agents.checking.trial import Trial
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
from envs.checks import Broken, CheckRun, Finding, NotApplicable, Result
from envs.config.plugins import import_cause
from envs.workers.process_info import children

#: By the name of the row. The last one, "closing", is added by `check_engine`.
CHECKS: Mapping[str, Callable[[Trial], Coroutine[Any, Any, str]]] = {
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
#: What the scripted engine writes.
SCRIPT = "The answer is \\boxed{7}."


@dataclass(eq=False)
class _TimedLoop:
    """Runs checks on an event loop of their own, each with a time limit, until one hangs or the time is up."""

    limit_s: float
    end: float
    doing: Callable[[], str] = lambda: "the engine's function"
    has_hung: bool = False

    def __post_init__(self) -> None:
        self.loop = LoopThread()

    def run(self, check: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of a check."""
        try:
            return self.loop.run(check, min(self.limit_s, max(END_S, self.end - time.monotonic())))
        except (Broken, NotApplicable):
            raise
        except Hung as hung:
            self.has_hung = True
            raise Broken(f"{self.doing()} {hung}", "return, or let others run meanwhile") from hung
        except Exception as error:  # whatever the user's engine raises
            raise Broken(f"{self.doing()}: {import_cause(error)}", "it must not raise") from error

    @property
    def is_over(self) -> bool:
        """Whether no check may begin any more."""
        return self.has_hung or time.monotonic() > self.end


def check_engine(
    make: MakeEngine,
    setup: EngineSetup,
    with_network: bool = True,
    limit_s: float = 60.0,
    max_seconds: float = 600.0,
    only: Sequence[str] = (),
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
    if with_network:
        reference = Reference.load(setup.model_path, setup.dtype, setup.device)
    else:
        reference = None
    loop = _TimedLoop(limit_s, time.monotonic() + max_seconds)
    checks = CheckRun(only, on_check, loop.run)
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
        can_go_on = checks.run("building", build, is_needed=True)
        if trials:
            trials[0].load_other()
            loop.doing = lambda: trials[0].doing
        for name, check in CHECKS.items():
            if not can_go_on or loop.is_over:
                break
            has_passed = checks.run(name, partial(check, *trials))
            can_go_on = has_passed or name != "protocol"
        checks.skip(CHECKS, "the check stopped before it")
        if trials:
            with_turn = can_go_on and not loop.is_over
            loop.limit_s = 4 * END_S
            checks.run("closing", lambda: check_closing(trials[0], num_children, with_turn), is_needed=True)
    loop.loop.stop()
    return checks.findings


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
