"""Find what is wrong with a run before step 0: `python -m trainer.doctor` with the flags of `python -m trainer.run`.

Builds what the run would build, has the engine write a few turns, changes the learner's weights to see whether they
arrive, and throws everything away. A short form of it runs at the start of every run (`trainer.diagnosis.start`).
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

from envs.cli import exit_code, parse
from envs.errors import UserError
from trainer.config import RunConfig, Section, SidesConfig
from trainer.diagnosis.before import Before
from trainer.diagnosis.book import CHECKS, PREPARED, RUNNING, Book, closing
from trainer.diagnosis.engines import Examined
from trainer.diagnosis.finding import Finding, Verdict, crashed, ok
from trainer.diagnosis.patient import Patient
from trainer.diagnosis.start import NUM_PROBLEMS
from trainer.layers import LAYERS
from trainer.setup import RunParts, prepare

#: The learning rate, times the hidden size, with which a few updates of AdamW move log-probs by some tenths of a nat:
#: 1e-3 for a hidden size of 256, 1.25e-4 for the 2048 of Qwen3-VL-2B. An update moves each weight by about the rate.
MOVING_LR = 0.256
_WORDS = {"ok": ("sound", "green"), "warning": ("warning", "yellow"), "fault": ("FAULT", "bold red")}


class CheckupConfig(Section):
    """How much is looked at."""

    only: tuple[str, ...] = Field(
        default=(), description=f"checks to make, by a part of their name; {', '.join(CHECKS)}"
    )
    problems: int = Field(default=4, ge=1, description="problems on which the engine writes two episodes each")
    answers: int = Field(default=32, ge=1, description="problems whose right and wrong answers are graded")
    report: Path | None = Field(default=None, description="file to write the findings to, as JSON")


class DoctorConfig(RunConfig):
    """The run to look at, and how."""

    checkup: CheckupConfig = CheckupConfig()


def diagnose(config: DoctorConfig, on_check: Callable[[str], None] = lambda check: None) -> list[Finding]:
    """Make all checks of a run and return what they found; nothing of it is left behind.

    Example::

        findings = diagnose(DoctorConfig(model=ModelConfig(model="path/to/checkpoint")))
        [finding.line for finding in findings if finding.status == "fault"]
    """
    book, before = Book(config.checkup.only, on_check), Before(config)
    try:
        before.network  # noqa: B018 - read here, so that what is wrong with it is said once
    except UserError as error:
        refused = crashed(error)
        book.add("set-up", lambda: refused, is_needed=True)
        book.skip(CHECKS, "the checkpoint cannot be read")
        return book.findings
    book.add("versions", before.versions)
    book.add("run folder", before.folder)
    book.add("memory", before.memory)
    book.add("chat template", before.template)
    for check, reason in (("memory", "it would not fit into memory"), ("chat template", "the template cannot be used")):
        if book.faults(check) and (check == "memory" or not _is_usable(before)):
            book.skip((*PREPARED, *RUNNING), f"not loaded: {reason}")
            return book.findings
    if not book.wants(*PREPARED, *RUNNING):
        return book.findings
    with scratch_folder(config.log.out) as folder:
        parts: list[RunParts] = []

        def set_up() -> Verdict:
            hidden = before.network_config.get_text_config().hidden_size
            parts.append(prepare(trial(config, folder, hidden), lambda text: None))
            return ok(f"{len(parts[0].train_samples)} problems, {config.model.model}, {config.env.env}")

        book.add("set-up", set_up, is_needed=True)
        if not parts:
            book.skip((*PREPARED, *RUNNING), "the run cannot be set up")
            return book.findings
        try:
            asyncio.run(_look(parts[0], config, before, book))
        finally:
            parts[0].close()
    return book.findings


async def _look(parts: RunParts, config: DoctorConfig, before: Before, book: Book) -> None:
    """Make the checks of a prepared run."""
    patient = await Patient.admit(parts, before.network, max(config.checkup.problems, NUM_PROBLEMS))
    await book.add_async("data", patient.data)
    await book.add_async("template in play", patient.template)
    await book.add_async("gold answers", lambda: patient.answers(config.checkup.answers, with_wrong=True))
    await book.add_async("image preprocessing", patient.preprocessing)
    await book.add_async("positions", patient.positions)
    await book.add_async("forward pass", patient.forward)
    await book.add_async("weights of the learner", patient.weights)
    await book.add_async("sight of the learner", patient.sight)
    if not book.wants(*RUNNING):
        return
    examined = Examined(patient)

    async def start() -> Verdict:
        await parts.sync.carrier.start()
        return ok(f"{type(parts.engine).__name__} runs")

    try:
        await book.add_async("engine", start, is_needed=True)
        if book.faults("engine"):
            book.skip(RUNNING, "the engine does not run")
            return
        await book.add_async("weights of the engine", examined.weights)
        await book.add_async("sight of the engine", examined.sight)
        needs_played = book.wants("caches after new weights")
        await book.add_async("agreement", lambda: examined.agreement(config.checkup.problems), needs_played)
        await book.add_async("caches after new weights", examined.caches)
    finally:
        await parts.engine.close()


def _is_usable(before: Before) -> bool:
    """Return whether there is a renderer at all."""
    with contextlib.suppress(UserError):
        return before.renderer is not None
    return False


def trial(config: RunConfig, folder: Path, hidden_size: int) -> RunConfig:
    """Return the run as it is tried: from its start, with one large update a step and nothing in the loss beside it."""
    optim = {"lr": MOVING_LR / hidden_size, "schedule": "constant", "warmup_steps": 0, "minibatches": 1, "epochs": 1}
    algorithm = {"kl_coef": 0.0, "entropy_coef": 0.0, "mask_truncated": False}
    return config.model_copy(
        update={
            "optim": config.optim.model_copy(update=optim),
            "algorithm": config.algorithm.model_copy(update=algorithm),
            "checkpoint": config.checkpoint.model_copy(update={"resume": None}),
            "sides": SidesConfig(),
            "log": config.log.model_copy(update={"out": folder.parent, "name": folder.name}),
        }
    )


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that is not there yet, below `out` or, where nothing can be written there, below the system's own
    for such; remove it again."""
    name = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        place = out if os.access(out, os.W_OK) else Path(tempfile.gettempdir())
    except OSError:
        place = Path(tempfile.gettempdir())
    folder = place.absolute() / name
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


def run(argv: Sequence[str] | None) -> int:
    """Parse, look, report."""
    from trainer.run import quiet_libraries

    description = "Find what is wrong with a run before step 0. Takes the flags of trainer.run."
    config = parse(DoctorConfig, argv, "python -m trainer.doctor", description, LAYERS)
    quiet_libraries()
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    started = time.perf_counter()
    with console.status("") as status:
        findings = diagnose(config, lambda check: status.update(f"looking at: {check}"))
    console.print(table(findings))
    console.print(closing(findings, time.perf_counter() - started), markup=False)
    if config.checkup.report:
        text = json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1)
        config.checkup.report.write_text(text + "\n", encoding="utf-8")
    return int(any(finding.status == "fault" for finding in findings))


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(None))


if __name__ == "__main__":
    sys.exit(main())
