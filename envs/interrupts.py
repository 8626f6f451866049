"""Ctrl-C while a command still imports: one line in place of a traceback. Imports nothing that takes time."""

from __future__ import annotations

import sys
from types import TracebackType


def end_quietly(package: str) -> None:
    """Print one line where Ctrl-C ends this process before its command runs, if a module of `package` is the command.

    Each package calls this first. Once the command runs, `envs.config.cli.exit_code` sees Ctrl-C before this does.
    """
    program = sys.argv[0]  # "-m" as long as `python -m` imports the packages of the module
    if program == "-m":
        words = [word.removeprefix("-m").partition(".")[0] for word in sys.orig_argv]
    else:
        words = []
    if package not in (*words, program.rpartition("/")[2]):
        return
    show = sys.excepthook  # a notebook or a debugger may have its own

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            show(kind, error, trace)

    sys.excepthook = say
