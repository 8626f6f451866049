"""Check an engine: `python -m agents.check_engine my_engine.py:make_engine`.

It writes turns and compares them with the network. Each check is a row with what was seen or, where the engine breaks a
promise of `agents.engines.base`, with the fix.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from rich.text import Text

from agents.engines.own import ENGINE, find_engine
from envs.checks import print_findings
from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.console import Console
from envs.errors import UserError, did_you_mean


class CheckEngineConfig(Section):
    """The options of `python -m agents.check_engine`."""

    engine: Literal["hf"] | Annotated[str, ENGINE] = Field(
        description="module:NAME or file.py:NAME of a function that makes the engine; or hf: our own"
    )
    model: str = Field(
        default="starter", description="model folder or hub id; 'starter': the small model in the package"
    )
    device: str = Field(default="cpu", description="torch device of the engine, and of the network it is compared with")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of computation")
    context_length: int = Field(default=4096, ge=1024, description="longest stream in tokens, prompt included")
    max_batch: int = Field(default=8, ge=1, description="sessions that the engine must run at once")
    only: tuple[str, ...] = Field(default=(), description='name of a check to run, such as "log-probs"; empty: all')
    check_timeout_s: float = Field(
        default=60, gt=0, description="seconds for one check; the first one to need more is the last"
    )
    max_seconds: float = Field(default=600, gt=0, description="seconds for all checks")


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, check, report."""
    config = parse(CheckEngineConfig, argv, "python -m agents.check_engine", "Check an engine without a run.")
    # Imported late, so that --help and a mistyped flag answer at once.
    from agents.checking.checker import CHECKS, check_engine, setup_of

    if unknown := [name for name in config.only if name not in CHECKS]:
        raise UserError("--only", "must be a check", unknown[0], did_you_mean(unknown[0], CHECKS))
    make = find_engine(config.engine, "ENGINE")
    console = Console()
    # The logs of an engine's processes go there; its checks need none of them afterwards.
    with tempfile.TemporaryDirectory(prefix="engine-") as folder, console.status("") as status:
        setup = setup_of(
            config.model, Path(folder), config.dtype, config.device, config.context_length, config.max_batch
        )
        findings = check_engine(
            make,
            setup,
            config.check_timeout_s,
            config.max_seconds,
            config.only,
            on_check=lambda name: status.update(Text(f"{config.engine}: {name}")),
        )
    code = print_findings(
        # The name of the file says enough; its folder would fill the line.
        config.engine.rpartition("/")[2],
        f"on {config.model}, {config.dtype}, {config.device}",
        findings,
        console,
    )
    if any("did not end" in finding.detail for finding in findings):  # a thread of the engine may never end
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(exit_code(run))
