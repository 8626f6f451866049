"""Settings of what a run begins from: environment, problems and model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from envs.config.settings import NO_FLAG, ONE_OR_MORE, Section
from envs.datasets.hub import check_is_there
from envs.datasets.rows import check_is_a_source
from envs.errors import UserError
from envs.grading import GraderReference
from envs.mixture import mix, read_shares
from envs.problems import RowsConfig
from envs.registry import get_mixture
from envs.spec import REWARD, EnvSpec
from envs.success import SUCCESS_DESCRIPTION, SuccessSetting
from envs.tool_calls.thinking import ThinkingSetting

#: How many of an environment's own problems are used if no number is given.
# More than a default run plays, so that no problem comes twice in it.
NUM_TRAIN = 1024
NUM_HELD_OUT = 256

#: How evaluations play an environment that has tools.
Tools = Annotated[
    Literal["both", "on", "off"],
    Field(
        description="how evaluations play. on: all turns with tools; off: one turn without tools; both: first one, "
        "then the other, or only on where the entry says tools: required"
    ),
]


class EnvConfig(Section):
    """Environment and limits of an episode. An empty setting takes the value of the registry entry."""

    env: Annotated[tuple[str, ...], ONE_OR_MORE] = Field(
        default=("geo3k",),
        min_length=1,
        description="environment id in the registry; several are mixed by shares: --env geo3k:0.7 --env guess:0.3",
    )
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    max_new_tokens: int = Field(
        default=256, ge=1, description="token budget of an episode after its prompt, tool output included"
    )
    max_turns: int | None = Field(default=None, ge=1, description="maximum number of model turns in an episode")
    reset_timeout_s: float | None = Field(
        json_schema_extra=NO_FLAG, default=None, gt=0, description="seconds to build and reset an environment"
    )
    step_timeout_s: float | None = Field(
        json_schema_extra=NO_FLAG, default=None, gt=0, description="seconds for one step, and for the reward"
    )
    isolation: Literal["inline", "thread", "process"] | None = Field(
        json_schema_extra=NO_FLAG, default=None, description="where environments run"
    )
    tool_format: Literal["auto", "hermes", "qwen_xml"] | None = Field(
        json_schema_extra=NO_FLAG,
        default=None,
        description="format of a tool call in the model's text; auto: the one of its chat template",
    )
    thinking: ThinkingSetting | None = Field(
        json_schema_extra=NO_FLAG,
        default=None,
        description="tags around the thoughts that environments do not get; auto: those of the model's chat template; "
        "keep: they get thoughts too",
    )
    grader: GraderReference | None = Field(default=None, description="how an answer is compared with the label")
    reward: tuple[Annotated[str, REWARD], ...] = Field(
        default=(),
        description="function of an episode whose value, times its weight, is a part of the reward: my.py:brevity@0.1; "
        "judge.yaml@0.5: a model that judges; answer@1: the environment's own reward; empty: that alone",
    )
    success: SuccessSetting = Field(default=None, description=SUCCESS_DESCRIPTION)
    reward_max_val: float | None = Field(
        json_schema_extra=NO_FLAG, default=None, allow_inf_nan=False, description="reward of a right answer"
    )
    reward_min_val: float | None = Field(
        json_schema_extra=NO_FLAG, default=None, allow_inf_nan=False, description="reward of a wrong answer"
    )

    @property
    def name(self) -> str:
        """The ids of the environments, in names of folders and in titles."""
        return "+".join(read_shares(self.env))

    def resolve(self) -> EnvSpec:
        """Return the registry entry with the settings given here replacing its own; of a mixture, in each part.

        Raises:
            UserError: there is no such entry, or a registry file is wrong.
        """
        spec = get_mixture(self.env, *self.registry)
        if spec.parts:
            return mix(spec.mixture, [self._with_settings(part) for part in spec.entries], spec.id, spec.description)
        return self._with_settings(spec)

    def _with_settings(self, spec: EnvSpec) -> EnvSpec:
        # Only what was given replaces the entry: None and () are "as the entry says".
        shared = EnvSpec.model_fields.keys() & EnvConfig.model_fields.keys()
        given = {name: value for name in shared if (value := getattr(self, name)) not in (None, ())}
        try:
            return EnvSpec.model_validate({**spec.model_dump(exclude_unset=True), "origin": spec.origin, **given})
        except ValidationError as error:
            # The first is the one that the user can act on; others often follow from it.
            rule = error.errors()[0]["msg"]
            raise UserError(f"environment '{spec.id}'", rule, given, "change the flag or the entry") from error


class PromptsConfig(RowsConfig):
    """Content and maximum length of prompts."""

    system_prompt: str = Field(default="", description="system prompt; empty: the environment's")
    # Cutting a prompt could cut the question, or an image, and train on what is left.
    max_prompt_tokens: int = Field(
        default=1024, ge=1, description="longest prompt; longer ones are left out and counted, never cut"
    )


class DataConfig(PromptsConfig):
    """Problems to train and evaluate on."""

    eval_data: str = Field(
        default="", description="held-out problems, as --data; empty: the environment's own, when --data is empty"
    )
    train_size: int | None = Field(
        default=None,
        ge=1,
        description="number of training problems to use, the first ones of --data; empty: all of them, or "
        f"{NUM_TRAIN} of the environment's own",
    )
    # Held out means never trained on: the environment draws them from another split.
    eval_size: int | None = Field(
        default=None,
        ge=0,
        description="number of held-out problems to evaluate before and after training, the first ones of --eval-data; "
        f"empty: all of them, or {NUM_HELD_OUT} of the environment's own; 0: no evaluation",
    )


class ModelConfig(Section):
    """Model, device and number format."""

    model: str = Field(
        default="starter", description="model folder or hub id; 'starter': the small model in the package"
    )
    device: str = Field(default="cpu", description="torch device of the learner and the embedded engine")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="number format of computation; the learner keeps its weights in float32"
    )
    # The engine reserves for it, so it is a setting and not the model's largest position.
    context_length: int = Field(default=4096, ge=2, description="longest stream in tokens, prompt included")
    template_options: str = Field(
        default="", description='variables of the chat template, a JSON object such as {"enable_thinking": false}'
    )

    def check_room(self, max_prompt_tokens: int) -> None:
        """Raise `UserError` if the longest prompt would leave no room for an answer."""
        # The engine would end each such episode before its first token.
        if max_prompt_tokens >= self.context_length:
            fix = f"give less than the --context-length of {self.context_length}"
            raise UserError("--max-prompt-tokens", "must leave room to answer", max_prompt_tokens, fix)


def check_sources(model: str, *data: str) -> None:
    """Raise `UserError` if the model or a data set is not there. It takes no time: torch is not imported."""
    if model != "starter":
        check_is_there(model)
    for source in filter(None, data):
        check_is_a_source(source)


def check_device(name: str) -> None:
    """Raise `UserError` if torch cannot use the device."""
    import torch

    try:
        device = torch.device(name)
        # The first GPU of the process is the one that libraries take by default.
        if device.index:
            fix = f"set CUDA_VISIBLE_DEVICES={device.index} and give cuda"
            raise UserError("--device", "must be the first GPU that the process sees", name, fix)
        # A device may be named well and still fail: no driver, or no memory left.
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        if torch.cuda.is_available():
            usable = "cpu or cuda"
        else:
            usable = "cpu: torch sees no GPU here"
        raise UserError("--device", "must be usable by torch", name, f"give {usable} ({reason})") from error
