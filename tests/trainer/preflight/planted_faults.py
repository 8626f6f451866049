"""Ten kinds of faults, planted for real, that the doctor must find.

Each is planted from outside: in a copy of the bundled checkpoint, in an environment, in the folder, in what is
installed, or in a subclass of the embedded engine that takes the place of the real one. The doctor then examines the
run as it always does. The control is the same run with nothing planted.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from agents.engines.hf import HFEngine
from agents.model import STARTER_PATH
from envs.checks import Finding
from envs.config.cli import parse
from tests.flags import last_of_each
from tests.trainer.preflight.faulty_engines import (
    BlindEngine,
    StaleImagesEngine,
    StalePrefixEngine,
    StaleSessionEngine,
    SwappedEngine,
    SwappedTowerEngine,
    UnnormalisedEngine,
    swap,
)
from trainer.learner.build import build_learner
from trainer.learner.protocol import RankLearner
from trainer.planning.qwen3_vl import qwen3_vl_config
from trainer.preflight.diagnosis import diagnose
from trainer.preflight.report import DoctorConfig

#: The run that is examined.
FLAGS = ("--train-size", "64", "--eval-size", "0", "--max-new-tokens", "128", "--problems", "2", "--answers", "8")
#: Plants something below a folder, and yields the flags of the run that has it.
Plant = Callable[[Path], AbstractContextManager[Sequence[str]]]


@dataclass(frozen=True)
class PlantedFault:
    """A fault: its kind (a to j), what it is, how it is planted, the check that must find it, and what plants it."""

    kind: str
    name: str
    how: str
    expected: str
    plant: Plant


def engine(kind: type[HFEngine]) -> Plant:
    """Plant an engine in place of the embedded one."""

    @contextmanager
    def plant(_: Path) -> Iterator[Sequence[str]]:
        with patch("trainer.setup.engines.HFEngine", kind):
            yield ()

    return plant


@contextmanager
def swapped_learner(_: Path) -> Iterator[Sequence[str]]:
    """Plant a learner that has loaded two layers under each other's names."""

    def build(*args: Any) -> RankLearner:
        learner = build_learner(*args)
        backbone: Any = learner.model.backbone
        swap(*backbone.model.language_model.layers[1:3])
        return learner

    with patch("trainer.setup.components.build_learner", build):
        yield ()


def flat_positions(*modules: str) -> Plant:
    """Plant positions that count tokens, in place of mRoPE, where modules ask for them."""

    def flat(ids_T: NDArray[np.int64], *_: Any, **__: Any) -> NDArray[np.int64]:
        return np.tile(np.arange(len(ids_T)), (3, 1))

    @contextmanager
    def plant(_: Path) -> Iterator[Sequence[str]]:
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(patch(f"{module}.mrope_positions", flat))
            yield ()

    return plant


def checkpoint(change: Callable[[Path], None]) -> Plant:
    """Plant something in a copy of the bundled checkpoint."""

    @contextmanager
    def plant(folder: Path) -> Iterator[Sequence[str]]:
        copy = folder / "checkpoint"
        shutil.copytree(STARTER_PATH, copy)
        change(copy)
        yield ("--model", str(copy))

    return plant


def clip_colours(folder: Path) -> None:
    """Give the checkpoint the normalisation of another family."""
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings["image_mean"] = [0.48145466, 0.4578275, 0.40821073]
    settings["image_std"] = [0.26862954, 0.26130258, 0.27577711]
    path.write_text(json.dumps(settings))


