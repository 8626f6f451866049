"""`EnvSpec`, one validated registry entry that imports its code on demand, and `EnvLimits`, its time limits."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from envs.config.plugins import WeightedPlugin, check_parameters, import_cause, import_object, is_reference
from envs.contract import MAX_REWARD
from envs.env import CallPolicy, Env, EnvArgs, ToolFaultPolicy
from envs.errors import CODE_FAULTS, UserError
from envs.grading import GraderReference
from envs.history import History
from envs.success import ENVIRONMENT, NONE, SUCCESS_DESCRIPTION, MixedSuccess, Success, SuccessSetting
from envs.tool_calls import ToolFormat
from envs.tool_calls.thinking import ThinkingSetting
from envs.types import Sample, SampleSource

#: The environment's own reward among reward functions, in settings and recordings.
ENV_REWARD = "answer"
REWARD = WeightedPlugin("a reward function", ("trajectory",), names=(ENV_REWARD,))

REFERENCE_FIX = "write module:ATTRIBUTE, such as my_env:build_env"

#: What may be the reward of an episode.
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]

#: The share of a step's time for its async tools; the rest is for their answers.
TOOLS_TIME_FRAC = 0.9

_REFERENCE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_ENTRY_POINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?$"


#: Keys that name an environment of another framework, and what its entry then has.
BRIDGES: Mapping[str, Mapping[str, str]] = {
    "gymnasium": {
        "entry_point": "envs.from_gymnasium:FromGymnasium",
        "dataset": "envs.from_gymnasium:GymnasiumSamples",
        "tools": "required",
    },
    "openenv": {
        "entry_point": "envs.from_openenv:FromOpenEnv",
        "dataset": "envs.from_openenv:OpenEnvSamples",
        "tools": "required",
        "on_tool_fault": "drop",  # a server that is gone is no action of the model
    },
    "verifiers": {
        "entry_point": "envs.from_verifiers:FromVerifiers",
        "dataset": "envs.from_verifiers:VerifiersSamples",
        "grader": "none",
        "on_tool_fault": "drop",  # nor is a rubric that hangs
    },
}

#: The entry point of an agent's entry, and the keys that such an entry may have beside those of all.
AGENT = "envs.agent_program:AgentProgram"
AGENT_KEYS = ("agent", "sandbox")
SANDBOXES = ("none", "docker", "podman")

#: Those of `BRIDGES`, and "mcp", that ask servers.
_ASK_SERVERS = ("mcp", "openenv")


def _check_isolation(key: str, entry: Mapping[str, Any]) -> None:
    """Raise ValueError where an entry's time limits could not hold."""
    if key in _ASK_SERVERS and entry.get("isolation") == "inline":
        raise ValueError(f"{key} needs isolation: thread or process, because servers may hang, got inline")


def is_agent_function(agent: str) -> bool:
    """Return whether an agent is a Python function, named as module:NAME or file.py:NAME; others are commands."""
    return is_reference(agent) and not any(map(str.isspace, agent))


#: The methods that an episode calls.
_METHODS = ("reset", "step", "format_observation", "close")


class BuildEnv(Protocol):
    """The entry point of an environment: it builds the environment of one episode."""

    def __call__(self, sample: Sample, args: EnvArgs) -> Env: ...


class MakeSamples(Protocol):
    """The built-in data set of an environment; the same arguments give the same samples."""

    def __call__(self, split: str, size: int, seed: int, **options: Any) -> SampleSource: ...


