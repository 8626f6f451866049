"""The start of a run: its stages, what is shown of them, and servers that start while the learner loads."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType

from rich.text import Text

from agents.engines.weight_servers import ServersEngine
from envs.console import Console
from envs.errors import UserError
from trainer.metrics.clock import StartClock

#: Seconds between two looks at the servers, and between two lines where there is no terminal.
LOOK_S = 0.2
LINE_S = 15.0


class Start:
    """Measures and shows the start of a run, and watches servers that start meanwhile.

    Example::

        start = Start(console)
        with start.watched():
            context = prepare(config, start)        # calls start.launch(engine), then loads the learner
        start.clock.summary()                       # "server 0 0.4-66.1 s, loading the learner 0.5-12.0 s"
    """

    def __init__(self, console: Console | None = None, age_s: float = 0.0) -> None:
        """Begin to measure; show it on `console`, if any. The command is already `age_s` old."""
        self.clock = StartClock(age_s)
        #: The first error of a server, once there is one.
        self.failure: UserError | None = None
        self._events: Sequence[str] = ()
        self._console = console
        self._engine: ServersEngine | None = None

    def launch(self, engine: ServersEngine) -> None:
        """Start the processes of an engine's servers and return at once."""
        engine.launch()
        for server in engine.servers.all:
            self.clock.begin(f"server {server.number}")
        self._engine = engine

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Show the start until the block ends. The death of a server ends the block at once, as Ctrl-C does.

        Raises:
            UserError: a server has died; names its log.
            KeyboardInterrupt: at the latest at the end of the block.
        """
        # No other thread can be interrupted.
        is_main = threading.current_thread() is threading.main_thread()
        interrupts: list[int] = []
        try:
            with self._live(), _noting_interrupts(interrupts, is_main), self._looking(interrupts=is_main):
                yield
        except BaseException:  # libraries also turn an interrupt into an error of theirs
            if self.failure is None and not interrupts:
                raise
        if self.failure is not None:
            raise self.failure
        if interrupts:
            raise KeyboardInterrupt

    @contextmanager
    def shown(self, events: Sequence[str] = ()) -> Iterator[None]:
        """Show what runs and for how long, until the block ends: as a live line, or without a terminal now and then.

        The line ends with the last of `events`, which may grow meanwhile.
        """
        self._events = events
        with self._live(), self._looking(interrupts=False):
            yield

    def _live(self) -> AbstractContextManager[object]:
        is_live = self._console is not None and self._console.is_terminal
        # A live line in a log file would be one line for each frame.
        if self._console and is_live:
            return self._console.status(self)
        return nullcontext()

    def __rich__(self) -> Text:
        line = self.clock.line()
        return Text("; ".join([f"waiting for {line}", *self._events[-1:]]) if line else "")

    @contextmanager
    def _looking(self, interrupts: bool) -> Iterator[None]:
        """Look at the servers from a thread until the block ends."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._look, args=(is_over, interrupts), name="start", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _look(self, is_over: threading.Event, interrupts: bool) -> None:
        """End the stages of servers that are up; a dead one interrupts the main thread, as Ctrl-C would."""
        said = time.monotonic()
        while not is_over.wait(LOOK_S):
            if self._engine and not self.failure:
                try:
                    self._end_stages(self._engine)
                except UserError as error:
                    if self._engine.servers.all:  # else they were ended on purpose
                        self.failure = error
                        if interrupts and callable(signal.getsignal(signal.SIGINT)):
                            # A real signal, since only that wakes a thread that waits for a lock.
                            signal.pthread_kill(_main_thread(), signal.SIGINT)
            if self._console and not self._console.is_terminal and time.monotonic() > said + LINE_S:
                said = time.monotonic()
                self._console.print(self, soft_wrap=True)
        if self._engine and not self.failure:
            with suppress(UserError):  # the block has ended, so a death is not its end
                self._end_stages(self._engine)

    def _end_stages(self, engine: ServersEngine) -> None:
        waiting = engine.servers.starting()
        for server in tuple(engine.servers.all):
            if server.number not in waiting:
                self.clock.end(f"server {server.number}")


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


@contextmanager
def _noting_interrupts(interrupts: list[int], is_main: bool) -> Iterator[None]:
    """Note each SIGINT besides raising `KeyboardInterrupt`, which is lost in a finalizer (`__del__`) of any library."""
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
