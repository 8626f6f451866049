"""Every architecture, token for token: `python -m benchmarks.architectures`.

For each, a tiny network with random weights and the real tokenizer and chat template of its family: whether our streams
are those of its own processor (prompts, and whole conversations at every turn boundary), and how far the log-probs
of the engine are from the trainer's and from those of Transformers' own forward pass over the same stream.

In bfloat16 a mixture of experts may route a token otherwise in engine and trainer where two experts are all but equal;
with these few, large and random experts such a token then differs by nats.

Legend: T tokens of one stream, V vocabulary, N model tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from agents.engines.hf import HFEngine
from agents.engines.scripted import ScriptedEngine
from agents.model import STARTER_PATH
from agents.model.architectures import ARCHITECTURES
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import sampling_logprobs
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.manager import rollout_groups
from agents.types import GenerateRequest, SamplingParams, Trajectory, TrajectoryGroup
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from envs.env import Env
from envs.types import Message, Sample, message_images
from tests.tiny_models import MODEL_TYPES, image_processor, write_tiny_model
from trainer.algorithms.advantages import compute_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import training_samples
from trainer.learner.fsdp_learner import FSDPLearner

#: The file of each architecture in the folder of templates; there is none with Llama's or GLM's tokenizer.
TEMPLATES = {
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "glm4v": "qwen3_vl",
    "qwen3": "qwen3",
    "qwen2": "qwen2_5",
    "llama": "qwen2_5",
}
NUM_PROMPTS = 40
GROUP_SIZE = 4
MAX_TURNS = 3
#: What a scripted model writes. Thinking is left out: a stream keeps it, where Qwen3's template drops it afterwards.
REPLIES = (
    "The answer is \\boxed{\\frac{7}{2}}.",
    'Let me check.\n<tool_call>\n{"name": "calc_score", "arguments": {"answer": "3.5"}}\n</tool_call>',
    "Ein Maß: 12,5 cm² – ∠ABC = 60°, 面积 😀",
    "x  =  2\n\n- a\n- b\n",
)
Played = list[TrajectoryGroup]


@dataclass(frozen=True)
class Gap:
    """Log-probs of sampled tokens, once from the engine and once from elsewhere: largest |d|, its p99, k3 KL (nats)."""

    max: float
    p99: float
    kl: float


@dataclass(frozen=True)
class Row:
    """One architecture. `prompts` and `boundaries` count those whose ids, pixels and grids are the processor's."""

    model_type: str
    template: str
    prompts: tuple[int, int] | None
    boundaries: tuple[int, int]
    episodes: int
    turns: int
    images: int
    model_tokens: int
    trainer_fp32: Gap
    trainer_bf16: Gap
    transformers_fp32: Gap
    seconds: float


def make_image(rng: np.random.Generator, most: int = 400) -> Image.Image:
    """Return an image of random pixels and sides."""
    height, width = rng.integers(20, most, 2)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


class TalkingEnv(Env):
    """Answers every turn: the first with a tool's text, later ones with the user's, an image in it for some models."""

    def __init__(self, seed: int, shows: bool) -> None:
        self._rng, self._shows, self._turn = np.random.default_rng(seed), shows, 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return nothing: the problem is in the prompt."""
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Return the next observation; never done."""
        self._turn += 1
        if self._turn == 1:
            return {"obs_str": f"Score {self._rng.random():.3f}."}, False, {}
        observation: dict[str, Any] = {"obs_str": "Look again, then answer.", "role": "user"}
        if self._shows:
            observation["multi_modal_data"] = {"image": [make_image(self._rng, 200)]}
        return observation, False, {}

    def reward(self, final_text: str) -> float:
        """Return something that differs between episodes."""
        return float(len(final_text) % 2)


def samples(shows: bool, count: int, seed: int) -> list[Sample]:
    """Return problems with one to three images each, or with none."""
    rng = np.random.default_rng(seed)
    result = []
    for index in range(count):
        images = [{"type": "image", "image": make_image(rng)} for _ in range(rng.integers(1, 4))] if shows else []
        text = {"type": "text", "text": f"Problem {index}: find ∠{'ABC'[index % 3]} to {index} digits."}
        messages: tuple[Message, ...] = ({"role": "user", "content": [*images, text]},)
        if index % 2:
            messages = ({"role": "system", "content": "Think step by step."}, *messages)
        result.append(Sample(id=str(index), prompt=messages, label=""))
    return result


