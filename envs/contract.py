"""The environment contract for callers: `EpisodeEnv` (the methods that an episode needs), `EnvFault` and `ToolFault`
(what went wrong in one), the checks of what an environment shows, and plain copies of what it returns.

Whoever keeps, compares, prints or records such a copy later runs no code of the environment: no `__repr__` that never
returns, no mapping without an end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from envs.errors import quoted
from envs.images import load_image
from envs.safe_text import well_formed
from envs.types import Message

MAX_IMAGE_PIXELS = 16_000_000
#: The largest number of float32, in which advantages are learnt from.
MAX_REWARD = (2 - 2**-23) * 2.0**127
#: The outcome of a tool call that raised, hung or ended the process.
TOOL_FAULT = "tool_fault"

#: Bounds of a plain copy.
MAX_DEPTH = 32
MAX_CHARS = 10_000
#: Of a whole number that JSON readers hold exactly.
MAX_BITS = 63
#: The most values in one entry of an info, a message or the schemas of tools.
MAX_VALUES = 200_000
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
#: Packages whose objects are copied as they are, because their methods end.
_KNOWN = ("PIL", "datetime", "zoneinfo", "decimal", "fractions", "pathlib", "uuid")
_ARRAYS = ("numpy", "torch")


class EpisodeEnv(Protocol):
    """The methods of an environment that an episode calls."""

    @property
    def tools(self) -> Any: ...
    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]: ...
    def format_observation(self, observation: dict[str, Any]) -> Message | Sequence[Message]: ...
    def reward(self, final_text: str) -> float | None: ...
    def close(self) -> None: ...


class EnvFault(Exception):
    """The environment raised, hung or returned a value that breaks the contract; the message says which."""

    def __init__(self, detail: str, timed_out: bool = False, process_ended: bool = False) -> None:
        super().__init__(detail)
        self.timed_out = timed_out
        self.process_ended = process_ended


class HostLost(EnvFault):
    """The host of an environment is gone. No action of the model causes that, so it never counts against the model."""


class ToolFault(EnvFault):
    """A fault that the model's own action caused: the episode counts, with the lowest reward.

    `info` is the step's info; the outcome of the call in its `tool_calls` is `TOOL_FAULT`.
    """

    def __init__(self, detail: str, info: Mapping[str, Any] | None = None, timed_out: bool = False) -> None:
        super().__init__(detail, timed_out)
        self.info = info or {}


def checked_messages(
    value: object, known: Sequence[Any] = (), method: str = "format_observation"
) -> tuple[Message, ...]:
    """Validate messages, or a single one, and return them with decoded images.

    The number of one of the `known` images stands for it. `method` returned the value.
    """
    return tuple(_message(each, known, method) for each in (value if isinstance(value, (list, tuple)) else [value]))


def checked_opening(value: object) -> tuple[Message, ...]:
    """Validate the first observation's messages, which are a part of the prompt: they may show turns of an example."""
    messages = checked_messages(value)
    if messages and messages[-1]["role"] == "assistant":
        raise EnvFault('the first observation must not end with the role "assistant": the model has to write next')
    return messages


def checked_answer(value: object) -> tuple[Message, ...]:
    """Validate the messages that answer a turn: none may pass for a turn of the model."""
    messages = checked_messages(value)
    if any(message["role"] == "assistant" for message in messages):
        fix = 'give the message the role "tool" or "user"'
        raise EnvFault(f'an observation must not have the role "assistant", in which only the model writes; {fix}')
    return messages


def checked_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Validate the tools of an environment: schemas in a list, none for None."""
    tools = () if value is None else value
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise EnvFault(f"tools must be a list of schemas, each a dict, got {value!r:.200}")
    return tuple(map(plain, tools))


def checked_number(value: object, rule: str) -> float:
    """Validate a reward and return it: of a narrow float its shortest form, 0.9 where float() gives 0.8999999761581421.

    `rule` begins the message of the fault: "reward must be".
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        # Such as a tensor or a Decimal, whose author means a number.
        if hasattr(value, "__float__"):
            fix = "; write float(...)"
        else:
            fix = ""
        fix = "; does it return?" if value is None else fix
        raise EnvFault(f"{rule} a finite number, got {quoted(value)}{fix}")
    if not -MAX_REWARD <= value <= MAX_REWARD:  # of integers beyond a float, too; NaN is in no range
        is_endless = value != value or value in (math.inf, -math.inf)
        if is_endless:
            bound = ""
        else:
            bound = f" within {MAX_REWARD:.2g}"
        raise EnvFault(f"{rule} a finite number{bound}, got {quoted(value)}")
    if hasattr(value, "dtype"):
        return float(str(value))
    return float(value)


def _message(value: object, known: Sequence[Any], method: str) -> Message:
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        content = value.get("content")
        rest = plain_dict({name: part for name, part in value.items() if name != "content"})
        if isinstance(content, str):
            return {**rest, "content": plain(content)}
        if isinstance(content, list):
            return {**rest, "content": [_part(part, known) for part in content]}
    rule = 'must return {"role": str, "content": str or list of parts}, or a list of such messages'
    raise EnvFault(f"{method} {rule}, got {value!r:.200}")


