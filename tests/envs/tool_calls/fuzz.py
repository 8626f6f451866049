"""Responses that are hard to read: random mutations of valid ones, and a million characters of one unit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from envs.tool_calls import ToolCall, ToolFormat, find_tool_calls, outside_tool_calls

NUM_CHARS = 1_000_000
OUTCOMES = ("ok", "malformed", "truncated", "none")
FORMATS: tuple[ToolFormat, ...] = ("hermes", "qwen_xml")

HERMES_CALL = '<tool_call>{"name": "f", "arguments": {"a": "68"}}</tool_call>'
XML_CALL = "<tool_call><function=f><parameter=a>68</parameter></function></tool_call>"
TAGS = ("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=", "</parameter>")
SYNTAX = ("{", "}", "[", "]", '"', "\\", "\\u", ",", ":", "\n", "<", ">", '{"name": ', '"arguments": ', '{"function": ')
ODDITIES = ("NaN", "1e999", "9" * 5000, "[" * 2000, "\ud800", "\x00", "\u2028", "<|im_end|>", HERMES_CALL, XML_CALL)
WORDS = ("calc_score", "answer", "68", "8\\sqrt{2}", "\\boxed{5}", "a < b", "x\ny", 'say "q"', "</tool_call>", "é", "")
WRAPPERS = (('{"function": ', "}"), ("[", "]"), ("<tool_call>", "</tool_call>"), ('"', '"'))


def block(content: str) -> str:
    """Return a call as models write it, between its tags."""
    return f"<tool_call>\n{content}\n</tool_call>"


def valid_response(rng: random.Random) -> str:
    """Return prose with one to three well-formed calls in one of the formats."""
    write = rng.choice((_hermes_call, _xml_call))
    parts = ["Let me see. "]
    for _ in range(rng.randint(1, 3)):
        arguments = {rng.choice(WORDS): rng.choice(WORDS) for _ in range(rng.randint(0, 3))}
        parts += [write(rng.choice(WORDS), arguments), rng.choice(("\n", " and ", "", "so \\boxed{68}"))]
    return "".join(parts)


def _hermes_call(name: str, arguments: dict[str, str]) -> str:
    return block(json.dumps({"name": name, "arguments": arguments}))


def _xml_call(name: str, arguments: dict[str, str]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return block(f"<function={name}>\n{parameters}</function>")


def mutate(text: str, rng: random.Random) -> str:
    """Return a response with one random fault."""
    first, second, third = sorted(rng.randint(0, len(text)) for _ in range(3))
    match rng.randrange(8):
        case 0:  # a span is lost
            return text[:first] + text[second:]
        case 1:  # a span is said twice
            return text[:second] + text[first:]
        case 2:  # two spans change places
            return text[:first] + text[second:third] + text[first:second] + text[third:]
        case 3:  # a delimiter where none belongs
            return text[:first] + rng.choice(rng.choice((TAGS, SYNTAX, ODDITIES))) + text[first:]
        case 4:  # the token limit
            return text[:third]
        case 5:  # other quotes
            return text[:first] + text[first:second].replace('"', rng.choice(("'", "“", '\\"', ""))) + text[second:]
        case 6:  # any characters, half of a surrogate pair among them
            noise = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(4))
            return text[:first] + noise + text[first:]
        case _:  # a wrapper around a span
            before, after = rng.choice(
                (('{"function": ', "}"), ("[", "]"), ("<tool_call>", "</tool_call>"), ('"', '"'))
            )
            return text[:first] + before + text[first:second] + after + text[second:]


def responses(count: int, seed: int) -> Iterator[str]:
    """Yield `count` responses: valid ones with none to four faults."""
    rng = random.Random(seed)
    for _ in range(count):
        text = valid_response(rng)
        for _ in range(rng.randint(0, 4)):
            text = mutate(text, rng)
        yield text


def outcomes(text: str, format: ToolFormat) -> list[str]:
    """Read one response, check what must hold of any, and return the outcome of each call."""
    calls = find_tool_calls(text, format)
    assert len(outside_tool_calls(text, format)) <= len(text), text
    for call in calls:
        if isinstance(call, ToolCall):
            json.dumps([call.name, call.arguments], allow_nan=False)
    return ["ok" if isinstance(call, ToolCall) else call.kind for call in calls] or ["none"]


UNITS = {
    "opening tags": "<tool_call>",
    "closing tags": "</tool_call>",
    "braces": "{",
    "brackets": "[",
    "backslashes": "\\",
    "quotes": '"',
    "spaces": " ",
    "line breaks": "\n",
    "less-than signs": "<",
    "letters": "a",
    "digits": "9",
    "commas": ",",
    "escapes": "\\n",
    "lone backslashes": "\\x",
    "triple backslashes": "\\\\\\x",
    "escaped quotes": '\\"',
    "cut names in tags": '<tool_call>{"name"',
    "cut strings in tags": '<tool_call>{"a":"',
    "cut lists in tags": '<tool_call>["",',
    "lone backslashes in tags": '<tool_call>{"a":"\\x',
    "quoted tags": '\\"<tool_call>',
    "quotes and tags": '"<tool_call>',
    "strings and tags": '"<tool_call>",',
    "bare names": '{"name"',
    "nested bare calls": '{"name":',
    "bare calls": '{"name": "f", "arguments": {"a": "68"}}\n',
    "nested lists": "[" * 33 + "]" * 33 + ",",
    "empty lists": "[],",
    "empty objects": "{},",
    "objects": '{"":0},',
    "floats": "1e1,",
    "long floats": "1.2345678901234567e-300,",
    "long integers": "9" * 4300 + ",",
    "integers": "1,",
    "functions": "<function=",
    "named functions": "<function=f>",
    "closed functions": "<function=f></function>",
    "cut functions in tags": "<tool_call><function=f><parameter=a>",
    "parameters": "<parameter=",
    "named parameters": "<parameter=a>",
    "closed parameters": "<parameter=a>1</parameter>",
    "closing parameters": "</parameter>",
    "values cut by tags": "<function=f><parameter=a>1</tool_call>",
    "Hermes calls": HERMES_CALL,
    "XML calls": XML_CALL,
}
HEADS = (
    "",
    "<tool_call>",
    '<tool_call>{"name":"f","arguments":{"a":"',
    '<tool_call>{"name":"f","arguments":{"a":[',
    '<tool_call>{"name":"f","arguments":"[',
    '{"name":"f","arguments":{"a":[',
    "<function=",
    "<function=f><parameter=a>",
    '<tool_call>{"a":"\\x"}</tool_call>' + "<tool_call>{" * 62,
    "<tool_call><function=f>" + "".join(f"<parameter=a{n}>1</parameter>" for n in range(60)),
)
# The last tail makes Python keep the text in four bytes a character.
TAILS = ("", '"]}}</tool_call>', "0]}}", "</parameter></function></tool_call>", "\U0001f600")


def adversarial(unit: str) -> Iterator[str]:
    """Yield texts of a million characters that repeat a unit, behind different heads and before different tails."""
    for head in HEADS:
        for tail in TAILS:
            room = NUM_CHARS - len(head) - len(tail)
            yield head + unit * (room // len(unit)) + tail
