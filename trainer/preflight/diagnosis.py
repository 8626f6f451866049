"""All checks of a run: on its configuration, on the run that it prepares, and on its engine. Nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from envs.errors import UserError
from trainer.config.run import RunConfig, StagesConfig
from trainer.preflight.config_only import ConfigChecks
from trainer.preflight.finding import Finding, Verdict, crashed, ok
from trainer.preflight.prepared_run import PreparedChecks
from trainer.preflight.quick import NUM_PROBLEMS
from trainer.preflight.report import CHECKS, ENGINE_CHECKS, PREPARED_CHECKS, DoctorConfig, FindingLog
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
    """
    log = FindingLog(config.checkup.only, on_check)
    checks = ConfigChecks(config)
    try:
        checks.network  # noqa: B018 - loaded here, so that a checkpoint that cannot be read is one fault
    except UserError as error:
        refused = crashed(error)
        log.add("set-up", lambda: refused, is_needed=True)
        log.skip(CHECKS, "the checkpoint cannot be read")
        return log.findings
    log.add("versions", checks.versions)
    log.add("run folder", checks.run_folder)
    log.add("memory", checks.memory)
    log.add("chat template", checks.chat_template)
    for check, reason in (("memory", "it would not fit into memory"), ("chat template", "the template cannot be used")):
        if log.faults(check) and (check == "memory" or not _has_renderer(checks)):
            log.skip((*PREPARED_CHECKS, *ENGINE_CHECKS), f"not loaded: {reason}")
            return log.findings
    if not log.wants(*PREPARED_CHECKS, *ENGINE_CHECKS):
        return log.findings
    with scratch_folder(config.log.out) as folder:
        contexts: list[LiveContext] = []

        def set_up() -> Verdict:
            hidden = checks.network_config.get_text_config().hidden_size
            contexts.append(prepare(trial(config, folder, hidden), with_engine=log.wants(*ENGINE_CHECKS)))
            return ok(f"{len(contexts[0].train_samples)} problems, {config.model.model}, {config.env.env}")

        log.add("set-up", set_up, is_needed=True)
        if not contexts:
            log.skip((*PREPARED_CHECKS, *ENGINE_CHECKS), "the run cannot be set up")
            return log.findings
        try:
            asyncio.run(_check_prepared(contexts[0], config, checks, log))
        finally:
            contexts[0].close()
    return log.findings


async def _check_prepared(
    context: LiveContext, config: DoctorConfig, config_checks: ConfigChecks, log: FindingLog
) -> None:
    """Run the checks of a prepared run, then start its engine and run the checks of that."""
    num_problems = config.checkup.problems
    prepared = await PreparedChecks.open(context, config_checks.network, max(num_problems, NUM_PROBLEMS))
    await log.add_async("data", prepared.data)
    await log.add_async("template in play", prepared.template_in_play)
    await log.add_async("gold answers", lambda: prepared.gold_answers(config.checkup.answers, with_wrong=True))
    await log.add_async("image preprocessing", prepared.image_preprocessing)
    await log.add_async("positions", prepared.positions)
    await log.add_async("forward pass", prepared.forward_pass)
    await log.add_async("weights of the learner", prepared.weights)
    await log.add_async("sight of the learner", prepared.image_sensitivity)
    if not log.wants(*ENGINE_CHECKS):
        return
    engine = EngineChecks(prepared)

    async def start() -> Verdict:
        await context.weight_sync.transport.start()
        return engine.describe()

    try:
        await log.add_async("engine", start, is_needed=True)
        if log.faults("engine"):
            log.skip(ENGINE_CHECKS, "the engine does not run")
            return
        await log.add_async("weights of the engine", engine.weights)
        await log.add_async("sight of the engine", engine.image_sensitivity)
        is_needed = log.wants("caches after new weights")  # that check uses the episodes of this one
        await log.add_async("agreement", lambda: engine.agreement(num_problems), is_needed)
        await log.add_async("caches after new weights", engine.caches)
    finally:
        await context.engine.close()


def _has_renderer(checks: ConfigChecks) -> bool:
    """Return whether the checkpoint's chat template can be used at all."""
    with contextlib.suppress(UserError):
        return checks.renderer is not None
    return False


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
            "log": config.log.model_copy(update={"out": folder.parent, "name": folder.name}),
        }
    )


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield the path of a new folder below `out` or, if `out` is not writable, below the system's temporary folder.

    At the end, the folder is removed, with all folders that were made for it.
    """
    name = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        parent = out if os.access(out, os.W_OK) else Path(tempfile.gettempdir())
    except OSError:
        parent = Path(tempfile.gettempdir())
    folder = parent.absolute() / name
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
