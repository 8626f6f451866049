"""Plays the scripted episodes of one environment in this program, and counts what they leave."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from envs.checking.episodes import PlayedEpisode, PlayOptions, Script, checked_prompt, play_episode
from envs.checking.findings import digest
from envs.checking.leftovers import Generators, ProcessState
from envs.env import EnvArgs
from envs.execution.watchdog import WATCHDOG, Watcher
from envs.spec import BuildEnv, EnvLimits, EnvSpec
from envs.types import Sample


class Player(Protocol):
    """Plays the episodes of one environment on a few samples.

    `note` says, if it is not empty, why the episodes are not played in a worker. `start` is the state of the program
    before the first episode. `outlives_hangs` tells whether a call that hangs costs its own episode alone.
    """

    note: str
    start: ProcessState
    outlives_hangs: bool

    def play(self, place: int, script: Script, options: PlayOptions | None = None) -> PlayedEpisode:
        """Play an episode of the sample at a place."""
        ...

    def state(self) -> ProcessState:
        """Return the state of the program that plays."""
        ...

    def changed(self) -> list[int]:
        """Return the places of the samples that episodes have changed."""
        ...

    def close(self) -> None:
        """Undo what playing has changed in this program."""
        ...


class LocalPlayer:
    """Plays in this program."""

    def __init__(
        self,
        spec: EnvSpec,
        args: EnvArgs,
        samples: Sequence[Sample],
        build_env: BuildEnv,
        watcher: Watcher = WATCHDOG,
        note: str = "",
        temporary: Path | None = None,
        printed: Path | None = None,
    ) -> None:
        """`temporary` is the folder of temporary files and `printed` the output of the program, if it has its own."""
        self._args = args
        self._samples = samples
        self._build_env = build_env
        self._watcher = watcher
        self._limits = replace(EnvLimits.of(spec), on_tool_fault=args.on_tool_fault)
        self._prompts = [checked_prompt(sample) for sample in samples]  # decode once, not for every episode
        self._fingerprints = list(map(_fingerprint, samples))
        self._loop = asyncio.Runner()
        self._generators = Generators()
        self._places = (temporary, printed)
        self._num_played = 0
        self.note = note
        self.outlives_hangs = spec.isolation == "process"
        self.start = self.state()

    def play(self, place: int, script: Script, options: PlayOptions | None = None) -> PlayedEpisode:
        """Play an episode of the sample at a place."""
        self._num_played += 1
        self._generators.seed(self._num_played)
        sample = self._samples[place]
        if options and options.fail_in:
            limits = replace(self._limits, retries=0)
        else:
            limits = self._limits
        episode = self._loop.run(
            play_episode(
                lambda: self._build_env(sample, self._args),
                sample,
                self._prompts[place],
                script,
                limits,
                self._args.max_turns,
                options,
                self._watcher,
            )
        )
        return replace(episode, generators=self._generators.states())

    def state(self) -> ProcessState:
        """Return the state of this program."""
        return ProcessState.now(*self._places)

    def changed(self) -> list[int]:
        """Return the places of the samples that episodes have changed."""
        now = map(_fingerprint, self._samples)
        return [place for place, (old, new) in enumerate(zip(self._fingerprints, now, strict=True)) if old != new]

    def close(self) -> None:
        """Restore the directory and the generators."""
        os.chdir(self.start.directory)
        self._generators.restore()
        self._loop.close()


def _fingerprint(sample: Sample) -> tuple[object, ...]:
    return digest(checked_prompt(sample)), sample.label, repr(sample.metadata)
