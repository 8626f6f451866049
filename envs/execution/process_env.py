"""Runs an environment in a worker process, behind the ordinary environment contract."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.contract import EnvFault, HostLost, checked_messages, plain, plain_dict, plain_fault
from envs.env import EditHistory, Env, EnvArgs
from envs.errors import UserError
from envs.spec import EnvSpec
from envs.tool_calls import ToolCall, find_tool_calls
from envs.turn_rewards import reward_of_text
from envs.types import Message, Sample
from envs.workers.process_info import children, num_files
from envs.workers.worker import AnyWorker, WorkerDied, WorkerError, WorkerLost, WorkerPool, WorkerTimeout
from envs.wrapper import unwrapped

CLOSE_LIMIT_S = 5.0
IMPORT_LIMIT_S = 120.0
MAX_MORE_FILES = 32

_POOL = WorkerPool()
#: By the resources that each worker asks of a Ray cluster.
_RAY_POOLS: dict[tuple[tuple[str, float], ...], WorkerPool] = {}


def pool_of(spec: EnvSpec) -> WorkerPool:
    """Return the workers of an entry: processes of this host or, with `workers: ray`, of any node of a cluster.

    Raises:
        UserError: Ray is not installed.
    """
    if spec.workers == "local":
        return _POOL
    if importlib.util.find_spec("ray") is None:
        field = f"environment '{spec.id}' workers"
        fix = "pip install 'trueturn[cluster]'"
        raise UserError(field, "needs the package ray", "ray", fix)
    from envs.workers.ray_worker import RayWorker

    resources = dict(spec.worker_resources)
    key = tuple(sorted(resources.items()))
    return _RAY_POOLS.setdefault(key, WorkerPool(make=functools.partial(RayWorker, resources)))


def check_import(worker: AnyWorker, spec: EnvSpec) -> None:
    """Import the entry point in a worker; raise the `UserError` that `load_env` would raise."""
    try:
        error = worker.call(_import_error, spec, sys.path, timeout_s=IMPORT_LIMIT_S)
    except (WorkerDied, WorkerTimeout, WorkerError) as fault:
        rule = f"'{spec.entry_point.partition(':')[0]}' must import"
        raise UserError(f"environment '{spec.id}' entry_point", rule, str(fault), "fix the module") from fault
    if error is not None:
        raise error


def _import_error(spec: EnvSpec, path: list[str]) -> UserError | None:
    _set_path(path)
    try:
        spec.load_here()
    except UserError as error:
        return UserError(error.field, error.rule, str(error.got), error.fix)
    return None


class ProcessEnv(Env):
    """Runs the environment of an entry in a worker. A clean close returns the worker to the pool; else it is killed.

    If the environment crashes, ends the process or exceeds its memory limit, the call raises `EnvFault`. If it hangs,
    `close` kills the process. What comes back is plain (`envs.contract.plain`): to unpickle an object of the author's
    would run the author's code in this process. The observation itself stays in the worker, which formats it.

    Example::

        env = ProcessEnv(get_spec("geo3k"), sample, EnvArgs(max_turns=3))
        env.reset(), env.tools, env.step("..."), env.reward("..."), env.close()
    """

    def __init__(self, spec: EnvSpec, sample: Sample, args: EnvArgs) -> None:
        """Take a worker; the first call builds the environment in it."""
        self._build = (spec, sample, args)
        self._pool = pool_of(spec)
        self._worker = self._pool.acquire()
        self._is_built = self._is_closed = self._runs_tools = self._edits_history = False
        self._observation: object = None  # the plain copy of the one that the worker keeps
        self._lock = threading.Lock()
        self._num_running = 0

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        """The tools' schemas."""
        return self._call("tools")

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Build the environment if needed, and reset it."""
        return self._observed(self._call("reset"))

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Step."""
        return self._observed(self._call("step", response_text))

    def _observed(self, value: Any) -> Any:
        if isinstance(value, tuple) and value:
            self._observation = value[0]
        else:
            self._observation = None
        return value

    def format_observation(self, observation: dict[str, Any]) -> Message | Sequence[Message]:
        """Format the observation."""
        is_kept = observation is self._observation
        return self._call("format_observation", *(() if is_kept else (observation,)))

    @property
    def edit_history(self) -> EditHistory | None:
        """The environment's own `edit_history`, if it has one; known once it is built."""
        if self._edits_history:
            return functools.partial(self._call, "edit_history")
        return None

    def reward(self, final_text: str) -> float:
        """Return the reward."""
        return self._call("reward", final_text)

    def called_tools(self, response_text: str) -> Sequence[str] | None:
        """Return the names of the tools that a text calls; this works while a call hangs and after a crash."""
        if not self._runs_tools:
            return None
        found = find_tool_calls(response_text, self._build[2].tool_format)
        return [call.name for call in found if isinstance(call, ToolCall)]

    def solution(self) -> Sequence[str]:
        """Return the texts that solve the episode."""
        return self._call("solution")

    def close(self) -> None:
        """Close the environment and return the worker; kill the worker if a call still runs or closing fails."""
        with self._lock:
            if self._is_closed:  # the worker may belong to another episode now
                return
            self._is_closed = True
            is_running = self._num_running > 0
        worker = self._worker
        try:
            if is_running:
                worker.kill()
            elif worker.is_alive and self._is_built and not worker.call(_close, timeout_s=CLOSE_LIMIT_S):
                worker.kill()  # the environment left something behind
        except Exception:
            worker.kill()
            raise
        finally:
            self._pool.release(worker)

    def _call(self, name: str, *args: object) -> Any:
        with self._lock:
            if self._is_closed:
                raise EnvFault(f"the environment was closed before the call of {name}")
            self._num_running += 1
        try:
            if not self._is_built:
                self._runs_tools, self._edits_history = self._worker.call(_build, *self._build, sys.path)
                self._is_built = True
            value = self._worker.call(_use, name, args)
        except WorkerError as error:
            raise EnvFault(f"the environment raised: {error}") from error
        except WorkerLost as error:
            raise HostLost(f"the environment's host is gone: {error}") from error
        except WorkerDied as error:
            raise EnvFault(f"the environment's process ended: {error}", process_ended=True) from error
        finally:
            with self._lock:
                self._num_running -= 1
        if isinstance(value, EnvFault):
            raise value
        return value


