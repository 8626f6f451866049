"""The quick checks at the start of every run: they take a second or two and need no engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from envs.checks import Check, CheckRun, Finding
from envs.errors import UserError
from trainer.config.run import RunConfig
from trainer.preflight.config_only import ConfigChecks
from trainer.preflight.prepared_run import LearnerChecks, PreparedChecks
from trainer.preflight.report import summary_line
from trainer.rollouts.live import LiveContext
from trainer.rollouts.recorded import RecordedContext
from trainer.setup.backend import check_backend
from trainer.setup.run_context import RunContext

logger = logging.getLogger(__name__)

#: The checks use this many of the run's problems.
NUM_PROBLEMS = 4
#: The checks of a prepared run that take little time. The others read or compute all of the network.
QUICK = ("gold answers", "aggregation", "positions", "sight of the learner")


class RunRefused(UserError):
    """The run must not start: the message has a line for each fault."""

    def __init__(self, faults: Sequence[Finding]) -> None:
        checks = ", ".join(fault.check for fault in faults)
        super().__init__("doctor", "must find the run sound", checks, "give --doctor warn to start it anyway")
        self.faults = tuple(faults)
        self.args = ("\nerror: ".join(f"{fault.line} (--doctor warn starts it anyway)" for fault in faults),)


class QuickChecks:
    """Runs the quick checks and prints what they find.

    Example::

        doctor = QuickChecks(config)
        doctor.check_config()             # versions, run folder, memory
        context = prepare(config)
        doctor.check_context(context)     # template, gold answers, positions ...; "doctor: 8 checks sound, 0.9 s"
    """

    def __init__(self, config: RunConfig) -> None:
        self._mode = config.doctor
        self._config_checks = ConfigChecks(config)
        self._run = CheckRun()
        self._num_reported = 0
        self._seconds = 0.0

    def check_config(self) -> None:
        """Run the checks that need no loaded network.

        Raises:
            UserError: the backend or the adapters cannot be made as configured.
            RunRefused: a check found a fault, and `--doctor` is stop.
        """
        if self._mode == "off":
            return
        started = time.perf_counter()
        checks = self._config_checks
        try:
            checks.network  # noqa: B018 - the code that loads the checkpoint says what is wrong with it
        except UserError:
            return
        # A wrong flag of the backend or the adapters is no finding of a check.
        config = checks.config
        check_backend(config.cluster, config.model, config.learner, checks.network_config)
        checks.networks.trained(config.learner)
        self._run.run("versions", checks.versions)
        self._run.run("run folder", checks.run_folder)
        self._run.run("memory", checks.memory)
        self._seconds = time.perf_counter() - started
        self._report_new()

    def check_context(self, context: RunContext) -> None:
        """Run the checks of a prepared run.

        Raises:
            RunRefused: a check found a fault, and `--doctor` is stop.
        """
        if self._mode == "off":
            return
        started = time.perf_counter()
        self._config_checks.renderer = context.renderer
        self._run.run("chat template", self._config_checks.chat_template)
        for name, check in self._checks_of(context).items():
            if name in QUICK:
                self._run.run(name, check)
        self._seconds += time.perf_counter() - started
        self._report_new()
        logger.info(summary_line(self._run.findings, self._seconds))

    def _checks_of(self, context: RunContext) -> Mapping[str, Check]:
        network = self._config_checks.network
        if isinstance(context, LiveContext):
            prepared = asyncio.run(PreparedChecks.open(context, network, NUM_PROBLEMS))
            return prepared.all_checks(NUM_PROBLEMS, with_wrong=False)
        assert isinstance(context, RecordedContext), type(context)
        return LearnerChecks.recorded(context, network, NUM_PROBLEMS).checks()

    def _report_new(self) -> None:
        """Log new warnings (and faults, with `--doctor warn`); raise `RunRefused` for faults with `--doctor stop`."""
        new = self._run.findings[self._num_reported :]
        self._num_reported = len(self._run.findings)
        faults = [finding for finding in new if finding.status == "fault"]
        for finding in new:
            if finding.status == "warning" or (finding.status == "fault" and self._mode == "warn"):
                logger.warning(f"doctor: {finding.status}: {finding.line}")
        if faults and self._mode == "stop":
            raise RunRefused(faults)
