"""All checks of a run: on its configuration, on the run that it prepares, and on its engine. Nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from envs.checks import CheckRun, Finding, crashed
from envs.errors import UserError, did_you_mean
from trainer.config.run import RunConfig, StagesConfig
from trainer.preflight.config_only import ConfigChecks
from trainer.preflight.prepared_run import PreparedChecks
from trainer.preflight.quick import NUM_PROBLEMS
from trainer.preflight.report import CHECKS, ENGINE_CHECKS, PREPARED_CHECKS, DoctorConfig
from trainer.preflight.running_engine import EngineChecks
from trainer.rollouts.live import LiveContext, prepare

#: Learning rate times hidden size. With it, a few updates of AdamW move log-probs by some tenths of a nat: the rate is
#: 1e-3 for a hidden size of 256, 1.25e-4 for the 2048 of Qwen3-VL-2B. An update moves each weight by about the rate.
MOVING_LR = 0.256


def diagnose(config: DoctorConfig, on_check: Callable[[str], None] = lambda check: None) -> list[Finding]:
    """Run all checks of a run and return what they found; nothing that was made for them is left.

    Example::

        findings = diagnose(DoctorConfig(model=ModelConfig(model="path/to/checkpoint")))
        [finding.line for finding in findings if finding.status == "fault"]

    Raises:
        UserError: a word of `--only` is in no check's name.
    """
    only = config.checkup.only
    for word in only:
        if not any(word in name for name in CHECKS):
            raise UserError("--only", "must be in the name of a check", word, did_you_mean(word, CHECKS))
    with asyncio.Runner() as loop:
        run = CheckRun(only, on_check, loop.run)
        run.skip(CHECKS, _check_all(config, run, loop))
    return run.findings


def _check_all(config: DoctorConfig, run: CheckRun, loop: asyncio.Runner) -> str:
    """Run the checks in their order; return why those that are left cannot run."""
    checks = ConfigChecks(config)
    try:
        checks.network  # noqa: B018 - loaded here, so that a checkpoint that cannot be read is one fault
    except UserError as error:
        refused = crashed(error)
        run.run("set-up", lambda: refused, is_needed=True)
        return "the checkpoint cannot be read"
    run.run("versions", checks.versions)
    run.run("run folder", checks.run_folder)
    if not run.run("memory", checks.memory):
        return "not loaded: it would not fit into memory"
    if not run.run("chat template", checks.chat_template):
        try:
            checks.renderer  # noqa: B018 - a template that departs from its family's conventions can still be used
        except UserError:
            return "not loaded: the template cannot be used"
    if not run.wants(*PREPARED_CHECKS, *ENGINE_CHECKS):
        return ""
    with scratch_folder(config.log.out) as folder, contextlib.ExitStack() as cleanup:
        contexts: list[LiveContext] = []

        def set_up() -> str:
            hidden = checks.network_config.get_text_config().hidden_size
            contexts.append(prepare(trial(config, folder, hidden), with_engine=run.wants(*ENGINE_CHECKS)))
            cleanup.callback(contexts[0].close)
            return f"{len(contexts[0].train_samples)} problems, {config.model.model}, {config.env.name}"

        if not run.run("set-up", set_up, is_needed=True):
            return "the run cannot be set up"
        num_problems = max(config.checkup.problems, NUM_PROBLEMS)
        prepared = loop.run(PreparedChecks.open(contexts[0], checks.network, num_problems))
        for name, check in prepared.all_checks(config.checkup.answers, with_wrong=True).items():
            run.run(name, check)
        if not run.wants(*ENGINE_CHECKS):
            return ""
        try:
            return _check_engine(EngineChecks(prepared, config.checkup.problems), run)
        finally:
            loop.run(contexts[0].engine.close())


def _check_engine(engine: EngineChecks, run: CheckRun) -> str:
    """Start the engine and run its checks; return why they cannot run."""
    if not run.run("engine", engine.start, is_needed=True):
        return "the engine does not run"
    run.run("weights of the engine", engine.weights)
    run.run("sight of the engine", engine.sight)
    # The check of the caches uses the episodes of the check before it.
    run.run("agreement", engine.agreement, is_needed=run.wants("caches after new weights"))
    run.run("caches after new weights", engine.caches)
    return ""


def trial(config: RunConfig, folder: Path, hidden_size: int) -> RunConfig:
    """Return the configuration for the checks: a new run, with one large update a step and a plain policy loss."""
    optim = {"lr": MOVING_LR / hidden_size, "schedule": "constant", "warmup_steps": 0, "minibatches": 1, "epochs": 1}
    algorithm = {"kl_coef": 0.0, "entropy_coef": 0.0, "mask_truncated": False, "policy_loss": "ppo"}
    return config.model_copy(
        update={
            "optim": config.optim.model_copy(update=optim),
            "algorithm": config.algorithm.model_copy(update=algorithm),
            "checkpoint": config.checkpoint.model_copy(update={"resume": None}),
            "stages": StagesConfig(),
            "log": config.log.model_copy(update={"out": folder, "name": "run"}),
        }
    )


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder below `out`, or below the system's temporary folder if `out` is not writable.

    At the end it is removed, with all folders that were made for it.
    """
    made = [path for path in (out, *out.parents) if not path.exists()]
    # Below `out`, because servers on other hosts read weights there, and because it has room for them.
    with contextlib.suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)
    if os.access(out, os.W_OK):
        parent = out.absolute()
    else:
        parent = Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