def _part(part: object, known: Sequence[Any]) -> dict[str, Any]:
    if isinstance(part, dict):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return plain(part)
        if part.get("type") == "image":
            image = part.get("image")
            if type(image) is int and 0 <= image < len(known):
                image = known[image]
            else:
                image = load_image(image, "observation image", max_pixels=MAX_IMAGE_PIXELS)
            return {**plain_dict({name: each for name, each in part.items() if name != "image"}), "image": image}
    raise EnvFault(
        f'a part must be {{"type": "text", "text": str}} or {{"type": "image", "image": image}}, got {part!r:.200}'
    )


# Plain copies ---------------------------------------------------------------------------------------------------------


def plain(value: Any, copy_known: Callable[[Any], Any] = copy.deepcopy) -> Any:
    """Return a copy in plain types, which later changes do not reach; a foreign object becomes its text.

    `copy_known` copies arrays, images, dates and paths. A value that holds more than `MAX_VALUES` others becomes a
    text that says so: it may have no end, or a few lists that hold each other may stand for billions.

    >>> plain({"score": 0.5, "parts": (1, [Path])})
    {'score': 0.5, 'parts': (1, ["<class 'pathlib.Path'>"])}
    """
    try:
        return _plain(value, MAX_DEPTH, iter(range(MAX_VALUES)), copy_known)
    except _TooManyValues:
        return f"(more than {MAX_VALUES} values)"


def plain_dict(value: Mapping[Any, Any], copy_known: Callable[[Any], Any] = copy.deepcopy) -> dict[Any, Any]:
    """Return a plain copy of each entry, bounded by itself: one that is too large leaves the others as they are."""
    return {_key(key): plain(item, copy_known) for key, item in value.items()}


def plain_fault(fault: EnvFault) -> EnvFault:
    """Return a fault that holds nothing of what raised it: an author's class, its arguments, the frames it passed."""
    detail = str(fault)
    if isinstance(fault, ToolFault):
        return ToolFault(detail, plain_dict(fault.info), fault.timed_out)
    if isinstance(fault, HostLost):
        kind = HostLost
    else:
        kind = EnvFault
    return kind(detail, fault.timed_out, fault.process_ended)


def is_json(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether JSON can hold the value unchanged; a tuple counts as a list."""
    if isinstance(value, Mapping):
        return bool(depth) and all(
            type(key) is str and is_json(key) and is_json(item, depth - 1) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return bool(depth) and all(is_json(item, depth - 1) for item in value)
    if type(value) is int:
        return value.bit_length() <= MAX_BITS
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is str:
        return well_formed(value) == value
    return value is None or type(value) is bool


class _TooManyValues(Exception):
    """The value holds more than `MAX_VALUES` others."""


def shown(value: Any) -> str:
    """Return a value as text, at most `MAX_CHARS` characters of a `repr`; it never raises.

    Half of a surrogate pair, which JSON readers reject, becomes U+FFFD.
    """
    try:
        if isinstance(value, set | frozenset):  # in an order that is the same in every process
            return f"{{{', '.join(sorted(map(repr, value)))}}}"[:MAX_CHARS]
        return well_formed(str.__str__(value) if isinstance(value, str) else repr(value)[:MAX_CHARS])
    except Exception:  # a foreign `__repr__` raises what it likes; or the value nests too deeply for it
        return f"<{type(value).__name__} that cannot be shown>"


def _plain(value: Any, depth: int, counter: Iterator[int], copy_known: Callable[[Any], Any]) -> Any:
    # One counter for the whole value: nested lists share its budget.
    if next(counter, None) is None:
        raise _TooManyValues
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth and isinstance(value, Mapping):
        return {_key(key): _plain(item, depth - 1, counter, copy_known) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        parts = [_plain(item, depth - 1, counter, copy_known) for item in value]
        if isinstance(value, tuple):
            return tuple(parts)
        return parts
    if kind in (set, frozenset) and all(type(item) in _SCALARS for item in value):
        return kind(value)
    if _is_known(value):
        try:
            return copy_known(value)
        except Exception:  # such as an image whose file was closed
            return shown(value)
    return shown(value)


def _is_known(value: Any) -> bool:
    """Return whether a value is of a known package and holds no object of others, as a module of torch may."""
    package = type(value).__module__.partition(".")[0]
    if package in _ARRAYS:
        return hasattr(value, "dtype") and not getattr(value.dtype, "hasobject", False)
    # A time of datetime may hold a time zone of the author's own class.
    zone = getattr(value, "tzinfo", None)
    return package in _KNOWN and (zone is None or _is_known(zone))


def _key(key: Any) -> Any:
    if type(key) in _SCALARS:
        return key
    return shown(key)
