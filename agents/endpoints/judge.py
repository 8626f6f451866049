"""A model of an OpenAI-compatible server judges episodes: `--reward judge.yaml@0.5` names the file of a `JudgeConfig`.

`load_rewards` loads judges and reward functions.

Only a verdict is a number: whatever else a judge gives is a fault, which drops the episode.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import Field, JsonValue, ValidationInfo, field_validator

from agents.endpoints.chat import Answer, EndpointFault
from agents.endpoints.client import EndpointClient
from agents.endpoints.settings import Endpoint, checked_endpoint
from agents.rollout.rewards import Judge, RewardSum, Verdict, WeightedReward
from agents.types import Trajectory
from envs.config.text_files import read_text
from envs.config.yaml_loader import load_yaml
from envs.contract import EnvFault
from envs.errors import UserError, first_line
from envs.execution.watchdog import WATCHDOG
from envs.off_loop import off_loop
from envs.spec import ENV_REWARD, REWARD
from envs.tool_calls.thinking import TAGS, Thinking
from envs.types import Message, bare_text, message_images, openai_message

FIELDS = ("question", "answer", "conversation", "label", "images")
#: A judge's number stands at the end of what it says; the regex reads so many characters, the recording holds them.
MAX_TEXT = 10_000
#: The longest that an author's regex may take, in seconds.
REGEX_S = 10.0
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


class JudgeConfig(Endpoint):
    """A judge: an endpoint, what it is asked, and how its number is read, from an answer in JSON or by a regex.

    `range` are its lowest and highest number, which become 0 and 1.

    Example: `JudgeConfig(url=..., model="large", template="{question} {answer} Score?", regex=r"(\\d+)", range=(0, 9))`
    """

    template: str
    regex: str = ""
    json_schema: dict[str, JsonValue] = Field(default={}, validate_default=True)
    range: tuple[float, float] = (0.0, 1.0)
    cache: Path | None = None

    @field_validator("template")
    @classmethod
    def _shows_the_answer(cls, template: str) -> str:
        named = set(_FIELD.findall(template))
        if unknown := named.difference(FIELDS):
            raise ValueError(f"has no field {{{min(unknown)}}}; fields are {', '.join(FIELDS)}")
        if not named & {"answer", "conversation"}:
            raise ValueError("must have the field {answer} or {conversation}")
        return template

    @field_validator("regex")
    @classmethod
    def _has_one_group(cls, regex: str) -> str:
        try:
            num_groups = re.compile(regex).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"must be a regex of Python ({error})") from None
        if regex and num_groups != 1:
            raise ValueError(f"must have one group, around the number; it has {num_groups}")
        return regex

    @field_validator("json_schema")
    @classmethod
    def _has_one_number(cls, schema: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        if bool(schema) == bool(info.data.get("regex")):
            raise ValueError("either this or regex must say where the number stands")
        if schema and len(_numbers(schema)) != 1:
            raise ValueError("must have exactly one property of the type number or integer")
        return schema

    @field_validator("range")
    @classmethod
    def _ascends(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if ends[0] >= ends[1]:
            raise ValueError("must be the lowest number, then a higher one")
        return ends

    def body(self, fields: Mapping[str, str], images: Sequence[Image.Image]) -> Message:
        """Return the request: the template with its fields, and the images where it names them."""
        # In one pass: a field's own text may hold the name of another one.
        texts = [
            _FIELD.sub(lambda field: fields.get(field[1], ""), part) for part in self.template.split("{images}", 1)
        ]
        content: Any = "".join(texts)
        if images and len(texts) == 2:
            before, after = ({"type": "text", "text": text} for text in texts)
            content = [before, *({"type": "image", "image": image} for image in images), after]
        body = {"messages": [openai_message({"role": "user", "content": content})], "temperature": 0.0}
        if self.json_schema:
            schema = {"name": "verdict", "schema": self.json_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def read(self, answer: Answer) -> float:
        """Return the number of an answer, mapped to 0..1.

        Raises:
            EndpointFault: it has none in the range, or was cut off.
        """
        text = _said(answer.text)
        low, high = self.range
        try:
            if self.json_schema:
                (key,) = _numbers(self.json_schema)
                found = json.loads(text[text.find("{") : text.rfind("}") + 1])[key]
            else:
                # A regex that backtracks for ever keeps the interpreter, which only the watchdog can end.
                with WATCHDOG.watch(f"the regex of the judge {self.model}", REGEX_S, is_isolated=False):
                    found = re.findall(self.regex, text[-MAX_TEXT:])[-1]
            number = math.nan if isinstance(found, bool) else float(found)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            number = math.nan
        if answer.finish != "stop" or not low <= number <= high:
            rule = f"it has no whole answer with a number from {low:g} to {high:g}"
            raise EndpointFault(f"{rule} ({answer.finish}): {text[-300:]!r}")
        return (number - low) / (high - low)


class ModelJudge(Judge):
    """Asks a model about episodes, `max_concurrent` at the same time.

    Example::

        judge = load_judge("--reward", Path("judge.yaml"))
        await judge.verdict(trajectory)       # Verdict(value=0.8, text="Clear, one slip. Score: 8")
    """

    def __init__(self, name: str, config: JudgeConfig) -> None:
        """Ask the judge about a made-up answer. Raises `UserError` or `EndpointFault` if that gives no number."""
        self.name = name
        self.config = config
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._client = EndpointClient(config, "hermes", config.cache)
        off_loop(asyncio.run, self._probe())

    async def verdict(self, trajectory: Trajectory) -> Verdict:
        """Return what the judge says of an episode; to be awaited on one event loop only.

        Raises:
            EnvFault: the judge gives no number.
        """
        # Requests with images are large, so those that wait are not written yet.
        async with self._slots:
            body = await asyncio.to_thread(self._body, trajectory)
            try:
                answer = await self._client.ask(body, seed=0, check=self.config.read)
                return Verdict(self.config.read(answer), answer.text[-MAX_TEXT:])
            except EndpointFault as fault:
                raise EnvFault(f"the reward function {self.name} gives no verdict: {fault}") from None

    def _body(self, trajectory: Trajectory) -> Message:
        said = trajectory.conversation
        messages = [_shown(message) for message in said if message["role"] != "system"]
        opening = [bare_text(message) for message in trajectory.opening if message["role"] != "system"]
        fields = {
            "question": "\n\n".join(opening),
            "answer": _said(trajectory.final_text),
            # As JSON, in which no text can pass for a message of somebody else.
            "conversation": json.dumps(messages, ensure_ascii=False, indent=1),
            "label": str(trajectory.label or ""),
        }
        return self.config.body(fields, message_images(said))

    async def _probe(self) -> None:
        few = self.config.model_copy(update={"max_retries": min(1, self.config.max_retries)})
        client = EndpointClient(few, "hermes")  # without the cache, which may know the answer of a dead judge
        fields = {"question": "What is 2 + 2?", "answer": "4", "conversation": '[{"assistant": "4"}]', "label": "4"}
        try:
            body = self.config.body(fields, [Image.new("RGB", (64, 64), "white")])
            await client.ask(body, seed=0, check=self.config.read)
        finally:
            await client.close()


def load_rewards(references: Sequence[str], field: str = "--reward") -> RewardSum:
    """Return the weighted sum of the functions and judges that settings name.

    Raises:
        UserError: one cannot be loaded or takes other parameters, or two have one name.
    """
    terms: list[WeightedReward] = []
    for reference in references:
        name, weight, found = REWARD.load_weighted(field, reference)
        if isinstance(found, Path):
            found = load_judge(field, found)
        if found and name == ENV_REWARD:
            raise UserError(field, "must not have the name of the environment's own reward", ENV_REWARD, "rename it")
        if name in (term.name for term in terms):
            raise UserError(field, "must name each reward once", name, "rename one, or add up their weights")
        terms.append(WeightedReward(name, weight, found))
    return RewardSum(tuple(terms))


def load_judge(field: str, path: Path) -> ModelJudge:
    """Return the judge of a file, the same one for all agent loops of this process. Paths in it are from its folder.

    Raises:
        UserError: the file is wrong, or the judge gives a made-up answer no number.
    """
    try:
        text = read_text(path, field)
    except (OSError, UnicodeDecodeError) as error:
        fix = f"give an existing YAML file ({first_line(error)})"
        raise UserError(field, "must be a readable file", str(path), fix) from error
    return _judge(f"{field} {path.name}", path, text)


@functools.cache
def _judge(place: str, path: Path, text: str) -> ModelJudge:
    given = load_yaml(text, place)
    if not isinstance(given, dict):
        fix = "write url: ..., model: ..., template: ... and so on"
        raise UserError(place, "must be the settings of a judge", type(given).__name__, fix)
    config = checked_endpoint(JudgeConfig, given, place)
    # A resumed run may start in another folder.
    paths = {name: path.parent / file for name in ("cache", "key_file") if (file := getattr(config, name))}
    try:
        return ModelJudge(path.stem, config.model_copy(update=paths))
    except UserError as error:
        raise UserError(f"{place}, {error.field.lstrip('-')}", error.rule, error.got, error.fix) from None
    except EndpointFault as fault:
        fix = "look at url, model, template and options"
        raise UserError(place, "must give a made-up answer its number", str(fault), fix) from None


def _numbers(schema: Mapping[str, Any]) -> list[str]:
    """Return the properties of an object's schema that are numbers."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return []
    kinds = {name: kind.get("type") for name, kind in properties.items() if isinstance(kind, dict)}
    return [name for name, kind in kinds.items() if kind in ("number", "integer")]


def _said(text: str) -> str:
    """Return a model's text without its thoughts."""
    for opening, closing in TAGS.values():
        text = Thinking(opening, closing).said(text)
    return text


def _shown(message: Mapping[str, Any]) -> dict[str, str]:
    text = bare_text(message)
    return {"role": str(message["role"]), "content": _said(text) if message["role"] == "assistant" else text}
