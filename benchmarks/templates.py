"""Every chat template, boundary for boundary: `python -m benchmarks.templates`.

A script plays episodes of up to four turns with awkward texts on both sides, several messages a turn, tools, and
images in prompts and answers. Before every turn the stream is compared with the model's own template, rendered over
all messages from the first one on (`agents.rollout.template_check`). Qwen's tokenizer and templates are used if found.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.manager import rollout_groups
from agents.rollout.template_check import template_mismatch
from agents.types import GenerateRequest, SamplingParams
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.spec import EnvLimits
from envs.tool_env import ToolEnv
from envs.types import Message, Sample
from tests.agents.rendering.template_cases import OWN_TEMPLATES, QWEN_TEMPLATES, TEXT_ONLY, renderer_for

NUM_EPISODES = 400
#: Words that templates and tokenizers stumble over.
WORDS = (
    "x", " ", "\n", "\n\n", "<think>", "</think>", "<tool_call>", "<|im_end|>", "<|image_pad|>", "\\boxed{7}", "∠ABC",
    "12,5 cm²", "😀", "é", '{"a": [1, "b"]}', "'", "&amp;", "user\n", "None", "{{ x }}", "\t", "한국",
)  # fmt: skip


#: What a model writes: control tokens end its turn, or break the stream, and are no text.
MODEL_WORDS = tuple(word for word in WORDS if not word.startswith("<|"))


def words(rng: random.Random, choices: Sequence[str] = WORDS) -> str:
    """Return a random text, blank at its ends as often as not."""
    return "".join(rng.choice(choices) for _ in range(rng.randint(0, 8)))


def content(rng: random.Random, shows: bool) -> str | list[dict[str, Any]]:
    """Return a text, or texts and images mixed."""
    if not shows or rng.random() < 0.5:
        return words(rng)
    parts: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 3)):
        size = (rng.randint(20, 200), rng.randint(20, 200))
        image = {"type": "image", "image": Image.new("RGB", size, (rng.randint(0, 255), 0, 0))}
        parts.append(image if rng.random() < 0.4 else {"type": "text", "text": words(rng)})
    return parts


class AwkwardEnv(ToolEnv):
    """Answers every turn with one to three awkward messages."""

    def __init__(self, sample: Sample, args: Any, shows: bool) -> None:
        super().__init__(sample, args)
        self._rng, self._shows = random.Random(sample.id), shows

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Never done."""
        return {"obs_str": "awkward"}, False, {}

    def format_observation(self, observation: dict[str, Any]) -> list[Message]:
        """Return the messages."""
        roles = [self._rng.choice(("tool", "user")) for _ in range(self._rng.randint(1, 3))]
        return [{"role": role, "content": content(self._rng, self._shows)} for role in roles]

    def reward(self, final_text: str) -> float:
        """Return nothing of interest."""
        return 0.0


def play(renderer: Renderer, shows: bool, seed: int) -> dict[str, int]:
    """Play the episodes; return what was counted."""

    def write(turn: int, request: GenerateRequest) -> str:
        return words(random.Random(f"{request.seed}/{turn}"), MODEL_WORDS)

    rng = random.Random(seed)
    samples = []
    for index in range(NUM_EPISODES):
        prompt: tuple[Message, ...] = ({"role": "user", "content": content(rng, shows)},)
        system = ({"role": "system", "content": words(rng)},) if rng.random() < 0.5 else ()
        samples.append(Sample(f"{seed}/{index}", (*system, *prompt), label=""))
    engine = ScriptedEngine(renderer.tokenizer, write, context_length=100_000)
    sampling = SamplingParams(stop_ids=renderer.stop_ids)
    loop = Episode(engine, renderer, Limits(4, 50_000, EnvLimits(inline=True), check_template_every=0), sampling)
    groups = asyncio.run(
        rollout_groups(loop, samples, lambda sample, args: AwkwardEnv(sample, args, shows), None, 1, seed)
    )
    trajectories = [group.trajectories[0] for group in groups]
    assert all(len(t.turns) >= 1 for t in trajectories), next(t.error for t in trajectories if not t.turns)
    mismatches = [template_mismatch(t.streams[0], renderer) for t in trajectories]
    return {
        "episodes": len(trajectories),
        "boundaries": sum(len(t.turns) for t in trajectories),
        "differing": sum(rule is not None for rule in mismatches),
        "pictures": sum(len(t.images) for t in trajectories),
        "tokens": int(np.sum([len(t.ids_T) for t in trajectories])),
        "invalid": sum(not t.end_reason.is_valid for t in trajectories),
    }


def main() -> None:
    """Run every template."""
    at = commit()
    names = (*OWN_TEMPLATES, *QWEN_TEMPLATES)
    rows = {}
    for name in names:
        renderer = renderer_for(name)
        rows[name] = play(renderer, shows=name not in TEXT_ONLY and renderer.images is not None, seed=1)
        print(name, rows[name], flush=True)
    columns = list(next(iter(rows.values())))
    print(markdown(["template", *columns], [[name, *row.values()] for name, row in rows.items()]))
    path = RESULTS / "templates.json"
    write_result(path, "python -m benchmarks.templates", {"rows": rows}, at, ("transformers", "tokenizers"))


if __name__ == "__main__":
    main()
