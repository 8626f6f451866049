"""Selects the problems of a command: flags and a registry entry decide which samples it reads, with a system prompt."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace

from pydantic import Field

from envs.checking.error_location import author_location
from envs.config.settings import Section
from envs.datasets.samples import DataKeys, add_system_prompt, load_samples
from envs.errors import UserError
from envs.spec import EnvSpec
from envs.types import Sample, SampleSource


class RowsConfig(Section):
    """The flags that name a file of rows and its columns."""

    data: str = Field(
        default="", description="parquet, JSONL or JSON file, folder or hub id; empty: the environment's own problems"
    )
    prompt_key: str = Field(default="problem", description="column of the problem's text")
    answer_key: str = Field(default="answer", description="column of the gold answer")
    image_keys: str = Field(default="images", description="column of the image or images")

    @property
    def keys(self) -> DataKeys:
        """The columns."""
        return DataKeys(self.prompt_key, self.answer_key, self.image_keys)


class ProblemsConfig(RowsConfig):
    """The flags that choose problems for a command without training."""

    split: str = Field(default="train", description="split of the problems")
    seed: int = Field(default=0, ge=0, description="seed of the environment's own problems")


def with_system_prompt(source: SampleSource, system_prompt: str | None) -> SampleSource:
    """Put a system prompt in front of each sample; without a prompt return the samples unchanged."""
    return Prompted(source, system_prompt) if system_prompt else source


@dataclass(frozen=True)
class Prompted:
    """Samples with a system prompt in front of each."""

    source: SampleSource
    system_prompt: str

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        sample = self.source[index]
        if not isinstance(sample, Sample):  # `read_sample` reports it
            return sample
        if not sample.prompt:  # such an episode shows only its first observation
            return replace(sample, prompt=({"role": "system", "content": self.system_prompt},))
        return replace(sample, prompt=tuple(add_system_prompt(sample.prompt, self.system_prompt)))


def open_problems(spec: EnvSpec, config: ProblemsConfig, size: int) -> SampleSource:
    """Return up to `size` samples, from `config.data` or the environment's own data set.

    Example::

        open_problems(get_spec("geo3k"), ProblemsConfig(seed=3), size=8)[0].id      # "geo3k-procedural-train-3-0"

    Raises:
        UserError: there is no such data set, or no built-in one; see `load_samples` and `EnvSpec.load_dataset`.
    """
    system_prompt = spec.load_system_prompt()
    if config.data:
        return load_samples(config.data, keys=config.keys, system_prompt=system_prompt, limit=size, split=config.split)
    return with_system_prompt(spec.load_dataset(config.split, size, config.seed), system_prompt)


def read_sample(spec: EnvSpec, source: SampleSource, index: int) -> Sample:
    """Return a sample of an environment's data set.

    Raises:
        UserError: the data set has too few samples, raises, or returns something else.
    """
    if index >= len(source):
        rule = f"must have more than {index} samples"
        raise UserError(f"environment '{spec.id}' data", rule, len(source), "ask for fewer, or give more")
    try:
        sample = source[index]
    except UserError:
        raise
    except Exception as error:  # code of the environment's author
        raise UserError(
            f"environment '{spec.id}' data", f"sample {index} must be created", _cause(error), "fix the data set"
        ) from error
    if not isinstance(sample, Sample):
        rule = f"sample {index} must be an envs.Sample"
        raise UserError(f"environment '{spec.id}' data", rule, type(sample).__name__, "return Sample(...)")
    if not (sample.label is None or isinstance(sample.label, str)):
        rule = f"the label of sample {index} must be a text or None"
        raise UserError(f"environment '{spec.id}' data", rule, type(sample.label).__name__, "write label=str(...)")
    return sample


def _cause(error: Exception) -> str:
    """Return an error in one line, with the line of the author's code that raised it, if any."""
    location = author_location((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {error}{f' ({location})' if location else ''}"
