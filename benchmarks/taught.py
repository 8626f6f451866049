"""Teaches a small network of another architecture to read figures and to look at parts of them, for some minutes.

`python -m benchmarks.taught --shape mixture --minutes 6 --out taught` writes a checkpoint folder `taught/mixture`. The
network begins with the bundled starter's tokenizer and vision tower; its decoder is random. Lessons are those of
`starter`, made by other processes while the network learns, so no lesson is seen twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import torch

from agents.model import STARTER_PATH
from agents.model.architectures import ModelFacts
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.conversation import ConversationRenderer
from agents.types import SamplingParams
from envs.datasets.conversations import Conversation
from envs.datasets.prompts import DEFAULT_KEYS, read_messages
from envs.images import ImageAccess
from starter.architecture import SHAPES, write_beginner
from starter.lessons import Lessons
from starter.recipes import FEW, Stage
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.config.sft import LIKELIHOOD
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.sft.data import training_samples
from trainer.types import TrainingSample

KEYS = dataclasses.replace(DEFAULT_KEYS, prompt="messages")
#: Lessons that exist; more than a run sees.
NUM_LESSONS = 10_000_000
#: From which share of the time on each is taught. Who reads nothing learns texts by heart, so reading comes first.
STAGES = (
    (0.0, Stage("digits", NUM_LESSONS, {"numbers": 1.0}, rung=4)),
    (0.08, Stage("read", NUM_LESSONS, {"numbers": 0.4, "figure": 0.6}, problems=FEW)),
    (0.3, Stage("solve", NUM_LESSONS, {"figure": 0.2, "zoom": 0.8}, problems=FEW, zoomed=FEW[0], blind_frac=0.1)),
)
Batch = list[TrainingSample]
#: Steps in which the learning rate rises; from then on it falls to 0 with the time that is left.
WARMUP = 20


@functools.cache
def _conversations() -> tuple[ConversationRenderer, ModelFacts]:
    """Return what turns lessons into streams: the same for all shapes, which share tokenizer and image processor."""
    renderer = Renderer.from_checkpoint(STARTER_PATH)
    return ConversationRenderer(renderer, renderer.tokenizer.model_max_length), ModelFacts.load(STARTER_PATH)


def make_batch(stage: Stage, seed: int, first: int, size: int) -> Batch:
    """Return the samples of lessons `first` to `first + size`; one that cannot be drawn is left out."""
    conversations, facts = _conversations()
    lessons = Lessons(stage, seed)
    streams = []
    for index in range(first, first + size):
        if line := lessons.line(index):
            row = json.loads(line)
            messages = tuple(read_messages(row, KEYS, f"lesson {index}", ImageAccess(Path())))
            streams.append(conversations.stream(Conversation(f"lesson {index}", messages, row.get("tools", ()))))
    return training_samples(streams, facts.image_token_id, facts.merge_size)


def batches(
    stage: Stage, seed: int, size: int, pool: ProcessPoolExecutor, ahead: int
) -> Iterator[list[TrainingSample]]:
    """Yield batches without end; `ahead` of them are made meanwhile."""
    coming: list[Future[Batch]] = []
    for number in itertools.count():
        coming.append(pool.submit(make_batch, stage, seed, number * size, size))
        if number >= ahead:
            yield coming.pop(0).result()


def teach(args: argparse.Namespace, folder: Path) -> list[float]:
    """Teach until the time is up, write the checkpoint, and return the loss of each step."""
    write_beginner(folder, SHAPES[args.shape], args.seed)
    model = PolicyModel.load(folder)
    tower = model.architecture.vision_tower(model.backbone)
    assert tower is not None, "the shapes have vision towers"
    # The first gradients, of a decoder that knows nothing, would undo what these have learnt; mergers are new.
    for taught in (tower.patch_embed, tower.pos_embed, tower.blocks):
        taught.requires_grad_(False)
    learner = FSDPLearner(
        model,
        SamplingParams(),
        WARMUP,
        OptimConfig(lr=args.lr, warmup_steps=WARMUP, schedule="cosine", beta2=0.98, weight_decay=0.05),
        LIKELIHOOD,
        LearnerConfig(max_tokens_per_microbatch=args.max_tokens),
        args.device,
        torch.bfloat16 if args.device == "cuda" else torch.float32,
    )
    losses: list[float] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.num_workers, context) as pool:
        sources = [batches(stage, args.seed, args.batch_size, pool, 2 * args.num_workers) for _, stage in STAGES]
        began = time.perf_counter()
        while (spent_frac := (time.perf_counter() - began) / (60 * args.minutes)) < 1:
            place = sum(begins <= spent_frac for begins, _ in STAGES) - 1
            # What is left of the steps is what is left of the time, however long a step of each stage takes.
            learner.num_steps = max(WARMUP, round(len(losses) / max(spent_frac, 1e-6)))
            stats = learner.step([next(sources[place])])
            losses.append(stats.loss)
            if len(losses) % args.log_every == 0:
                spent_s = time.perf_counter() - began
                name = STAGES[place][1].name
                print(f"{spent_s:.0f} s, step {len(losses)}, {name}: loss {stats.loss:.3f}", flush=True)
        pool.shutdown(wait=False, cancel_futures=True)
    learner.save(folder, torch.bfloat16)
    return losses


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="mixture", choices=list(SHAPES))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--batch-size", type=int, default=128, help="lessons of a step")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--max-tokens", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--num-workers", type=int, default=7, help="processes that make lessons")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("taught"))
    args = parser.parse_args()
    folder = args.out / args.shape
    losses = teach(args, folder)
    print(f"{folder}: {len(losses)} steps, loss {losses[0]:.2f} to {sum(losses[-10:]) / len(losses[-10:]):.3f}")


if __name__ == "__main__":
    main()
