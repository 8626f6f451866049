"""Serve an environment to OpenEnv's clients: `python -m envs.serve geo3k`."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError
from envs.problems import ProblemsConfig, open_problems
from envs.registry import get_mixture


class ServeConfig(Section):
    """The options of `python -m envs.serve`."""

    id: tuple[str, ...] = Field(description="environment id in the registry; several, with shares, are a mixture")
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0: all, so other machines reach it")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    token: str = Field(default="", pattern=r"^[\w-]*$", description="first part of every path; empty: a random one")
    size: int = Field(default=1000, ge=1, description="number of problems")
    max_sessions: int = Field(default=64, ge=1, description="sessions at a time; each plays one episode")
    idle_s: float = Field(default=600.0, gt=0, description="a session ends after so many seconds without a message")
    max_message_mib: int = Field(default=8, ge=1, description="size of the largest message that a client may send")
    problems: ProblemsConfig = ProblemsConfig()


def run(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C."""
    config = parse(ServeConfig, argv, "python -m envs.serve", "Serve an environment to OpenEnv's clients.")
    try:
        import uvicorn

        from envs.as_openenv import Served
    except ImportError as error:
        raise UserError("installation", "needs a web server", str(error), "pip install 'trueturn[serve]'") from error
    spec = get_mixture(config.id, *config.registry)
    samples = open_problems(spec, config.problems, config.size)
    if not len(samples):
        raise UserError(f"environment '{spec.id}' data", "must have problems to serve", 0, "give at least one")
    token = config.token or secrets.token_urlsafe(24)
    served = Served(spec, samples, token, config.max_sessions, config.idle_s)
    try:
        listener = socket.create_server((config.host, config.port))
    except OSError as error:
        fix = "give a free port with --port, and an address of this machine with --host"
        raise UserError("--port", "must be free", f"{config.port} ({error.strerror})", fix) from error
    with listener:
        print(f"http://{config.host}:{listener.getsockname()[1]}/{token}\nCtrl-C ends it.", flush=True)
        # A log of requests would contain the token.
        options = {"log_level": "warning", "access_log": False, "ws_max_size": config.max_message_mib * 2**20}
        uvicorn.Server(uvicorn.Config(served.app(), **options)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
