"""All commands under one name: `trueturn run ...` is `python -m trainer.run ...`. `trueturn` alone lists them.

Only the module of the command that runs is imported, so the list and a mistyped command answer at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from envs.config.cli import PROGRAM, exit_code
from envs.errors import UserError, did_you_mean

#: The module of each command, whose `run` runs it, and what it does.
COMMANDS = {
    "run": ("trainer.run", "Train a policy by reinforcement in an environment."),
    "sft": ("trainer.sft.__main__", "Fine-tune a model on conversations: it learns what the assistant says in them."),
    "evaluate": ("trainer.evaluate", "Measure how good a policy is in an environment."),
    "doctor": ("trainer.doctor", "Find what is wrong with a run before step 0. Takes the flags of trainer.run."),
    "export": ("trainer.export", "Write the model of a checkpoint."),
    "plan": ("trainer.plan", "Compute how fast a run is on any number of GPUs, and what limits it."),
    "memory": ("trainer.memory", "Compute how much GPU memory a training step takes."),
    "check": ("envs.check", "Check an environment without a model."),
    "check_engine": ("agents.check_engine", "Check an engine without a run."),
    "new": ("envs.new", "Start a new environment."),
    "list": ("envs.list", "List the environments of the registry."),
    "serve": ("envs.serve", "Serve an environment to OpenEnv's clients."),
    "play": ("agents.play", "Play an environment in the terminal."),
    "replay": ("agents.replay", "Replay recorded episodes through an environment."),
    "view": ("agents.view", "Show recorded runs in a browser."),
}


def listing() -> str:
    """Return what `trueturn` prints: every command with one line about it."""
    lines = [f"  {name:<14}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: trueturn COMMAND [FLAGS]", "", *lines, "", "`trueturn COMMAND --help` lists the command's flags."]
    )


def run(argv: Sequence[str]) -> int:
    """Run a command with its arguments; return its exit code."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name not in COMMANDS:
        raise UserError(name, "is no command of trueturn", name, did_you_mean(name, COMMANDS))
    sys.argv = [PROGRAM + name, *rest]
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it, so that an environment in this folder can be imported
        sys.path.insert(0, here)
    return importlib.import_module(COMMANDS[name][0]).run(None)


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
