"""Teaches a network to call tools, from episodes that a script plays: for benchmarks that need several turns.

A network with fresh weights never ends a turn or calls a tool. A few dozen steps on these lessons and it does, with
arguments that are guesses: nothing else is learnt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import torch

from agents.engines.scripted import ScriptedEngine
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.manager import rollout_groups
from agents.types import GenerateRequest, SamplingLaw, TrajectoryGroup
from envs.checking.hostile import write_call
from envs.execution.load import load_env
from envs.problems import with_system_prompt
from envs.registry import get_spec
from envs.spec import EnvLimits
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import balanced_bins, collate, pack_rows, training_samples
from trainer.setup.components import sampling_params

#: Words of a turn's thoughts, a token each. A word tells its part, so the last one says all that the next depends on.
PARTS = ("the angle is of", "triangle circle length sum", "area radius answer find", "and a ratio height")


def thoughts(draw: random.Random, num_words: int) -> str:
    """Return words of all parts, one part after another, `num_words` in the mean: each part ends at random."""
    words: list[str] = []
    for part in PARTS if num_words else ():
        words.append(draw.choice(part.split()))
        while draw.random() > len(PARTS) / num_words:
            words.append(draw.choice(part.split()))
    return " ".join(words)


def lesson(turn: int, request: GenerateRequest, env: str, num_words: int = 0) -> str:
    """Return a turn: thoughts, then mostly one or two calls with random arguments, then a random answer."""
    draw = random.Random(f"{request.seed // 1000}/{turn}")
    text = thoughts(draw, num_words)
    if turn == 2 or draw.random() < (0.15, 0.5)[min(turn, 1)]:
        return f"{text}\\boxed{{{draw.randint(1, 99)}}}"
    if env == "geo3k":
        return text + write_call("calc_score", {"answer": str(draw.randint(1, 99))}, "hermes")
    left, top = 100 * draw.randint(0, 4), 100 * draw.randint(0, 4)
    box = {"left": left, "top": top, "right": left + 500, "bottom": top + 500}
    return text + write_call("zoom", box, "hermes")


def lessons(renderer: Renderer, env: str, count: int, seed: int, num_words: int = 0) -> list[TrajectoryGroup]:
    """Play `count` problems twice each by the script, with so many words of thoughts a turn."""
    spec = get_spec(env)
    samples = with_system_prompt(spec.load_dataset("train", count, seed), spec.load_system_prompt())
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: lesson(turn, request, env, num_words))
    limits = Limits(3, 300 + 9 * num_words, EnvLimits(inline=True))
    loop = Episode(engine, renderer, limits, sampling_params(renderer, 1.0))
    problems = [samples[index] for index in range(count)]
    return asyncio.run(rollout_groups(loop, problems, load_env(spec), spec.args(3, "hermes"), 2, seed))


def teach(
    model: PolicyModel, groups: Sequence[TrajectoryGroup], steps: int, lr: float, max_tokens: int = 8192
) -> list[float]:
    """Train on the scripted turns in place; return the mean loss per token of each step."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    algorithm, nothing = AlgorithmConfig(), [[0.0] * len(group.trajectories) for group in groups]
    samples = training_samples(groups, nothing, model.image_token_id, model.merge_size, algorithm, max_tokens)
    rows = pack_rows(samples, max_tokens)
    random.Random(0).shuffle(rows)
    bins = [each for start in range(0, len(rows), 16) for each in balanced_bins(rows[start : start + 16], max_tokens)]
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10) * (1.0 if step < steps // 2 else 0.3)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        # Under autocast, queries come in float32 where rotary positions are: for them, attention needs its buckets.
        batch = collate(bins[step % len(bins)], model.image_token_id, device, torch.float32)
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            loss = -model.token_scores(batch.packed, SamplingLaw())[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
    return losses
