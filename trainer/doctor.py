"""Find what is wrong with a run before step 0: `python -m trainer.doctor` with the flags of `python -m trainer.run`.

It builds what the run would build, lets the engine generate a few turns, changes the learner's weights to see whether
they reach the engine, and deletes everything again. Every run starts with a quick form (`trainer.preflight.quick`).
`trainer.preflight` says how to add a check.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError
from trainer.config.run import RunConfig, StagesConfig
from trainer.config.sources import SOURCES
from trainer.preflight.config_only import ConfigChecks
from trainer.preflight.finding import Finding, Verdict, crashed, ok
from trainer.preflight.prepared_run import PreparedChecks
from trainer.preflight.quick import NUM_PROBLEMS
from trainer.preflight.report import CHECKS, ENGINE_CHECKS, PREPARED_CHECKS, FindingLog, summary_line
from trainer.preflight.running_engine import EngineChecks
from trainer.rollouts.live import LiveContext, prepare

#: Learning rate times hidden size. With it, a few updates of AdamW move log-probs by some tenths of a nat: the rate is
#: 1e-3 for a hidden size of 256, 1.25e-4 for the 2048 of Qwen3-VL-2B. An update moves each weight by about the rate.
MOVING_LR = 0.256
_WORDS = {"ok": ("sound", "green"), "warning": ("warning", "yellow"), "fault": ("FAULT", "bold red")}


class CheckupConfig(Section):
    """Which checks run, and on how many problems."""

    only: tuple[str, ...] = Field(
        default=(), description=f"checks to run, by a part of their name; {', '.join(CHECKS)}"
    )
    problems: int = Field(default=4, ge=1, description="problems on which the engine generates two episodes each")
    answers: int = Field(default=32, ge=1, description="problems whose right and wrong answers are graded")
    report: Path | None = Field(default=None, description="file to write the findings to, as JSON")


class DoctorConfig(RunConfig):
    """The run to check, and how."""

    checkup: CheckupConfig = CheckupConfig()


def diagnose(config: DoctorConfig, on_check: Callable[[str], None] = lambda check: None) -> list[Finding]:
    """Run all checks of a run and return what they found; nothing that was made for them is left.

    Example::

        findings = diagnose(DoctorConfig(model=ModelConfig(model="path/to/checkpoint")))
        [finding.line for finding in findings if finding.status == "fault"]
    """
    log, checks = FindingLog(config.checkup.only, on_check), ConfigChecks(config)
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
            contexts.append(prepare(trial(config, folder, hidden), lambda text: None))
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
        return ok(f"{type(context.engine).__name__} runs")

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
    algorithm = {"kl_coef": 0.0, "entropy_coef": 0.0, "mask_truncated": False}
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


def table(findings: Sequence[Finding]) -> Table:
    """Return the findings for the screen."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("check", no_wrap=True)
    shown.add_column("result", no_wrap=True)
    shown.add_column("found", overflow="fold")
    shown.add_column("s", justify="right", no_wrap=True)
    for finding in findings:
        word, style = _WORDS.get(finding.status, ("skipped", "dim"))
        found = Text(finding.found, "dim" if finding.status == "skipped" else "")
        if finding.fix:
            found.append(f"\n-> {finding.fix}", "bold")
        shown.add_row(finding.check, Text(word, style), found, f"{finding.seconds:.1f}")
    return shown


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, run the checks and print their findings; return 1 if there is a fault."""
    from trainer.metrics.console import quiet_libraries

    description = "Find what is wrong with a run before step 0. Takes the flags of trainer.run."
    config = parse(DoctorConfig, argv, "python -m trainer.doctor", description, SOURCES)
    quiet_libraries()
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    started = time.perf_counter()
    with console.status("") as status:
        findings = diagnose(config, lambda check: status.update(f"checking: {check}"))
    console.print(table(findings))
    console.print(summary_line(findings, time.perf_counter() - started), markup=False)
    if config.checkup.report:
        text = json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1)
        config.checkup.report.write_text(text + "\n", encoding="utf-8")
    return int(any(finding.status == "fault" for finding in findings))


if __name__ == "__main__":
    sys.exit(exit_code(run))