class EnvSpec(BaseModel):
    """One environment of the registry.

    Example::

        spec = get_spec("geo3k")
        samples = spec.load_dataset("train", size=64, seed=0)
        env = load_env(spec)(samples[0], spec.args())
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(min_length=1)
    entry_point: str = Field(pattern=_ENTRY_POINT, description="module:ATTRIBUTE, called with (sample, args)")
    version: str = Field(
        default="1", min_length=1, description="change it when episodes would differ; recordings keep it"
    )
    description: str = Field(
        description="one line for the list of environments, and for the prompt of a Gymnasium environment"
    )
    max_turns: int = Field(ge=1, description="model turns an episode may take")
    history: History | None = Field(
        default=None,
        description="what the model goes on seeing, {keep_images: 4, keep_turns: 12}: the last images and the last "
        "turns, both optional; empty: everything",
    )
    dataset: str | None = Field(
        default=None, pattern=_REFERENCE, description="module:ATTRIBUTE of the built-in data set"
    )
    dataset_options: Mapping[str, Any] = Field(default={}, description="keywords for the built-in data set")
    system_prompt: str | None = Field(default=None, pattern=_REFERENCE, description="module:ATTRIBUTE of a string")
    options: Mapping[str, Any] = Field(default={}, description="build_env gets them as args.options")
    grader: GraderReference | Literal["none"] = Field(
        default="math",
        description="how an answer is compared with the label, see envs.grading, or module:NAME of a function; "
        "none: the label is no answer",
    )
    reward: tuple[Annotated[str, REWARD], ...] = Field(
        default=(),
        strict=False,
        description="functions whose weighted sum is the reward: module:NAME@WEIGHT, judge.yaml@WEIGHT for a model "
        "that judges, and answer@WEIGHT for the environment's own; empty: the environment's own alone",
    )
    reward_max_val: Reward = Field(default=1.0, strict=False, description="reward of a right answer")
    reward_min_val: Reward = Field(default=0.0, strict=False, description="reward of a wrong answer")
    success: SuccessSetting = Field(default=None, description=SUCCESS_DESCRIPTION)
    tools: Literal["optional", "required"] = Field(
        default="optional",
        description="required: nothing can be done without tools, so evaluations play with them only "
        "(of a Gymnasium environment: required)",
    )
    tool_format: ToolFormat | Literal["auto"] = Field(
        default="auto", description="how a model writes a call; auto: as its chat template says"
    )
    thinking: ThinkingSetting = Field(
        default="auto",
        description="tags around the thoughts that environments do not get; auto: those of the model's chat template; "
        "keep: they get thoughts too",
    )
    tool_calls: CallPolicy = Field(default="sequential", description="which calls of one turn run, and how")
    on_tool_fault: ToolFaultPolicy = Field(
        default="observe",
        description="what becomes of an episode whose tool fails at the model's call. observe: the model reads the "
        "error; drop: no training on it; reward_min: it ends with reward_min_val",
    )
    isolation: Literal["inline", "thread", "process"] = Field(
        default="thread",
        description="where the environment runs: inline on the event loop (it must be fast and never block), on a "
        "thread, or in its own process, which may crash, hang in native code or be killed",
    )
    workers: Literal["local", "ray"] = Field(
        default="local",
        description="hosts of isolated processes: this one, or any node of a Ray cluster, for heavy tools",
    )
    worker_resources: Mapping[str, float] = Field(
        default={},
        strict=False,
        description="what a process on a cluster asks of its node: num_cpus (1), num_gpus, memory in bytes, or "
        "resources of your own",
    )
    memory_limit_gib: float = Field(
        default=0.0, ge=0, strict=False, description="memory an isolated process may take; 0: no limit (Linux)"
    )
    reset_timeout_s: float = Field(default=60.0, gt=0, strict=False, description="time to build and reset")
    step_timeout_s: float = Field(default=30.0, gt=0, strict=False, description="time for a step, and for the reward")
    retries: int = Field(default=0, ge=0, description="how often to repeat building and resetting after a fault")
    retry_backoff_s: float = Field(
        default=1.0, ge=0, strict=False, description="wait before a retry, doubled each time"
    )
    compat: Literal["slime"] | None = Field(
        default=None, description="the other framework whose contract the code follows"
    )
    mixture: Mapping[str, float] = Field(default={}, description="shares of other environments, in place of code")
    parts: Mapping[str, EnvSpec] = Field(default={}, description="the entries of a mixture, by id")
    origin: str = Field(default="", exclude=True, description="the file that holds the entry")

    @model_validator(mode="before")
    @classmethod
    def _expand_bridge(cls, entry: Any) -> Any:
        """Expand `gymnasium: ID`, or another key of `BRIDGES`, the one-line entry of such an environment."""
        if not isinstance(entry, dict) or not (named_bridges := sorted(BRIDGES.keys() & entry.keys())):
            return entry
        entry = dict(entry)
        key = named_bridges[0]
        if others := {"entry_point", "dataset", "dataset_options", *named_bridges[1:]} & entry.keys():
            named = ", ".join(sorted(others))
            raise ValueError(f"{key} must stand in place of entry_point and dataset, got {named} too")
        _check_isolation(key, entry)
        usual = dict(BRIDGES[key])
        if "reward_max_val" not in entry:  # the sum of its rewards has no best value that is known
            usual["success"] = NONE
        entry = {**usual, **entry}
        env_id = entry.pop(key)
        options = entry.get("options", {})
        if isinstance(options, Mapping):  # else the check of the field says so
            entry["options"] = {**options, "id": env_id}
            entry["dataset_options"] = {"description": entry.get("description", ""), **entry["options"]}
        return entry

    @model_validator(mode="before")
    @classmethod
    def _expand_mcp(cls, entry: Any) -> Any:
        """Expand `mcp: [SERVER, ...]`, the one-line entry of an environment whose tools are those of MCP servers."""
        if not isinstance(entry, dict) or "mcp" not in entry:
            return entry
        entry = dict(entry)
        servers = entry.pop("mcp")
        if not (isinstance(servers, list) and servers and all(isinstance(server, str) for server in servers)):
            raise ValueError(f"mcp must be a list of commands and URLs, got {servers!r}")
        _check_isolation("mcp", entry)
        options = entry.get("options", {})
        # A class of the user's own may take more.
        if "entry_point" not in entry and options not in ({}, {"shared": True}, {"shared": False}):
            raise ValueError(f"options of mcp must be shared: true or false, got {options}")
        entry.setdefault("entry_point", "envs.from_mcp:FromMcp")
        if isinstance(options, Mapping):  # else the check of the field says so
            entry["options"] = {**options, "servers": servers}
        return entry

    @model_validator(mode="before")
    @classmethod
    def _expand_agent(cls, entry: Any) -> Any:
        """Expand `agent: COMMAND`, or a function's name, the one-line entry of a program with a loop of its own."""
        if not isinstance(entry, dict) or not set(AGENT_KEYS) & entry.keys():
            return entry
        entry = {"step_timeout_s": 600.0, **entry}
        agent = entry.pop("agent", None)
        sandbox = entry.pop("sandbox", "none")
        options = entry.get("options", {})
        if not isinstance(agent, str) or not agent.strip():
            raise ValueError(f"agent must be a command or module:NAME, got {agent!r}")
        if others := {"entry_point", "history", "mcp", *BRIDGES} & entry.keys():
            raise ValueError(f"agent must stand in place of {others.pop()}, got both")
        if entry.get("isolation") == "inline" or entry.get("workers") == "ray":
            raise ValueError("agent needs isolation: thread or process, on this host, got another")
        if sandbox not in SANDBOXES:
            raise ValueError(f"sandbox must be one of {', '.join(SANDBOXES)}, got {sandbox!r}")
        if sandbox != "none" and (is_agent_function(agent) or "image" not in options):
            raise ValueError(f"sandbox: {sandbox} needs a command and options: {{image: NAME}}, got {agent!r}")
        entry["entry_point"] = AGENT
        own = {"agent": agent, "sandbox": sandbox, "memory_limit_gib": entry.get("memory_limit_gib", 0)}
        if isinstance(options, Mapping):  # else the check of the field says so
            entry["options"] = {**options, **own}
        return entry

    @model_validator(mode="after")
    def _check_limits(self) -> EnvSpec:
        limits_command = self.agent and not is_agent_function(self.agent)
        if self.memory_limit_gib and self.isolation != "process" and not limits_command:
            raise ValueError(f"memory_limit_gib needs isolation: process, got {self.isolation}")
        if self.workers == "ray" and self.isolation != "process":
            raise ValueError(f"workers: ray needs isolation: process, got {self.isolation}")
        if self.worker_resources and self.workers != "ray":
            raise ValueError(f"worker_resources needs workers: ray, got {self.workers}")
        if self.reward_max_val <= self.reward_min_val:
            both = f"{self.reward_max_val:g} and {self.reward_min_val:g}"
            raise ValueError(f"reward_max_val must be over reward_min_val, got {both}")
        return self

    @property
    def agent(self) -> str:
        """The command or the function of an agent, which plays in place of an environment; empty for any other."""
        if self.entry_point == AGENT:
            return str(self.options["agent"])
        return ""

    @property
    def entries(self) -> tuple[EnvSpec, ...]:
        """The entries of the environments that are played: this one, or the parts of a mixture."""
        return tuple(self.parts.values()) or (self,)

    def part(self, metadata: Mapping[str, Any]) -> EnvSpec:
        """Return the entry of a sample's environment, which a mixture reads from the sample's metadata."""
        if self.parts:
            return self.parts[metadata[ENVIRONMENT]]
        return self

    @property
    def success_rule(self) -> Success | None:
        """What makes an episode a success; None where the entry says that there is no such thing."""
        if self.parts:
            rules = {env_id: part.success_rule for env_id, part in self.parts.items()}
            return MixedSuccess(rules=rules) if any(rules.values()) else None
        if self.success == NONE:
            return None
        if isinstance(self.success, str):
            return Success(key=self.success)
        return Success(self.reward_max_val if self.success is None else self.success)

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """The least and the greatest own reward that the entry declares; infinite where it declares none.

        An entry that says what a success is otherwise declares only the bounds that it names.
        """
        low = self.reward_min_val
        high = self.reward_max_val
        # A game counts its points: the default 0 and 1 are then nobody's declaration.
        if self.success is not None and "reward_min_val" not in self.model_fields_set:
            low = -math.inf
        if self.success is not None and "reward_max_val" not in self.model_fields_set:
            high = math.inf
        return low, high

    @property
    def total_bounds(self) -> tuple[float, float]:
        """As `reward_bounds`, of what an episode gets: reward functions have no bounds."""
        if self.parts:
            bounds = [part.total_bounds for part in self.parts.values()]
            return min(low for low, _ in bounds), max(high for _, high in bounds)
        if self.reward:
            return -math.inf, math.inf
        return self.reward_bounds

    def args(self, max_turns: int | None = None, tool_format: ToolFormat = "hermes") -> EnvArgs:
        """Return the arguments of `build_env`: the entry's settings, with the tool format of the current model."""
        return EnvArgs(
            max_turns=max_turns or self.max_turns,
            tool_format=tool_format if self.tool_format == "auto" else self.tool_format,
            tool_calls=self.tool_calls,
            grader=self.grader,
            reward_max_val=self.reward_max_val,
            reward_min_val=self.reward_min_val,
            success_key=self.success_rule.key if self.success_rule else "",
            on_tool_fault=self.on_tool_fault,
            # Inline calls have no time limit, so neither have their tools.
            tools_timeout_s=None if self.isolation == "inline" else TOOLS_TIME_FRAC * self.step_timeout_s,
            options=self.options,
        )

    def check_tool_faults(self, runs_tools: bool) -> None:
        """Raise `UserError` if the entry itself asks for `observe`, and the environment's step is no `ToolEnv`'s."""
        if not runs_tools and self.on_tool_fault == "observe" and "on_tool_fault" in self.model_fields_set:
            rule = "needs a ToolEnv, because no other step can go on after a fault"
            fix = "write reward_min or drop"
            raise UserError(f"environment '{self.id}' on_tool_fault", rule, "observe", fix)

    def check_has_no_loop(self, field: str) -> None:
        """Raise `UserError` for an agent: it has a loop of its own, so nobody else can play it turn by turn."""
        for entry in self.entries:
            if entry.agent:
                rule = "must be an environment, which is played turn by turn"
                fix = "train or evaluate the agent with a model of this program"
                raise UserError(field, rule, f"'{entry.id}', the agent {entry.agent}", fix)

    def source_digest(self) -> str:
        """Return a hash of the entry point's code without running it; empty if the code cannot be found.

        It covers the module, or all Python files of its folder if the module lies in a sub-package.
        """
        if self.parts:
            return "+".join(part.source_digest() for part in self.parts.values())
        if self.agent and not is_agent_function(self.agent):
            files = [path for word in shlex.split(self.agent) if (path := Path(word)).is_file()]
            return _digest(files)
        module = (self.agent or self.entry_point).partition(":")[0]
        if module.endswith(".py"):
            return _digest([Path(module)])
        try:
            found = importlib.util.find_spec(module)  # imports the parent packages
        except Exception:  # which may raise anything
            return ""
        if found is None or found.origin is None:
            return ""
        origin = Path(found.origin)
        is_package = found.submodule_search_locations is not None or module.count(".") > 1
        files = sorted(origin.parent.rglob("*.py")) if is_package else [origin]
        return _digest(files)

    def load_here(self) -> BuildEnv:
        """Import the entry point into this process and return its `build_env`; `envs.execution.load` isolates it.

        Raises:
            UserError: the module cannot be imported (the message names module and cause), or has no such callable, or
                it takes other parameters.
        """
        reference = self.entry_point if ":" in self.entry_point else f"{self.entry_point}:build_env"
        if self.compat == "slime":
            from envs.slime import adapt, install_stand_ins

            # Before the import, which fails without them.
            install_stand_ins()
            return adapt(self._resolve_callable("entry_point", reference))
        found = self._resolve_callable("entry_point", reference)
        self._check_class(reference, found)
        check_parameters(f"environment '{self.id}' entry_point", reference, found, ("sample", "args"))
        return found

    def _check_class(self, reference: str, found: Any) -> None:
        """Raise `UserError` if an entry point is a class that is no environment.

        A class with `__getattr__`, such as a wrapper, may have methods that only its objects show.
        """
        field = f"environment '{self.id}' entry_point"
        missing = [name for name in _METHODS if not hasattr(found, name)]
        if isinstance(found, type) and missing and not hasattr(found, "__getattr__"):
            rule = f"'{reference}' must be an environment with {', '.join(_METHODS)}"
            fix = "derive the class from envs.Env or envs.ToolEnv, or add `compat: slime` if it was written for slime"
            raise UserError(field, rule, f"a class without {', '.join(missing)}", fix)

    def load_dataset(self, split: str, size: int, seed: int) -> SampleSource:
        """Return `size` samples of the built-in data set.

        Raises:
            UserError: the entry names no data set, or the data set cannot be imported, raises or returns no samples.
        """
        if self.dataset is None:
            fix = "name a data set with --data, or add `dataset` to the entry"
            raise UserError(f"environment '{self.id}'", "must have a built-in data set to run without one", "none", fix)
        make_samples: MakeSamples = self._resolve_callable("dataset", self.dataset)
        field = f"environment '{self.id}' dataset"
        options = "".join(f", {name}={value!r}" for name, value in self.dataset_options.items())
        call = f"{self.dataset.partition(':')[2]}(split={split!r}, size={size}, seed={seed}{options})"
        rule = f"{call} must return samples"
        try:
            samples = make_samples(split=split, size=size, seed=seed, **self.dataset_options)
        except UserError:
            raise
        except CODE_FAULTS as error:  # of the environment's author
            raise UserError(field, rule, import_cause(error), "fix the data set") from error
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            fix = "return a list of samples, or anything else with a length and an index"
            raise UserError(field, rule, type(samples).__name__, fix)
        return samples

    def load_system_prompt(self) -> str | None:
        """Return the text of the system prompt, or None if the entry names none."""
        if self.system_prompt is None:
            return None
        text = self._resolve("system_prompt", self.system_prompt)
        if not isinstance(text, str):
            field = f"environment '{self.id}' system_prompt"
            raise UserError(field, f"'{self.system_prompt}' must be a string", type(text).__name__, "name a string")
        return text

    def _resolve_callable(self, field: str, reference: str) -> Any:
        found = self._resolve(field, reference)
        if not callable(found):
            rule = f"'{reference}' must be callable"
            raise UserError(f"environment '{self.id}' {field}", rule, type(found).__name__, "name a function or class")
        return found

    def _resolve(self, field: str, reference: str) -> object:
        return import_object(f"environment '{self.id}' {field}", reference)