class Reference:
    """Transformers' own way from a conversation to a network's input."""

    def __init__(self, model_type: str, renderer: Renderer) -> None:
        self.tokenizer, self.renderer = renderer.tokenizer, renderer
        self.processor = None
        if ARCHITECTURES[model_type].vision:
            import transformers

            kind: Any = getattr(transformers, ARCHITECTURES[model_type].processor)
            # It insists on a video processor, which needs torchvision and has no part in this.
            lenient = type(
                kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)}
            )
            images = image_processor(model_type)
            self.processor = lenient(image_processor=images, tokenizer=self.tokenizer, video_processor=None)
            # The vocabulary is Qwen's, whatever the family calls its placeholder.
            self.processor.image_token = "<|image_pad|>"
            self.processor.image_token_id = renderer.image_token_id

    def agrees(self, messages: Sequence[Any], num_prompt: int, ids: Sequence[int], images: Sequence[Any]) -> bool:
        """Whether the whole conversation, rendered and processed in one go, gives these ids, pixels and grids."""
        text = self.renderer.text(messages, num_prompt=num_prompt)
        if self.processor is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"] == list(ids)
        shown = message_images(messages)
        expected = self.processor(text=[text], images=shown or None, return_tensors="np")
        if list(expected["input_ids"][0]) != list(ids):
            return False
        if not shown:
            return not images
        grids = [image.grid_thw for image in images]
        pixels_PD = np.concatenate([image.pixels_PD for image in images])
        return expected["image_grid_thw"].tolist() == list(map(list, grids)) and np.array_equal(
            expected["pixel_values"], pixels_PD
        )


def equal_prompts(reference: Reference, renderer: Renderer, problems: Sequence[Sample]) -> tuple[int, int]:
    """Return how many prompts are the processor's, of how many."""
    equal = 0
    for problem in problems:
        rendered = renderer.prompt(problem.prompt)
        equal += reference.agrees(problem.prompt, len(problem.prompt), rendered.ids, rendered.images)
    return equal, len(problems)


def equal_boundaries(reference: Reference, trajectories: Sequence[Trajectory]) -> tuple[int, int]:
    """Return before how many turns the stream is what the processor makes of the conversation, of how many."""
    equal = total = 0
    for t in trajectories:
        num_prompt = next(k for k, message in enumerate(t.messages) if message["role"] == "assistant")
        places = [k for k, message in enumerate(t.messages) if message["role"] == "assistant"]
        for place, turn in zip(places, t.turns, strict=True):
            ids = t.ids_T[: turn.start].tolist()
            num_tokens = ids.count(reference.renderer.image_token_id)
            ends = np.cumsum([0, *(image.num_tokens for image in t.images)])
            images = t.images[: int(np.searchsorted(ends, num_tokens))]
            equal += reference.agrees(t.messages[:place], num_prompt, ids, images)
            total += 1
    return equal, total


def play(engine: Any, renderer: Renderer, sampling: SamplingParams, problems: Sequence[Sample], shows: bool) -> Played:
    """Play a group of episodes of every problem."""
    episode = Episode(engine, renderer, Limits(MAX_TURNS, max_new_tokens=2000), sampling)
    build: Callable[..., Env] = lambda sample, args: TalkingEnv(int(sample.id), shows)  # noqa: E731
    return asyncio.run(rollout_groups(episode, problems, build, None, GROUP_SIZE, seed=0))


def trainer_gap(played: Played, path: Path, dtype: torch.dtype, sampling: SamplingParams) -> Gap:
    """Return the gap that a trainer's step reports."""
    model = PolicyModel.load(path, dtype)
    learner = FSDPLearner(model, sampling, 1, dtype=dtype)
    algorithm = AlgorithmConfig()
    advantages = compute_advantages(played, algorithm)
    samples = training_samples(played, advantages, model.image_token_id, model.merge_size, algorithm, 2000)
    stats = learner.step([samples])
    return Gap(stats.logprob_gap_max, stats.logprob_gap_p99, stats.rollout_train_kl)


@torch.no_grad()
def transformers_gap(trajectories: Sequence[Trajectory], path: Path, model_type: str, sampling: SamplingParams) -> Gap:
    """Return the gap to Transformers' own forward pass over each whole stream, eager, with its own positions."""
    network: Any = ARCHITECTURES[model_type].read(path, dtype=torch.float32, attn_implementation="eager")
    network.eval()
    gaps: list[NDArray[np.float32]] = []
    for t in trajectories:
        ids_1T = torch.from_numpy(t.ids_T)[None]
        inputs: dict[str, Any] = {}
        if t.images:
            inputs["pixel_values"] = torch.from_numpy(np.concatenate([image.pixels_PD for image in t.images]))
            inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in t.images])
            inputs["mm_token_type_ids"] = (ids_1T == network.config.image_token_id).int()
        logits_TV = network(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False, **inputs).logits[
            0
        ]
        before = torch.from_numpy(np.flatnonzero(t.mask_T)) - 1
        logprobs_NV = sampling_logprobs(logits_TV[before], sampling.distribution)
        chosen_N = logprobs_NV.gather(-1, ids_1T[0, before + 1][:, None])[:, 0].numpy()
        gaps.append(chosen_N - t.logprobs_T[t.mask_T])
    gap_N = np.concatenate(gaps)
    size_N = np.abs(gap_N)
    return Gap(
        float(size_N.max()),
        float(np.quantile(size_N, 0.99)),
        float(np.mean(np.expm1(gap_N.astype(np.float64)) - gap_N)),
    )


