"""The short form that runs at the start of every run: what costs a second or two and needs no engine."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence

from envs.errors import UserError
from trainer.config import RunConfig
from trainer.diagnosis.before import Before
from trainer.diagnosis.book import Book, closing
from trainer.diagnosis.finding import Finding
from trainer.diagnosis.patient import Patient
from trainer.diagnosis.recorded import RecordedPatient
from trainer.parts import Parts
from trainer.replaying import ReplayParts
from trainer.setup import RunParts

#: Problems that are looked at.
NUM_PROBLEMS = 4


class Unsound(UserError):
    """A run that must not begin: a line for each fault."""

    def __init__(self, faults: Sequence[Finding]) -> None:
        checks = ", ".join(fault.check for fault in faults)
        super().__init__("doctor", "must find the run sound", checks, "give --doctor warn to go on all the same")
        self.faults = tuple(faults)

    def __str__(self) -> str:
        return "\nerror: ".join(f"{fault.line} (--doctor warn goes on all the same)" for fault in self.faults)


class StartChecks:
    """What is looked at before step 0.

    Example::

        doctor = StartChecks(config, console.print)
        doctor.before()             # versions, run folder, memory
        parts = prepare(config)
        doctor.after(parts)         # template, gold answers, positions, sight; prints "doctor: 8 checks sound, 0.9 s"
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        self._mode, self._say = config.doctor, say
        self._before, self._book = Before(config), Book()
        self._num_said, self._seconds = 0, 0.0

    def before(self) -> None:
        """Look at what can be known before anything is loaded.

        Raises:
            Unsound: something is wrong, and `--doctor` is stop.
        """
        if self._mode == "off":
            return
        started = time.perf_counter()
        try:
            self._before.network  # noqa: B018 - what is wrong with a checkpoint is said by who loads it
        except UserError:
            return
        self._book.add("versions", self._before.versions)
        self._book.add("run folder", self._before.folder)
        self._book.add("memory", self._before.memory)
        self._seconds = time.perf_counter() - started
        self._speak()

    def after(self, parts: Parts) -> None:
        """Look at a prepared run; one that must not begin is closed, and the folder that was made for it removed.

        Raises:
            Unsound: as `before`.
        """
        if self._mode == "off":
            return
        started = time.perf_counter()
        asyncio.run(self._look(parts))
        self._seconds += time.perf_counter() - started
        try:
            self._speak()
        except Unsound:
            parts.close()
            if not parts.config.checkpoint.resume:
                shutil.rmtree(parts.folder, ignore_errors=True)
            raise
        self._say(closing(self._book.findings, self._seconds))

    async def _look(self, parts: Parts) -> None:
        self._before.renderer = parts.renderer
        self._book.add("chat template", self._before.template)
        if isinstance(parts, RunParts):
            patient = await Patient.admit(parts, self._before.network, NUM_PROBLEMS)
            await self._book.add_async("template in play", patient.template)
            await self._book.add_async("gold answers", lambda: patient.answers(NUM_PROBLEMS, with_wrong=False))
        else:
            assert isinstance(parts, ReplayParts), type(parts)
            patient = RecordedPatient(parts, self._before.network, NUM_PROBLEMS)
        await self._book.add_async("positions", patient.positions)
        await self._book.add_async("sight of the learner", patient.sight)

    def _speak(self) -> None:
        """Say what is odd; raise where that is to stop the run."""
        new, self._num_said = self._book.findings[self._num_said :], len(self._book.findings)
        faults = [finding for finding in new if finding.status == "fault"]
        for finding in new:
            if finding.status == "warning" or (finding.status == "fault" and self._mode == "warn"):
                self._say(f"doctor: {finding.status}: {finding.line}")
        if faults and self._mode == "stop":
            raise Unsound(faults)
