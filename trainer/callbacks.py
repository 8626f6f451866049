"""Code of the user that is called as a run goes on: it can follow the run, add metrics, and end it.

``--callback my.py:Plateau`` names a class, a function that returns a callback, or an object; repeat it for more. From
Python, `envs.config.plugins.give(Plateau(patience=5))` returns such a name. The methods are called one after the other
in the process of the training loop, which waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from envs.config.plugins import check_not_async, import_cause, import_object
from envs.errors import CODE_FAULTS, UserError, did_you_mean
from envs.execution.watchdog import watched
from trainer.config.run import CALLBACK

logger = logging.getLogger(__name__)

FLAG = "--callback"
#: A method that takes longer than this is named in a warning, once a call.
SLOW_S = 60.0


@dataclass(frozen=True)
class RunStart:
    """A run that begins or is resumed: its folder, its settings, the steps taken so far and those planned.

    Example: `RunStart(Path("runs/x"), {"seed": 0, ...}, step=0, num_steps=50)`.
    """

    folder: Path
    settings: Mapping[str, Any]
    step: int
    num_steps: int


@dataclass(frozen=True)
class Stop:
    """What a callback returns to end the run after this step, as if it were the last."""

    reason: str


class Callback:
    """Base of a user's callback: it overrides the methods that it needs.

    Example::

        class Plateau(Callback):
            def on_step_end(self, step, row):
                if row["entropy"] < 0.01:
                    return Stop("the policy has collapsed")
                return {"reward_per_turn": row["reward"] / row["turns"]}
    """

    def on_begin(self, run: RunStart) -> None:
        """Take note of a run before its first evaluation."""

    def on_step_end(self, step: int, row: Mapping[str, float]) -> Mapping[str, float] | Stop | None:
        """Take note of the metrics of a step, as in `metrics.jsonl`; return further ones, a `Stop`, or nothing."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> Stop | None:
        """Take note of an evaluation of the weights of a step, 0 at the start: `metrics["eval/with_tool/accuracy"]`."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Take note of the summary, once everything is saved; not called for a run that an error has ended."""


#: Callbacks that were made to check them; the next session with their reference takes them.
_made: dict[str, Callback] = {}


def check_callbacks(references: Sequence[str]) -> None:
    """Make the callbacks of a run that is about to begin. Raises `UserError` if one cannot be made or is none."""
    for reference in references:
        # Kept, so that the constructor of a user, which may connect somewhere, runs once.
        _made[reference] = _open(reference)


class Callbacks:
    """The callbacks of a run, called in the order in which they were given.

    `stop_reason` is the first reason why one asked to stop; empty if none did. All methods raise `UserError` where a
    callback raises or returns something else.

    Example::

        callbacks = Callbacks(["my.py:Plateau"])
        callbacks.on_step_end(1, row)       # {"reward_per_turn": 0.2}
        callbacks.stop_reason               # "Plateau: the policy has collapsed"
    """

    def __init__(self, references: Sequence[str]) -> None:
        self._callbacks = {reference: _made.pop(reference, None) or _open(reference) for reference in references}
        self.stop_reason = ""

    def on_begin(self, run: RunStart) -> None:
        """Call the method of every callback."""
        for reference, callback in self._callbacks.items():
            with _watched(reference, "on_begin"):
                callback.on_begin(run)

    def on_step_end(self, step: int, row: Mapping[str, float]) -> dict[str, float]:
        """Call the method of every callback; return all metrics that they add."""
        added: dict[str, float] = {}
        for reference, callback in self._callbacks.items():
            with _watched(reference, "on_step_end"):
                # A copy: what a callback changes must not reach the log.
                result = callback.on_step_end(step, dict(row))
            if isinstance(result, Mapping):
                added |= _checked(reference, result, row.keys() | added.keys())
            else:
                self._note(reference, callback, "on_step_end", result)
        return added

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call the method of every callback."""
        for reference, callback in self._callbacks.items():
            with _watched(reference, "on_evaluation"):
                result = callback.on_evaluation(step, metrics)
            self._note(reference, callback, "on_evaluation", result)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Call the method of every callback."""
        for reference, callback in self._callbacks.items():
            with _watched(reference, "on_end"):
                callback.on_end(summary)

    def _note(self, reference: str, callback: Callback, method: str, result: object) -> None:
        if isinstance(result, Stop):
            # The first reason stands; later callbacks are still called.
            self.stop_reason = self.stop_reason or f"{type(callback).__name__}: {result.reason}"
        elif result is not None:
            rule = f"'{reference}'.{method} must return Stop(reason) or None"
            raise UserError(FLAG, rule, result, "import Stop from trainer.callbacks")


def _open(reference: str) -> Callback:
    """Return the callback that a reference names: an object, or what a class or function returns."""
    found = import_object(FLAG, reference)
    if not isinstance(found, Callback):
        found = CALLBACK.call(FLAG, reference, CALLBACK.check(FLAG, reference, found))
    if not isinstance(found, Callback):
        fix = "derive its class from trainer.callbacks.Callback"
        raise UserError(FLAG, f"'{reference}' must give a Callback", type(found).__name__, fix)
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(found):
        # A mistyped method would simply never be called.
        if name.startswith("on_") and name not in known:
            raise UserError(FLAG, f"'{reference}' has a method that is never called", name, did_you_mean(name, known))
        if name in known:
            check_not_async(FLAG, f"{reference}.{name}", getattr(found, name))
    return found


@contextlib.contextmanager
def _watched(reference: str, method: str) -> Iterator[None]:
    """Turn what a callback raises into a `UserError`, and name it in a warning if it takes long."""
    name = f"'{reference}'.{method}"
    # The loop waits for callbacks, so a slow one looks like a slow step.
    timer = threading.Timer(SLOW_S, logger.warning, [f"the run waits for {FLAG} {name}, since {SLOW_S:g} s"])
    timer.daemon = True
    timer.start()
    try:
        # Never ended by us: a callback may upload for minutes.
        with watched(f"{FLAG} {name}", math.inf):
            yield
    except CODE_FAULTS as error:
        raise UserError(FLAG, f"{name} must not raise", import_cause(error), "fix it and resume the run") from error
    finally:
        timer.cancel()


def _checked(reference: str, added: Mapping[Any, Any], known: set[str]) -> dict[str, float]:
    """Return the metrics that a callback adds, if they are numbers under new names."""
    for name, value in added.items():
        # A callback must not replace a metric that others go by.
        if not isinstance(name, str) or name in known or not isinstance(value, Real):
            rule = f"'{reference}'.on_step_end must return numbers by names that the row does not have"
            raise UserError(FLAG, rule, f"{name}: {value!r}", "give it another name, or a number")
    return {name: float(value) for name, value in added.items()}
