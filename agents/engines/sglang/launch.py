"""Runs a command that ends when its parent ends: `python launch.py COMMAND ...`.

A trainer that is killed must not leave servers behind that hold the GPU. Only Linux can guarantee that; elsewhere the
command simply runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request a signal for the parent's death, then become the command."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request
            sys.exit(1)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
