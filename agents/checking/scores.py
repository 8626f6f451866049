"""Questions that are asked of whatever scores a stream: an engine, a learner, or a network without either.

Do its log-probs equal another's? Does it see images? Does it use anything of older weights? `agents.check_engine` and
the doctor ask them.

Legend: T tokens of a stream, N text tokens after the first image.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from agents.engines.base import Engine
from agents.rendering.renderer import Rendered, Renderer
from agents.types import Completion, GenerateRequest, ProcessedImage
from envs.checks import Verdict, fault, ok, warning

#: Returns the log-prob, at temperature 1, of each id of a stream but the first.
Score = Callable[[Sequence[int], Sequence[ProcessedImage]], Awaitable[NDArray[np.float32]]]
#: Returns the mean |d| in nats between the log-probs of a written turn and the right ones.
TurnGap = Callable[[GenerateRequest, Completion], Awaitable[float]]

#: Largest mean |d| in nats that is rounding, by the dtype of computation. Rounding alone gives about 1e-6 in float32
#: and 0.005 in bfloat16; flat positions or a missing temperature give 0.1 and more.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.05}
#: Above this many bounds, log-probs are another network's or another stream's.
DIFFERENT = 4.0
#: A changed image must move the text by more than this many nats, and more than this many times the noise.
LEAST_SIGHT = 1e-6
NOISE_TIMES = 5.0
#: An image that moves the text by less than this, in nats, hardly matters to the network.
WEAK_SIGHT = 1e-3
#: New weights must move the log-probs by this, in nats, for the check of caches to mean anything.
LEAST_MOVE = 0.1
#: After an update the gap may be this share of the move, or `NOISE_TIMES` the gap before it. But an engine whose gap
#: was float32's rounding has no business with either: it may be off by its dtype's bound. In bfloat16 that is more than
#: its gap before, which is 0 where engine and learner read the stream alike: what is generated is computed otherwise.
SHARE = 0.1
EXACT = 1e-5


def text_gap(
    ids: Sequence[int], one: NDArray[np.float32], other: NDArray[np.float32], image_token_id: int | None
) -> float:
    """Return the mean |d| in nats over the text of a stream between two scores of it; inf where one is NaN."""
    # Nobody samples placeholders of images, so their log-probs may be anything.
    is_text = np.asarray(ids[1:]) != image_token_id
    return float(np.nan_to_num(np.abs(one - other)[is_text].mean(), nan=np.inf))


def check_gap(gap: float, dtype: str, whose: str) -> Verdict:
    """Return whether log-probs equal `whose`, given the mean |d| in nats.

    >>> check_gap(0.7, "float32", "Transformers'").found
    "log-probs of the text are 0.7 nats off Transformers' on average, at most 0.001 is rounding"
    """
    bound = BOUNDS[dtype]
    found = f"log-probs of the text are {gap:.2g} nats off {whose} on average, at most {bound:g} is rounding"
    fix = "look at positions, weights and image preprocessing"
    if gap > DIFFERENT * bound:
        return fault(found, fix)
    if gap > bound:
        return warning(found, fix)
    return ok(found)


async def check_sight(score: Score, stream: Rendered, renderer: Renderer) -> Verdict:
    """Return whether a changed image moves the log-probs of the text after it.

    The original stream is scored twice, which gives the noise. A network that moves no more than that is blind.
    """
    is_text_T = np.asarray(stream.ids) != renderer.image_token_id
    # Row n of the scores belongs to id n + 1; text before the first image cannot depend on it.
    places_N = np.flatnonzero(is_text_T[1:] & ~np.logical_and.accumulate(is_text_T)[1:])
    original_N = (await score(stream.ids, stream.images))[places_N]
    again_N = (await score(stream.ids, stream.images))[places_N]
    changed_N = (await score(stream.ids, changed_images(stream, renderer)))[places_N]
    return judge_sight(float(np.abs(again_N - original_N).mean()), float(np.abs(changed_N - original_N).mean()))


def changed_images(stream: Rendered, renderer: Renderer) -> tuple[ProcessedImage, ...]:
    """Return the images of a stream upside down, with inverted colours."""
    assert renderer.images is not None and stream.images, "there must be an image"
    changed = []
    for image in stream.images:
        assert image.resized is not None, "the image is needed to make a changed one"
        turned = ImageOps.invert(image.resized.transpose(Image.Transpose.ROTATE_180))
        changed.append(renderer.images.process(turned))
    return tuple(changed)


def judge_sight(noise: float, changed: float) -> Verdict:
    """Return whether images matter, by the mean |d| in nats of scoring again and of scoring with changed images.

    >>> judge_sight(noise=0.0, changed=0.0).found
    'blind: another image moves the text after it by 0 nats; noise 0'
    """
    if not np.isfinite([noise, changed]).all():
        return fault("log-probs after an image are not finite", "look at weights and image preprocessing")
    found = f"another image moves the text after it by {changed:.2g} nats; noise {noise:.1g}"
    if changed <= max(LEAST_SIGHT, NOISE_TIMES * noise):
        return fault(f"blind: {found}", "images do not reach the network: look at the engine's version and arguments")
    if changed < WEAK_SIGHT:
        return warning(found, "images hardly matter to this network: is its vision tower trained?")
    return ok(found)


@dataclass(frozen=True)
class Update:
    """How to change an engine's weights, and what its log-probs must then be, in networks that compute in `dtype`.

    `run` gives the engine new weights and returns how far they move the log-probs of the stream, in nats. `score` and
    `turn_gap` ask the network with the weights of the moment.
    """

    run: Callable[[], Awaitable[float]]
    score: Score
    turn_gap: TurnGap
    dtype: str


async def check_update(
    engine: Engine, stream: Rendered, request: GenerateRequest, update: Update, renderer: Renderer
) -> Verdict:
    """Return whether nothing of older weights is used after an update.

    Three caches are tried: encoded images (the same stream is scored again), prefixes (the same request in a new
    session), and the keys and values of a session that was open during the update.
    """

    async def gap() -> float:
        own = await engine.score(stream.ids, stream.images)
        return text_gap(stream.ids, own, await update.score(stream.ids, stream.images), renderer.image_token_id)

    before = await gap()
    async with engine.session() as session:
        first = await session.generate(request)
        moved = await update.run()
        suffix = renderer.suffix(({"role": "user", "content": "Go on."},), first.ids[-1])
        longer = replace(request, ids=(*request.ids, *first.ids, *suffix.ids), seed=request.seed + 1)
        second = await session.generate(longer)
    async with engine.session() as session:
        fresh = await session.generate(request)
    after = {
        "scored again": await gap(),
        "new session": await update.turn_gap(request, fresh),
        "open session": await update.turn_gap(longer, second),
    }
    return judge_update(before, moved, after, update.dtype)


def judge_update(before: float, moved: float, after: Mapping[str, float], dtype: str) -> Verdict:
    """Return whether an engine follows new weights, by mean |d| in nats before an update and after it for each cache.

    >>> judge_update(1e-7, 1.9, {"scored again": 0.8, "new session": 2e-7}, "float32").found
    'stale: after weights that moved log-probs by 1.9 nats the engine is off by 0.8 (scored again), 2e-07 (new session)'
    """
    shown = ", ".join(f"{gap:.1g} ({use})" for use, gap in after.items())
    found = f"after weights that moved log-probs by {moved:.2g} nats the engine is off by {shown}"
    most = BOUNDS[dtype]
    if before > EXACT:
        most = max(most, NOISE_TIMES * before, SHARE * min(moved, 1.0))
    if not np.isfinite([moved, *after.values()]).all() or max(after.values()) > most:
        return fault(f"stale: {found}", "load every new weight, and empty prefix and image caches with every update")
    if moved < LEAST_MOVE:
        return warning(f"{found}: too little to tell", "look at rollout_train_kl of the first steps")
    return ok(found)
