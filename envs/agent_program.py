"""An agent, a program with a loop of its own, as an environment: it is run once an episode and asks the model by HTTP.

Its entry names a command, or a Python function that gets the task, the URL of the model and a key::

    my_agent: {agent: python my_agent.py, dataset: my_data:MySamples, description: Read a diagram., max_turns: 8}

The task is one line of JSON: `id`, and `messages` in OpenAI's form. The result is the last line that the command
prints, or what the function returns; the entry's grader compares it with the sample's label. `agents.gateway` answers.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from envs.config.plugins import Plugin
from envs.contract import EnvFault, shown
from envs.env import Env, EnvArgs
from envs.errors import UserError
from envs.grading import get_grader
from envs.off_loop import awaited
from envs.safe_text import well_formed
from envs.spec import is_agent_function
from envs.types import Sample, openai_message

AGENT = Plugin("an agent", ("task", "base_url", "api_key"))
#: The most bytes of output that are kept: the last ones.
MAX_TAIL = 2**16
#: How often a program is looked at that has ended and whose children hold its output open.
LOOK_S = 1.0
_SCRIPTS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh", ".rb")


def agent_call(base_url: str, api_key: str) -> str:
    """Return the text for `AgentProgram.step` that runs the agent."""
    return json.dumps({"agent": {"base_url": base_url, "api_key": api_key}})


class AgentProgram(Env):
    """One episode of an agent. Only the text of `agent_call` runs it; a turn of the model changes nothing here.

    Example::

        env = AgentProgram(sample, spec.args())
        env.step(agent_call("http://127.0.0.1:4711/v1", "key"))     # ({}, True, {"result": "68"})
        env.reward("68")                                            # 1.0
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        self.sample = sample
        self.args = args
        self._agent = str(args.options["agent"])
        self._sandbox = str(args.options.get("sandbox", "none"))
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return nothing: the agent decides what the model reads."""
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Run the agent to its end; the info has its result."""
        if not response_text.startswith('{"agent": '):
            return {}, False, {}
        address = json.loads(response_text)["agent"]
        messages = [openai_message(message) for message in self.sample.prompt]
        task = {"id": self.sample.id, "messages": messages}
        if is_agent_function(self._agent):
            function = AGENT.load("agent", self._agent)
            result = awaited(function(task, address["base_url"], address["api_key"]))
            text = result if isinstance(result, str) else json.dumps(result, default=shown, skipkeys=True)
        else:
            text = self._run(json.dumps(task), address)
        return {}, True, {"result": well_formed(text)}

    def reward(self, final_text: str) -> float:
        """Return the reward of a result; 0 where nothing can be compared, because reward functions score the agent."""
        if self.args.grader == "none" or self.sample.label is None:
            return 0.0
        grader = get_grader(self.args.grader)
        answer = grader.extract(final_text) or final_text.strip()
        return self.args.reward(grader(answer, str(self.sample.label)))

    def close(self) -> None:
        """Kill the program with all that it has started."""
        with self._lock:
            self._is_closed = True
            process = self._process
            self._process = None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._sandbox != "none":  # the container outlives the program that started it
            with suppress(OSError, subprocess.TimeoutExpired):
                stop = [self._sandbox, "rm", "--force", _container(self)]
                subprocess.run(stop, capture_output=True, timeout=30, check=False)

    def _run(self, task: str, address: Mapping[str, str]) -> str:
        """Return the last line that the command prints. Raises `EnvFault` where it ends with another status than 0."""
        command = [*self._prefix(), *shlex.split(self._agent)]
        # A file, because a program need not read its input, and a pipe is soon full.
        with tempfile.TemporaryFile() as given:
            given.write(f"{task}\n".encode())
            given.seek(0)
            with self._lock:
                if self._is_closed:
                    raise EnvFault("the episode ended before its agent began")
                try:
                    process = self._process = subprocess.Popen(
                        command,
                        stdin=given,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        env=_variables(address),
                        start_new_session=True,
                    )
                except OSError as error:
                    raise EnvFault(f"the agent cannot be started: {error}") from error
        said, complained = _tails(process)
        self.close()
        if process.returncode:
            raise EnvFault(f"the agent ended with status {process.returncode}: {complained[-2000:].strip()}")
        return next((line for line in reversed(said.splitlines()) if line.strip()), "").strip()

    def _prefix(self) -> Sequence[str]:
        """Return what stands before the command: a container, or a limit of memory."""
        gib = float(self.args.options.get("memory_limit_gib") or 0)
        if self._sandbox != "none":
            here = str(Path.cwd())
            memory = [f"--memory={int(gib * 2**30)}"] * bool(gib)
            variables = [f"--env={name}" for name in _OURS]
            run = [self._sandbox, "run", "--rm", "--interactive", "--network=host", f"--name={_container(self)}"]
            run.append("--stop-signal=KILL")  # else its removal waits ten seconds for an agent that ignores SIGTERM
            image = str(self.args.options["image"])
            return [*run, f"--volume={here}:{here}", f"--workdir={here}", *memory, *variables, image]
        if gib:
            # By the shell: code of ours between fork and exec could stop at a lock of another thread. As for isolated
            # environments, what is only reserved does not count: JavaScript reserves more than there is.
            return ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"', str(int(gib * 2**20))]
        return []


def check_agent(field: str, options: Mapping[str, Any]) -> None:
    """Raise `UserError` where the agent of an entry cannot be run: a program, script or function is missing."""
    agent = str(options["agent"])
    if is_agent_function(agent):
        AGENT.load(field, agent)
        return
    sandbox = str(options.get("sandbox", "none"))
    words = shlex.split(agent)
    program = words[0] if sandbox == "none" else sandbox
    if shutil.which(program, path=_path()) is None:
        raise UserError(field, f"needs the program {program}", "none on the PATH", "install it, or write its path")
    scripts = [word for word in words if word.endswith(_SCRIPTS)]
    if sandbox == "none" and scripts and not Path(scripts[0]).is_file():
        fix = "run in the folder of the script, or write its whole path"
        raise UserError(field, "must name a script that exists", f"{scripts[0]} in {Path.cwd()}", fix)


#: The variables that an agent gets beside those of the run.
_OURS = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "NO_PROXY", "no_proxy")


def _variables(address: Mapping[str, str]) -> dict[str, str]:
    base_url = address["base_url"]
    # A proxy would look for this machine's address on its own.
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1")))
    return {
        **os.environ,
        "PATH": _path(),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": address["api_key"],
        # Clients of Anthropic add /v1 themselves.
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": address["api_key"],
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _path() -> str:
    """Return the PATH, with the folder of this Python first: `python` is then the one with the run's packages."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _container(env: AgentProgram) -> str:
    return f"trueturn-{os.getpid()}-{id(env)}"


def _tails(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Wait for the end of a program; return the last part of its output and of its errors."""
    pipes: list[IO[bytes]] = [pipe for pipe in (process.stdout, process.stderr) if pipe]
    tails = [b"", b""]
    with selectors.DefaultSelector() as selector:
        for number, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(LOOK_S)
            # Something that it started may hold its output open for ever.
            if not ready and process.poll() is not None:
                break
            for key, _ in ready:
                chunk = os.read(key.fd, MAX_TAIL)
                tails[key.data] = (tails[key.data] + chunk)[-MAX_TAIL:]
                if not chunk:
                    selector.unregister(key.fileobj)
    # Its output may have ended before it does.
    process.wait()
    for pipe in pipes:
        pipe.close()
    said, complained = (tail.decode(errors="replace") for tail in tails)
    return said, complained