def measure(model_type: str, tokenizers: Path | None, num_problems: int, folder: Path) -> Row:
    """Build, play and compare one architecture."""
    started = time.perf_counter()
    path, name, template = folder / model_type, "starter", None
    if tokenizers is not None:
        name = TEMPLATES[model_type]
        template = (tokenizers / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    write_tiny_model(path, model_type, tokenizers or STARTER_PATH, template=template)
    shows = ARCHITECTURES[model_type].vision
    renderer = Renderer.from_checkpoint(path)
    reference = Reference(model_type, renderer)
    prompts = equal_prompts(reference, renderer, samples(shows, NUM_PROMPTS, seed=1))
    problems = samples(shows, num_problems, seed=2)

    def script(turn: int, request: GenerateRequest) -> str:
        return REPLIES[(turn + request.seed // 1000) % len(REPLIES)]

    plain = SamplingParams(1.0, renderer.stop_ids, renderer.suppressed_ids)
    scripted = play(ScriptedEngine(renderer.tokenizer, script), renderer, plain, problems, shows)
    boundaries = equal_boundaries(reference, [t for group in scripted for t in group.trajectories])

    # Random weights hardly ever draw the stop token, so every 16th id ends a turn as well.
    stops = tuple(range(0, len(renderer.tokenizer), 16)) + renderer.stop_ids
    sampling = SamplingParams(1.0, stops, renderer.suppressed_ids)
    gaps = {}
    for dtype in (torch.bfloat16, torch.float32):
        played = play(HFEngine(PolicyModel.load(path, dtype)), renderer, sampling, problems, shows)
        gaps[dtype] = trainer_gap(played, path, dtype, sampling)
    trajectories = [t for group in played for t in group.trajectories]
    broken = [t.error for t in trajectories if not t.end_reason.is_valid]
    if broken:
        raise SystemExit(f"{model_type}: {len(broken)} broken episodes, the first: {broken[0]}")
    return Row(
        model_type=model_type,
        template=name,
        prompts=prompts,
        boundaries=boundaries,
        episodes=len(trajectories),
        turns=sum(len(t.turns) for t in trajectories),
        images=sum(len(t.images) for t in trajectories),
        model_tokens=sum(t.num_model_tokens for t in trajectories),
        trainer_fp32=gaps[torch.float32],
        trainer_bf16=gaps[torch.bfloat16],
        transformers_fp32=transformers_gap(trajectories, path, model_type, sampling),
        seconds=round(time.perf_counter() - started, 1),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--tokenizers",
        type=Path,
        default=ROOT.parent / "shared" / "qwen_tokenizer",
        help="folder with tokenizer.json and templates/*.jinja; the starter's where there is none (%(default)s)",
    )
    parser.add_argument("--problems", type=int, default=4, help=f"problems, {GROUP_SIZE} episodes each (%(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODEL_TYPES), choices=MODEL_TYPES, help="architectures")
    args = parser.parse_args()
    at = commit()
    torch.set_num_threads(1)
    tokenizers = args.tokenizers if (args.tokenizers / "tokenizer.json").exists() else None
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, tokenizers, args.problems, Path(folder)) for name in args.models]
    columns = (
        *(
            "architecture",
            "template",
            "prompts equal",
            "boundaries equal",
            "episodes",
            "turns",
            "images",
            "model tokens",
        ),
        *("trainer fp32 max, p99, k3", "trainer bf16 max, p99, k3", "Transformers fp32 max, p99, k3"),
    )
    print(markdown(columns, [_cells(row) for row in rows]))
    figures = {
        "tokenizer": "qwen" if tokenizers else "starter",
        "seeds": {"weights": 0, "prompts": 1, "problems": 2, "rollout": 0},
        "rows": [asdict(row) for row in rows],
    }
    packages = ("torch", "transformers", "tokenizers", "pillow")
    if args.models != list(MODEL_TYPES):
        return  # what is kept is the whole table
    write_result(RESULTS / "architectures.json", "python -m benchmarks.architectures", figures, at, packages)


def _cells(row: Row) -> tuple[object, ...]:
    def share(counts: tuple[int, int] | None) -> str:
        return "-" if counts is None else f"{counts[0]}/{counts[1]}"

    def gap(value: Gap) -> str:
        return f"{value.max:.1e}, {value.p99:.1e}, {value.kl:.1e}"

    return (
        *(row.model_type, row.template, share(row.prompts), share(row.boundaries)),
        *(row.episodes, row.turns, row.images, row.model_tokens),
        *(gap(row.trainer_fp32), gap(row.trainer_bf16), gap(row.transformers_fp32)),
    )


if __name__ == "__main__":
    main()
