"""Loads samples from a file, a folder or a Hugging Face id.

Loading checks every row and decodes every image once, so a bad row is an error before the first step. Memory then
holds the rows in their stored form; reading a sample decodes its images again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from envs.datasets.prompts import DEFAULT_KEYS, DataKeys, add_system_prompt, column_fix, read_messages, value_at
from envs.datasets.rows import RowSource, open_rows, read_tools
from envs.errors import UserError, first_line
from envs.grading.extraction import extract_boxed
from envs.images import ImageAccess
from envs.types import Sample, SampleSource

#: Rows checked at once; bounds the number of encoded images that wait for a thread.
_CHECKED_AT_ONCE = 256
#: Number of samples whose decoded images stay in memory.
_KEPT_DECODED = 16


@dataclass(eq=False)
class RowSamples:
    """The samples of a data set's first `size` rows; see `load_samples`.

    Reading a sample decodes its images; the last 16 samples stay decoded.
    """

    source: RowSource
    keys: DataKeys
    system_prompt: str | None
    access: ImageAccess
    size: int

    def __post_init__(self) -> None:
        # The episodes of a group read the same sample one after the other.
        self._cached_sample = lru_cache(_KEPT_DECODED)(self._read)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        # `range` takes negative indices and raises IndexError, as a list does.
        return self._cached_sample(range(self.size)[index])

    def _read(self, index: int) -> Sample:
        row = self.source.rows[index]
        where = f"{self.source.name} row {index}"
        messages = read_messages(row, self.keys, where, self.access)
        if self.system_prompt is not None:
            messages = add_system_prompt(messages, self.system_prompt)
        row_id = row.get("id")
        return Sample(
            id=f"{self.source.stem}-{index}" if row_id is None else str(row_id),
            prompt=tuple(messages),
            label=_parse_answer(row, self.keys.answer, where),
            metadata=_metadata(row, self.keys, where),
        )

    def check(self) -> None:
        """Read every row with its images; raise the `UserError` of the first bad row."""
        key = self.keys.images
        rows = self.source.rows
        # A text-only set may lack the default key; a key that the user named must exist.
        if key != DEFAULT_KEYS.images and not any(key in rows[index] for index in range(self.size)):
            rule = f"must hold the images key '{key}' in some row"
            got = f"keys {', '.join(rows[0])}"
            raise UserError(self.source.name, rule, got, column_fix("--image-keys", key, rows[0]))
        # Pillow releases the interpreter while it decodes.
        with ThreadPoolExecutor() as pool:
            for start in range(0, self.size, _CHECKED_AT_ONCE):
                stop = min(start + _CHECKED_AT_ONCE, self.size)
                for _ in pool.map(self._has_read, range(start, stop)):
                    pass

    def _has_read(self, index: int) -> bool:
        """Read a sample without keeping it: the decoded images of a whole data set do not fit into memory."""
        return self._read(index) is not None


def load_samples(
    source: str,
    *,
    keys: DataKeys = DEFAULT_KEYS,
    system_prompt: str | None = None,
    allow_outside_images: bool = False,
    limit: int | None = None,
    split: str = "train",
) -> RowSamples:
    """Load a data set and check all of it, images included (about 3 ms an image and core).

    `source` is a .parquet, .jsonl or .json file (a list), a folder of such files, a saved
    Hugging Face data set, or a Hugging Face id. `split` selects within a folder or a set; `limit` takes only the first
    rows. The prompt is a text or a list of chat messages. Each ``<image>`` in it is the placeholder of the next image;
    without any, the images come first in the first user message. `system_prompt` precedes the row's own. Other columns
    with plain values or lists of them become the sample's metadata, with the entries of a column `metadata`; `tools`,
    schemas or their JSON, is a list.

    Example::

        samples = load_samples("geo3k/train.jsonl", system_prompt="Think, then answer.")
        len(samples), samples[0].id, samples[0].label       # (514, "geometry3k-train-1029", "2.0")
        load_samples("hiyouga/geometry3k", split="test", limit=100)

    Raises:
        UserError: a missing source or split, no rows, invalid JSON, or a row without prompt or answer, whose numbers of
            placeholders and images differ, or with an image that is missing, too large, damaged or outside the data
            set's folder (unless `allow_outside_images`).
    """
    if limit is not None and limit < 1:
        raise UserError("limit", "must be at least 1", limit, "omit it to take every row")
    rows = open_rows(source, split)
    size = min(limit or len(rows.rows), len(rows.rows))
    access = ImageAccess(rows.root, allow_outside_images)
    samples = RowSamples(rows, keys, system_prompt, access, size)
    samples.check()
    return samples


@dataclass(frozen=True)
class Subset:
    """A view of selected samples of a source, in the given order.

    Example::

        Subset(samples, (4, 0))[0] == samples[4]
    """

    source: SampleSource
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[self.indices[index]]


def filter_overlong(
    samples: SampleSource, length: Callable[[Sample], int], max_prompt_tokens: int
) -> tuple[Subset, int]:
    """Return the samples with at most `max_prompt_tokens` tokens by `length`, and the number of dropped samples.

    Raises:
        UserError: there is no sample, or none is short enough.
    """
    if not len(samples):
        raise UserError("problems", "must be at least one", 0, "give --data, or fix the environment's data set")
    lengths = [_length(samples[index], length) for index in range(len(samples))]
    kept = tuple(index for index, tokens in enumerate(lengths) if tokens <= max_prompt_tokens)
    if not kept:
        rule = f"must leave at least one of {len(lengths)} samples"
        raise UserError("max_prompt_tokens", rule, max_prompt_tokens, f"the shortest prompt has {min(lengths)} tokens")
    return Subset(samples, kept), len(lengths) - len(kept)


def _length(sample: Sample, length: Callable[[Sample], int]) -> int:
    try:
        return length(sample)
    except UserError:
        raise
    except Exception as error:  # a chat template raises what the messages lead to, such as `"tool_calls": 5`
        rule = "must have messages that the model's chat template can write"
        raise UserError(f"sample {sample.id}", rule, first_line(error), "fix the messages of its row") from error


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """Return the shuffled indices 0..size-1 of an epoch. Equal arguments give the same order on every machine.

    >>> epoch_order(5, seed=0, epoch=1) == epoch_order(5, seed=0, epoch=1)
    True
    """
    # Python guarantees the sequence of random() across versions, but not that of shuffle().
    generator = random.Random(f"{seed}/{epoch}")
    return sorted(range(size), key=lambda _: generator.random())


def _parse_answer(row: Mapping[str, Any], key: str, where: str) -> str:
    answer = value_at(row, key)
    if answer is None and key not in row:
        fix = column_fix("--answer-key", key, row)
        raise UserError(where, f"must hold an answer under '{key}'", f"keys {', '.join(row)}", fix)
    is_number = isinstance(answer, int | float | Decimal)
    # A table of floats turns a missing value into NaN, the one number that differs from itself.
    if answer is None or (isinstance(answer, str) and not answer.strip()) or (is_number and answer != answer):
        raise UserError(f"{where} {key}", "must not be empty", answer, "fill the answer in or drop the row")
    # An integer of over 308 digits is no float.
    is_finite = isinstance(answer, int) or (is_number and math.isfinite(answer))
    if not isinstance(answer, str) and not is_finite:
        raise UserError(f"{where} {key}", "must be a text or a finite number", answer, "give one answer as text")
    return unboxed(str(answer))


def unboxed(label: str) -> str:
    r"""Return a label without the `\boxed{}` that is all of it; other labels as they are.

    >>> unboxed(r"\boxed{\frac{1}{2}}"), unboxed(r"Answer: \boxed{5}")
    ('\\frac{1}{2}', 'Answer: \\boxed{5}')
    """
    inner = extract_boxed(label)
    # Spaces in the box say nothing; a text around it would.
    if inner and "".join(label.split()) == f"\\boxed{{{''.join(inner.split())}}}":
        return inner
    return label


def _metadata(row: Mapping[str, Any], keys: DataKeys, where: str) -> dict[str, Any]:
    """Return the other columns with plain values, the entries of a column `metadata`, and the row's tools."""
    used = (keys.prompt, keys.answer, keys.images, "id")
    found = {name: value for name, value in row.items() if name not in used and _is_plain(value)}
    own = row.get("metadata")
    if isinstance(own, dict):
        found |= own
    # slime keeps them in the metadata, others in a column of their own.
    tools = row.get("tools") or found.get("tools")
    # A list of names is no list of schemas, and stays what it is.
    is_json = isinstance(tools, str) and tools.lstrip().startswith("[")
    if is_json or (isinstance(tools, list) and tools and isinstance(tools[0], dict)):
        found["tools"] = [*read_tools(tools, f"{where} tools")]
    return found


def _is_plain(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, str | int | float) for item in values)
