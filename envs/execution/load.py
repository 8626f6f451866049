"""Imports the code of a registry entry, here or in a worker process."""

from __future__ import annotations

import functools

from envs.agent_program import check_agent
from envs.env import Env, EnvArgs
from envs.execution.process_env import ProcessEnv, check_import, pool_of
from envs.grading import get_grader
from envs.spec import BuildEnv, EnvSpec
from envs.types import Sample


def load_env(spec: EnvSpec) -> BuildEnv:
    """Import an entry point and return its `build_env`; with `isolation: process`, both happen in a worker process.

    Example: `load_env(get_spec("geo3k"))(sample, spec.args())` builds the environment of one episode.

    Raises:
        UserError: the module cannot be imported (the message names module and cause), or has no such callable; or the
            entry's grader cannot be used.
    """
    if spec.parts:
        return _load_parts(spec)
    if spec.grader != "none":  # a grader that is missing ends the run here, not in the first reward
        get_grader(spec.grader)
    if spec.agent:
        check_agent(f"environment '{spec.id}' agent", spec.options)
    if spec.isolation != "process":
        return spec.load_here()
    with pool_of(spec).worker() as worker:
        check_import(worker, spec)
    return functools.partial(ProcessEnv, spec)


def _load_parts(spec: EnvSpec) -> BuildEnv:
    """Return a `build_env` that builds the environment which a sample of a mixture names, with its own arguments."""
    builders = {env_id: load_env(part) for env_id, part in spec.parts.items()}

    def build_env(sample: Sample, args: EnvArgs) -> Env:
        part = spec.part(sample.metadata)
        return builders[part.id](sample, part.args(min(args.max_turns, part.max_turns), args.tool_format))

    return build_env