# In the worker --------------------------------------------------------------------------------------------------------

_env: Env | None = None
_observation: Any = None
_state_before: tuple[object, ...] = ()
_files_at_start = 0


def _build(spec: EnvSpec, sample: Sample, args: EnvArgs, path: list[str]) -> tuple[bool, bool]:
    """Build the environment; return whether its steps are made of tool calls, as those of a `ToolEnv`, and whether it
    has an `edit_history`.
    """
    global _env, _state_before, _files_at_start
    _set_path(path)
    _files_at_start = _files_at_start or num_files()
    limit_memory(spec.memory_limit_gib)
    build = spec.load_here()
    _state_before = _process_state()
    _env = build(sample, args)
    inner = unwrapped(_env)
    runs_tools = isinstance(inner, Env) and type(inner).called_tools is not Env.called_tools
    return runs_tools, callable(getattr(_env, "edit_history", None))


def _process_state() -> tuple[object, ...]:
    """Return the process state that an episode could leave changed for the next one."""
    alarms = tuple(signal.getitimer(kind)[0] > 0 for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL))
    return Path.cwd(), dict(os.environ), threading.active_count(), alarms, children()


def _use(name: str, args: Sequence[object]) -> Any:
    global _observation
    if name == "format_observation" and not args:
        args = (_observation,)
    try:
        if name == "reward":
            return reward_of_text(_env, str(args[0]))
        attribute = getattr(_env, name)
        if callable(attribute):
            value = attribute(*args)
        else:
            value = attribute
        if name == "format_observation":  # a header of an image may claim more pixels than memory can hold
            return checked_messages(value)
    except EnvFault as fault:  # as a value, because an exception arrives as text only
        return plain_fault(fault)
    if not isinstance(value, tuple) or name == "edit_history":
        return plain(value)
    _observation = value[0] if value else None
    return tuple(plain_dict(part) if isinstance(part, dict) else plain(part) for part in value)


def _close() -> bool:
    """Close the environment; return whether the process state is the same as before the build.

    A few more open files are no reason to end the worker: a module may keep a connection or a log.
    """
    global _env, _observation
    env = _env
    _env = None
    _observation = None
    if env is not None:
        env.close()
    return _process_state() == _state_before and num_files() <= _files_at_start + MAX_MORE_FILES


def _set_path(path: list[str]) -> None:
    if sys.path != path:  # the program may have changed its path since the worker started
        sys.path[:] = path
        importlib.invalidate_caches()


def limit_memory(gib: float) -> None:
    """Limit the memory for data segments and anonymous mappings; larger allocations fail."""
    with contextlib.suppress(ImportError, AttributeError):  # Windows has no such limits
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30) if gib else hard, hard))