def _digest(files: Sequence[Path]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    try:
        for file in files:
            hashed.update(file.name.encode() + b"\0" + file.read_bytes())
    except OSError:  # a module without a file, such as a built-in one
        return ""
    return hashed.hexdigest()


@dataclass(frozen=True)
class EnvLimits:
    """The limits of one environment, in seconds, and what a fault in a step is worth.

    `reset_timeout_s` bounds building and resetting together. `step_timeout_s` bounds a step with the formatting of its
    observation, the reward, and closing. After a fault, building and resetting are repeated up to `retries` times,
    after `retry_backoff_s`, then twice that, and so on. `inline` runs calls on the event loop, without time limits.
    An episode that ends with a `ToolFault` gets `reward_min_val`.
    """

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    retries: int = 0
    retry_backoff_s: float = 1.0
    inline: bool = False
    on_tool_fault: ToolFaultPolicy = "observe"
    reward_min_val: float = 0.0

    @classmethod
    def of(cls, spec: EnvSpec) -> EnvLimits:
        """Return the limits of a registry entry."""
        return cls(
            reset_timeout_s=spec.reset_timeout_s,
            step_timeout_s=spec.step_timeout_s,
            retries=spec.retries,
            retry_backoff_s=spec.retry_backoff_s,
            inline=spec.isolation == "inline",
            on_tool_fault=spec.on_tool_fault,
            reward_min_val=spec.reward_min_val,
        )
