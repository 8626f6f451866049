"""A safe YAML loader: it builds plain values only, and a repeated key is an error."""

from __future__ import annotations

import math
from typing import Any

import yaml

from envs.errors import UserError, first_line

#: How many values YAML may hold, each alias counted as a copy: a few lines of aliases can stand for a billion values.
MAX_VALUES = 2**20


class UniqueKeyLoader(yaml.SafeLoader):
    """Loads YAML. A repeated key in a mapping is an error; in plain YAML the last one would win."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root. Raises `yaml.constructor.ConstructorError` for too many values, or one inside itself."""
        root = super().get_single_node()
        if root is not None and _num_values(root, {}) > MAX_VALUES:
            problem = f"aliases stand for more than {MAX_VALUES} values, or for what they are in"
            raise yaml.constructor.ConstructorError(None, None, problem, root.start_mark)
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping. Raises `yaml.constructor.ConstructorError` for a repeated key, or one that is a list."""
        seen: set[str] = set()
        for key, _ in node.value:
            # A list or a mapping cannot be a key of a dict.
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one value", key.start_mark)
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _num_values(node: yaml.Node, counts: dict[yaml.Node, float]) -> float:
    """Return how many values a node stands for, itself included; infinity where it is inside itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    # An alias is the same node again: counted once, added each time.
    if node not in counts:
        counts[node] = math.inf  # while its parts are counted
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        counts[node] = 1 + sum(_num_values(part, counts) for part in parts)
    return counts[node]


def load_yaml(text: str, place: str, loader: type[UniqueKeyLoader] = UniqueKeyLoader) -> Any:
    """Return the content of YAML. Raises `UserError`, which names `place` and the line, if it is none."""
    try:
        return yaml.load(text, loader)  # a subclass of the safe loader: it builds plain values only
    except RecursionError:
        raise UserError(place, "must be YAML", "lists that nest too deeply", "flatten them") from None
    except ValueError as error:  # a number with too many digits, or a date such as 2026-13-01
        raise UserError(place, "must be YAML", first_line(error), "put the value into quotes") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place} line {mark.line + 1}" if mark else place
        got = getattr(error, "problem", None) or str(error)
        raise UserError(where, "must be YAML", got, "fix the line") from error
