"""Selects the problems of a command: flags and a registry entry decide which samples it reads, with a system prompt."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pydantic import Field

from envs.checking.error_location import author_location
from envs.config.settings import Section
from envs.contract import plain
from envs.datasets.prompts import DataKeys, add_system_prompt
from envs.datasets.samples import load_samples
from envs.errors import CODE_FAULTS, UserError, did_you_mean
from envs.execution.watchdog import watched
from envs.mixture import MixedSamples, places
from envs.spec import EnvSpec
from envs.success import ENVIRONMENT
from envs.types import Sample, SampleSource


class RowsConfig(Section):
    """The flags that name a file of rows, its columns, and what its images may name."""

    data: str = Field(
        default="", description="parquet, JSONL or JSON file, folder or hub id; empty: the environment's own problems"
    )
    prompt_key: str = Field(default="problem", description="column of the problem's text")
    answer_key: str = Field(default="answer", description="column of the gold answer")
    image_keys: str = Field(default="images", description="column of the image or images")
    allow_outside_images: bool = Field(default=False, description="allow image paths outside the data file's folder")

    @property
    def keys(self) -> DataKeys:
        """The columns."""
        return DataKeys(self.prompt_key, self.answer_key, self.image_keys)

    def load(self, source: str, split: str, system_prompt: str | None, limit: int | None) -> SampleSource:
        """Return the checked samples of a data set with these columns; see `load_samples`."""
        return load_samples(
            source,
            keys=self.keys,
            system_prompt=system_prompt,
            allow_outside_images=self.allow_outside_images,
            limit=limit,
            split=split,
        )


class ProblemsConfig(RowsConfig):
    """The flags that choose problems for a command without training."""

    split: str = Field(default="train", description="split of the problems")
    seed: int = Field(default=0, ge=0, description="seed of the environment's own problems")


def with_system_prompt(source: SampleSource, system_prompt: str | None) -> SampleSource:
    """Put a system prompt in front of each sample; without a prompt return the samples unchanged."""
    if system_prompt:
        return Prompted(source, system_prompt)
    return source


@dataclass(frozen=True)
class Prompted:
    """Samples with a system prompt in front of each."""

    source: SampleSource
    system_prompt: str

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return with_prompt(self.source[index], self.system_prompt)


def with_prompt(sample: Sample, system_prompt: str | None) -> Sample:
    """Return a sample with a system prompt in front, if there is one."""
    if not system_prompt:
        return sample
    if not sample.prompt:  # such an episode shows only its first observation
        return replace(sample, prompt=({"role": "system", "content": system_prompt},))
    return replace(sample, prompt=tuple(add_system_prompt(sample.prompt, system_prompt)))


@dataclass(frozen=True, eq=False)
class NamedSamples:
    """Rows of a file whose column `env` names the environment of each; each gets that environment's system prompt."""

    source: SampleSource
    spec: EnvSpec
    system_prompts: Mapping[str, str | None]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        sample = self.source[index]
        env_id = str(sample.metadata.get(ENVIRONMENT))
        if env_id not in self.spec.parts:
            fix = f"fill the column in; {did_you_mean(env_id, self.spec.parts)}"
            raise UserError(f"sample {sample.id} {ENVIRONMENT}", "must name an environment of the run", env_id, fix)
        return with_prompt(sample, self.system_prompts[env_id])


