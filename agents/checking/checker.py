"""Runs all checks of an engine, each with a time limit, and returns what they found."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from agents.checking.loop_thread import LoopThread
from agents.checking.network import (
    check_drawing,
    check_greedy,
    check_images,
    check_log_probs,
    check_new_weights,
    check_score,
    check_seeds,
    check_suppressed,
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
    check_pausing,
    check_protocol,
    check_routes,
    check_second_turn,
    check_stop,
)
from agents.engines.base import EngineSetup
from agents.engines.own import MakeEngine
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from envs.checks import Broken, CheckRun, Finding, NotApplicable, Result
from envs.workers.process_info import children

#: By the name of the row. The last one, "closing", is added by `check_engine`.
CHECKS: Mapping[str, Callable[[Trial], Coroutine[Any, Any, Result]]] = {
    "protocol": check_protocol,
    "completion": check_completion,
    "score": check_score,
    "log-probs": check_log_probs,
    "greedy": check_greedy,
    "drawing": check_drawing,
    "seeds": check_seeds,
    "suppressed ids": check_suppressed,
    "stop ids": check_stop,
    "budget": check_budget,
    "images": check_images,
    "second turn": check_second_turn,
    "routes": check_routes,
    "many at once": check_concurrency,
    "cancelling": check_cancelling,
    "pausing": check_pausing,
    "new weights": check_new_weights,
}


def check_engine(
    make: MakeEngine,
    setup: EngineSetup,
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
    network = Reference.load(setup.model_path, setup.dtype, setup.device)
    loop = LoopThread(limit_s, max_seconds)
    checks = CheckRun(only, on_check, loop.run)
    num_children = len(children())
    trials = list[Trial]()

    async def build() -> str:
        engine = await asyncio.to_thread(make, setup)
        if not hasattr(engine, "start"):
            raise Broken(f"returned {type(engine).__name__}", "return an Engine of agents/engines/base.py")
        # Kept before it starts, so that it is closed where that fails.
        trials.append(Trial(engine, setup, renderer, network, Path(folder)))
        await engine.start()
        return f"made and started {type(engine).__name__}"

    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        can_go_on = checks.run("building", build, is_needed=True)
        if can_go_on and checks.wants("pausing", "new weights"):
            # Made before the checks: of a large network, it may take longer than one of them.
            with contextlib.suppress(NotApplicable):
                trials[0].other_network  # noqa: B018
        for name, check in CHECKS.items():
            if not can_go_on or loop.is_over:
                break
            # Without a method of the protocol, every other check would say so again.
            can_go_on = checks.run(name, partial(check, *trials)) or name != "protocol"
        checks.skip(CHECKS, "the check stopped before it")
        if trials:
            with_turn = can_go_on and not loop.is_over
            loop.limit_s = 4 * END_S
            checks.run("closing", lambda: check_closing(trials[0], num_children, with_turn), is_needed=True)
    loop.stop()
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
