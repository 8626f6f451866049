"""Where processes listen for TCP connections, for tests."""

from __future__ import annotations

import contextlib
import os
from ipaddress import ip_address

import psutil


def open_to_others(sockets: set[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
    """Return those of the sockets that other hosts can reach."""
    return {found for found in sockets if not ip_address(found[1].removeprefix("::ffff:")).is_loopback}


def listening(process: int = os.getpid()) -> set[tuple[str, str, int]]:
    """Return name, address and port of each listening socket of a process and its children."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process)
        for one in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                sockets = one.net_connections("tcp")
                found |= {(one.name(), s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
    return found