@dataclass(frozen=True)
class CheckedSamples:
    """An environment's own samples, each checked when it is read, because its author's code makes them."""

    env_id: str
    source: SampleSource

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        """Return a sample. Raises `UserError` if the author's code raises or returns something else."""
        # Code of an author may hang here as well as in an episode.
        with watched(f"sample {index} of environment '{self.env_id}'"):
            return self._checked(range(len(self))[index])

    def _checked(self, index: int) -> Sample:
        try:
            sample = self.source[index]
        except UserError:
            raise
        except CODE_FAULTS as error:
            raise self._error(f"sample {index} must be created", _cause(error), "fix the data set") from error
        if not isinstance(sample, Sample):
            raise self._error(f"sample {index} must be an envs.Sample", type(sample).__name__, "return Sample(...)")
        for name, holds, rule, fix in _FIELDS:
            if not holds(value := getattr(sample, name)):
                got = f"{type(value).__name__} {value!r:.80}"
                raise self._error(f"the {name} of sample {index} must be {rule}", got, fix)
        return Sample(plain(sample.id), tuple(sample.prompt), plain(sample.label), sample.metadata)

    def _error(self, rule: str, got: object, fix: str) -> UserError:
        return UserError(f"environment '{self.env_id}' data", rule, got, fix)


def _are_messages(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value
    )


#: The fields of a sample: what must hold of each, in words too, and how to write it.
_FIELDS: tuple[tuple[str, Callable[[object], bool], str, str], ...] = (
    ("id", lambda id: isinstance(id, str), "a text", "write id=str(...)"),
    ("label", lambda label: label is None or isinstance(label, str), "a text or None", "write label=str(...)"),
    ("prompt", _are_messages, "a tuple of chat messages", 'write prompt=({"role": "user", "content": "..."},)'),
    ("metadata", lambda metadata: isinstance(metadata, Mapping), "a dict", "write metadata={...}"),
)


def checked_problems(spec: EnvSpec, split: str, size: int, seed: int, system_prompt: str = "") -> SampleSource:
    """Return samples of the environment's own data set, each checked when it is read.

    `system_prompt` stands in place of the entry's own.

    Raises:
        UserError: there is no data set; see `EnvSpec.load_dataset`.
    """
    if spec.parts:
        counts = Counter(env_id for env_id, _ in places(spec.mixture, size))
        sources = {
            part.id: checked_problems(part, split, counts[part.id], seed, system_prompt)
            for part in spec.entries
            if counts[part.id]
        }
        return MixedSamples(sources, places(spec.mixture, size))
    samples = CheckedSamples(spec.id, spec.load_dataset(split, size, seed))
    return with_system_prompt(samples, system_prompt or spec.load_system_prompt())


def checked_rows(
    spec: EnvSpec, rows: RowsConfig, source: str, split: str, limit: int | None, system_prompt: str = ""
) -> SampleSource:
    """Return the checked samples of a data set for an environment, with the given system prompt or the entry's own.

    Raises:
        UserError: as `load_samples`; a row of a mixture that names no environment of it raises when it is read.
    """
    if not spec.parts:
        return rows.load(source, split, system_prompt or spec.load_system_prompt(), limit)
    prompts = {part.id: system_prompt or part.load_system_prompt() for part in spec.entries}
    return NamedSamples(rows.load(source, split, None, limit), spec, prompts)


def open_problems(spec: EnvSpec, config: ProblemsConfig, size: int) -> SampleSource:
    """Return up to `size` samples, from `config.data` or the environment's own data set.

    Example::

        open_problems(get_spec("geo3k"), ProblemsConfig(seed=3), size=8)[0].id      # "geo3k-procedural-train-3-0"

    Raises:
        UserError: there is no such data set, or no built-in one; see `load_samples` and `EnvSpec.load_dataset`.
    """
    if config.data:
        return checked_rows(spec, config, config.data, config.split, size)
    return checked_problems(spec, config.split, size, config.seed)


def read_sample(spec: EnvSpec, source: SampleSource, index: int) -> Sample:
    """Return a sample of an environment's problems. Raises `UserError` if there are too few, or it is none."""
    if index >= len(source):
        rule = f"must have more than {index} samples"
        raise UserError(f"environment '{spec.id}' data", rule, len(source), "ask for fewer, or give more")
    return source[index]


def _cause(error: BaseException) -> str:
    """Return an error in one line, with the line of the author's code that raised it, if any."""
    # Not the last frame: it may lie in a library that the author called.
    location = author_location((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {error}{f' ({location})' if location else ''}"
