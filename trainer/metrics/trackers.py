"""Trackers get a run's metrics besides `metrics.jsonl`: TensorBoard and wandb.

A resumed run continues its curves. No tracker can end a run: `MetricsLog` drops a tracker that fails.

To add a tracker: write a class like `TensorBoard`, add it to `OPENERS` and its name to `TrackerName`; or name a class
of your own, `--tracker my.py:MyTracker`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from envs.config.plugins import check_not_async
from envs.errors import UserError
from envs.execution.threads import DaemonThread
from trainer.config.run import TRACKER

R = TypeVar("R")
#: The longest wait for a tracker that opens, writes a row, or sends what is left.
TRACKER_S = 120.0


class Tracker(Protocol):
    """Gets a row of metrics after every step."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add the row of a step."""
        ...

    def close(self) -> None:
        """Send or write what is left."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows; with `steps_done` above 0 it is resumed.

    Example: `TrackedRun(Path("runs/x"), {"seed": 0}, "trueturn", steps_done=10)` has the name x; its next step is 11.
    """

    folder: Path
    config: Mapping[str, Any]
    project: str
    steps_done: int = 0


class TensorBoard:
    """Writes files to `tensorboard` in the run folder. Rows of steps that a resumed run repeats are hidden."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A new run has nothing to hide.
        purge = run.steps_done + 1 if run.steps_done else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        text = "\n".join(f"    {line}" for line in json.dumps(run.config, indent=1, default=str).splitlines())
        self._writer.add_text("config", text, run.steps_done)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add the row of a step."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Wandb:
    """Sends rows to a run of Weights & Biases, whose id is stored in the run folder.

    Its own step numbers cannot go back, so curves are drawn over the row's `step`.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        # Kept in the folder, so that a resumed run continues the same curves.
        file = run.folder / "wandb_id.txt"
        if not file.exists():
            file.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            dir=str(run.folder),
            config=dict(run.config),
            id=file.read_text(encoding="utf-8").strip(),
            resume="allow",
            settings=wandb.Settings(console="off"),  # do not upload the moving progress bar
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add the row of a step."""
        self._run.log({**row, "step": step})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class OwnThread:
    """A tracker that is opened, called and closed on one thread of its own: libraries keep state by thread, and hang.

    Raises:
        TimeoutError: a call took longer than `TRACKER_S`.
    """

    def __init__(self, opener: Callable[[], Tracker]) -> None:
        """Open the tracker; raises what `opener` raises."""
        self._thread = DaemonThread("tracker")
        self._tracker = self._wait_for(opener)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Add the row of a step."""
        self._wait_for(lambda: self._tracker.write(step, row))

    def close(self) -> None:
        """Send or write what is left."""
        self._wait_for(self._tracker.close)
        self._thread.end()

    def _wait_for(self, work: Callable[[], R]) -> R:
        answer = self._thread.begin(work)
        # The thread is left behind; it is a daemon and cannot hold up the end.
        if not wait([answer], TRACKER_S).done:
            raise TimeoutError(f"no answer for {TRACKER_S:g} s")
        return answer.result()


OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError` if a tracker or its package is missing, or if wandb would ask for a login."""
    for name in names:
        if name not in OPENERS:
            tracker = TRACKER.load("--tracker", name)
            for method in ("write", "close"):
                check_not_async("--tracker", f"{name}.{method}", getattr(tracker, method, None))
        # Found without importing, which takes seconds.
        elif importlib.util.find_spec(name) is None:
            raise UserError("--tracker", "needs its package", name, f"pip install {name}")
        if name == "wandb":
            with _as_user_error(name):
                is_usable = _wandb_is_usable()
            if not is_usable:
                fix = "run `wandb login`, or set WANDB_MODE=offline and `wandb sync` the run folder later"
                raise UserError("--tracker", "needs a login", name, fix)


def open_trackers(names: Sequence[str], run: TrackedRun) -> dict[str, Tracker]:
    """Return the trackers of these names, opened for a run.

    Raises:
        UserError: one cannot be used or does not open.
    """
    check_trackers(names)
    with contextlib.ExitStack() as opened:
        trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            opener = OPENERS.get(name) or TRACKER.load("--tracker", name)
            with _as_user_error(name):
                trackers[name] = OwnThread(functools.partial(opener, run))
            # If a later one does not open, this one must not stay open.
            opened.callback(trackers[name].close)
        opened.pop_all()
    return trackers


@contextlib.contextmanager
def _as_user_error(name: str) -> Iterator[None]:
    """Raise `UserError` for anything that a tracker's package raises: no network, no permission, and so on."""
    try:
        yield
    except Exception as error:
        reason = f"{name}: {type(error).__name__}: {error}"
        raise UserError("--tracker", "must open", reason, "fix that, or leave it out") from error


def _wandb_is_usable() -> bool:
    """Return whether wandb stays offline, or finds a key without asking."""
    import requests.utils  # wandb needs it
    import wandb  # pyright: ignore[reportMissingImports] - an extra

    settings = wandb.setup().settings
    if settings.mode in ("offline", "disabled", "dryrun"):
        return True
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # A login may be kept under either name of the service; the file is the one that NETRC names.
    return any(requests.utils.get_netrc_auth(url) for url in (settings.base_url, "https://api.wandb.ai"))