def change_template(old: str, new: str) -> Callable[[Path], None]:
    """Return what replaces a part of the checkpoint's chat template, which must be there."""

    def change(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{old!r} is not in {path}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    return change


OTHER_FAMILY = """{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message.content ~ '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""


def other_family(folder: Path) -> None:
    """Give the checkpoint a template with the headers of Llama 3."""
    (folder / "chat_template.jinja").write_text(OTHER_FAMILY, encoding="utf-8")


def large_shape(folder: Path) -> None:
    """Make the checkpoint one of 33 thousand million parameters, of which it has the configuration alone."""
    (folder / "model.safetensors").unlink()
    config = qwen3_vl_config("32b")
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(folder)


ZERO = '''"""Grades everything as wrong."""
from envs.geo3k.env import Geo3kEnv


class ZeroEnv(Geo3kEnv):
    def reward(self, final_text):
        return 0.0


def build_env(sample=None, args=None, **_):
    return ZeroEnv(sample, args)
'''
ZERO_ENTRY = """planted_zero:
  entry_point: planted_zero
  description: Grades everything as wrong.
  dataset: envs.geo3k.procedural:ProceduralGeo3k
  system_prompt: envs.geo3k.env:SYSTEM_PROMPT
  max_turns: 3
  tool_calls: last
"""


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Let modules and metadata of a folder be found."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def zero_grader(folder: Path) -> Iterator[Sequence[str]]:
    """Plant an environment that rewards nothing."""
    (folder / "planted_zero.py").write_text(ZERO)
    (folder / "registry.yaml").write_text(ZERO_ENTRY)
    with on_path(folder):
        yield ("--env", "planted_zero", "--registry", str(folder / "registry.yaml"))
    sys.modules.pop("planted_zero", None)


@contextmanager
def old_sglang(folder: Path) -> Iterator[Sequence[str]]:
    """Plant the metadata of an old sglang that asks for another torch; what is there of it starts no server."""
    info = folder / "sglang-0.4.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.9\nRequires-Dist: torch==2.7.1\n")
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()
    with on_path(folder):
        yield ("--engine", "sglang")


@contextmanager
def no_folder(folder: Path) -> Iterator[Sequence[str]]:
    """Plant a file where the folder of runs should be."""
    (folder / "runs").write_text("a file")
    yield ("--out", str(folder / "runs" / "mine"))


@contextmanager
def nothing(_: Path) -> Iterator[Sequence[str]]:
    """Plant nothing."""
    yield ()


#: The modules that ask for positions: the learner's, and that of the network, whose the engine's are.
ALL_PATHS = ("trainer.data.packing", "agents.model.policy")
SAID = "render(message.content or '')"
FAULTS: tuple[PlantedFault, ...] = (
    PlantedFault("a", "blind engine", "engine reads every image as grey", "sight of the engine", engine(BlindEngine)),
    PlantedFault(
        "b", "swapped weights, engine", "decoder layers 0 and 1 exchanged", "weights of the engine",
        engine(SwappedEngine),
    ),
    PlantedFault(
        "b", "swapped weights, tower", "vision blocks 0 and 1 exchanged", "weights of the engine",
        engine(SwappedTowerEngine),
    ),
    PlantedFault(
        "b", "swapped weights, learner", "decoder layers 1 and 2 exchanged", "weights of the learner", swapped_learner
    ),
    PlantedFault(
        "c", "flat positions, learner", "learner counts tokens", "positions", flat_positions("trainer.data.packing")
    ),
    PlantedFault(
        "c",
        "flat positions everywhere",
        "learner and engine count tokens",
        "forward pass",
        flat_positions(*ALL_PATHS),
    ),
    PlantedFault(
        "d", "wrong preprocessing", "preprocessor_config.json with CLIP's colours", "image preprocessing",
        checkpoint(clip_colours),
    ),
    PlantedFault(
        "d", "pixels not normalised", "engine reads pixels from 0 to 1", "agreement", engine(UnnormalisedEngine)
    ),
    PlantedFault(
        "e", "stale session", "open sessions keep old keys and values", "caches after new weights",
        engine(StaleSessionEngine),
    ),
    PlantedFault(
        "e", "stale prefix cache", "prompts read once are never read again", "caches after new weights",
        engine(StalePrefixEngine),
    ),
    PlantedFault(
        "e", "stale images", "images encoded once are never encoded again", "caches after new weights",
        engine(StaleImagesEngine),
    ),
    PlantedFault(
        "f", "template without newline", "no newline after <|im_end|>", "chat template",
        checkpoint(change_template(r"'<|im_end|>\n'", "'<|im_end|>'")),
    ),
    PlantedFault(
        "f", "template that rewrites", "earlier turns in lower case", "chat template",
        checkpoint(change_template(SAID, f"({SAID} if loop.last else {SAID} | lower)")),
    ),
    PlantedFault("f", "template of Llama", "headers and <|eot_id|>", "chat template", checkpoint(other_family)),
    PlantedFault("g", "grader of zeros", "environment that rewards nothing", "gold answers", zero_grader),
    PlantedFault("h", "too little memory", "config.json of Qwen3-VL-32B", "memory", checkpoint(large_shape)),
    PlantedFault("i", "bad versions", "metadata of sglang 0.4.9, asking for torch 2.7.1", "versions", old_sglang),
    PlantedFault("j", "unwritable folder", "--out below a regular file", "run folder", no_folder),
)  # fmt: skip
CONTROL = PlantedFault("", "control", "nothing planted", "", nothing)


def examine(planted: PlantedFault, *flags: str) -> list[Finding]:
    """Plant a fault, have the doctor look, and take it out again."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        place = Path(folder)
        with planted.plant(place) as own:
            out = () if "--out" in own else ("--out", str(place / "out"))
            findings = diagnose(parse(DoctorConfig, last_of_each([*FLAGS, *own, *out, *flags]), "planted_faults", ""))
        return [
            replace(f, found=f.found.replace(folder, "FOLDER"), fix=f.fix.replace(folder, "FOLDER")) for f in findings
        ]


def odd(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are warnings or faults."""
    return [finding for finding in findings if finding.status in ("warning", "fault")]
