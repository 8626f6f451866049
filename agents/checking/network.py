"""Checks of what a network decides: that the engine draws from its probabilities, reports them and takes new weights.

Each check returns what was seen, or raises `Broken` or `NotApplicable`. Legend: N places of new tokens, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from agents.checking.scores import Update, check_gap, check_sight, check_update, text_gap
from agents.checking.trial import Trial, Turn
from agents.types import Completion, GenerateRequest, SamplingDistribution
from envs.checks import Broken, NotApplicable, Verdict

#: Turns that are drawn for the check of the distribution.
NUM_DRAWN = 24
#: Shares of the distribution, counted from its least likely token, whose tokens are counted.
TAILS = (0.5, 0.2, 0.1, 0.05, 0.02)
#: An engine that draws rightly is called wrong once in a hundred thousand checks.
CHANCE = 1e-5 / (2 * len(TAILS))
#: How many of the most likely tokens are suppressed.
NUM_SUPPRESSED = 8


async def check_score(trial: Trial) -> Verdict:
    """`score` returns the log-prob of each id but the first, at temperature 1 and with nothing suppressed."""
    gaps = []
    for prompt in trial.prompts():
        got = await trial.engine.score(prompt.ids, prompt.images)
        if not isinstance(got, np.ndarray) or got.shape != (len(prompt.ids) - 1,) or got.dtype != np.float32:
            raise Broken(f"{got!r:.100} for {len(prompt.ids)} ids", "return float32, one number less than ids")
        wanted = trial.network.logprobs(prompt.ids, prompt.images)
        gaps.append(text_gap(prompt.ids, got, wanted, trial.renderer.image_token_id))
    return check_gap(max(gaps), trial.network.dtype, "the network's")


async def check_images(trial: Trial) -> Verdict:
    """Another image of the same size moves the log-probs after it."""
    if not trial.reads_images:
        raise NotApplicable("a model without images")
    return await check_sight(trial.engine.score, trial.with_image(), trial.renderer)


async def check_log_probs(trial: Trial) -> str:
    """Log-probs of turns are the network's, with and without images, at temperature 1 and 0.7."""
    fix = "report the log-probs of the distribution that is drawn from, from the weights, positions and pixels given"
    requests = [trial.request(prompt, seed=number) for number, prompt in enumerate(trial.prompts())]
    seen = trial.compare(await trial.write_all(requests), fix)
    cooler = await trial.write_all([trial.request(prompt, temperature=0.7) for prompt in trial.prompts()])
    undivided = SamplingDistribution(1.0, cooler[0][0].sampling.suppressed_ids)
    if trial.network.gap(*cooler[0], undivided) < trial.network.bound:
        raise Broken(
            "they are those of temperature 1 at 0.7", "divide the logits by the temperature before the softmax"
        )
    trial.compare(cooler, fix)
    return seen


async def check_greedy(trial: Trial) -> str:
    """Temperature 0 takes the most likely token and reports its log-prob at temperature 1."""
    turns = await trial.write_all([trial.request(prompt, temperature=0.0) for prompt in trial.prompts()])
    for request, completion in turns:
        table_NV = trial.network.table(request, completion.ids)
        own_N = table_NV[torch.arange(len(completion.ids)), torch.tensor(completion.ids)]
        short = float((table_NV.max(-1).values - own_N).max())
        # Rounding may exchange two tokens that are nearly as likely.
        if short > 4 * trial.network.bound:
            found = f"a token was taken that is {short:.2g} nats less likely than the most likely one"
            raise Broken(found, "take the most likely token at temperature 0")
    return trial.compare(turns, "report log-probs of temperature 1 at temperature 0")


async def check_drawing(trial: Trial) -> str:
    """Tokens are drawn with the probabilities that are reported: no top-k, top-p, penalty or other temperature."""
    requests = [trial.request(trial.prompt(n), temperature=2.0, seed=100 + n) for n in range(NUM_DRAWN)]
    ranks = np.concatenate([_ranks(trial, *turn) for turn in await trial.write_all(requests)])
    counts = {tail: int((ranks > 1 - tail).sum()) for tail in TAILS}
    chances = {tail: _chance(counts[tail], len(ranks), tail) for tail in TAILS}
    worst = min(TAILS, key=lambda tail: chances[tail])
    found = (
        f"{counts[worst]} of {len(ranks)} tokens are from the least likely {100 * worst:g} % of the distribution, "
        f"{worst * len(ranks):.0f} are expected"
    )
    if chances[worst] < CHANCE:
        fix = "draw from the whole distribution: top_p 1, no top_k, no penalty, no defaults of generation_config.json"
        raise Broken(found, fix)
    return f"at worst, {found}"


def _ranks(trial: Trial, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Return for each token the probability of all more likely ones, and a random part of its own: uniform in [0, 1].

    The randomised probability integral transform; Czado et al., Biometrics 65 (2009), section 2.
    """
    table_NV = trial.network.table(request, completion.ids).double()
    own_N1 = table_NV.gather(-1, torch.tensor(completion.ids)[:, None])
    more_N = torch.where(table_NV > own_N1, table_NV.exp(), 0.0).sum(-1)
    part_N = np.random.default_rng(request.seed).random(len(completion.ids))
    return more_N.numpy() + part_N * own_N1[:, 0].exp().numpy()


def _chance(count: int, total: int, share: float) -> float:
    """Return how likely so few, or so many, of `total` draws are, the smaller of both.

    >>> _chance(0, 10, 0.5)
    0.0009765625
    """
    each = [math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(total + 1)]
    return min(sum(each[: count + 1]), sum(each[count:]))


async def check_seeds(trial: Trial) -> str:
    """Other seeds give other turns. One seed should give one turn."""
    # Engines may batch turns that are written at once in any order, so these are written one after the other.
    requests = [trial.request(trial.prompt(3), temperature=2.0, seed=seed) for seed in (1, 1, 2, 3)]
    first, again, *others = [(await trial.write(request)).ids for request in requests]
    if all(ids == first for ids in others):
        raise Broken(f"seeds 1, 2 and 3 give the same {len(first)} tokens", "draw with the request's seed")
    if first != again:
        return "other seeds give other tokens; one seed does not repeat, so runs will not"
    return "one seed gives the same tokens again, others give others"


async def check_suppressed(trial: Trial) -> str:
    """Suppressed ids, here the most likely ones, are never drawn, and the others share their probability."""
    prompt = trial.prompt()
    row_V = trial.network.table(trial.request(prompt), [0])[0]
    likely = tuple(row_V.topk(NUM_SUPPRESSED).indices.tolist())
    turns: list[Turn] = []
    for temperature in (0.0, 1.0):  # one after the other: a batch has one temperature
        turns += await trial.write_all([trial.request(prompt, temperature, n, suppressed_ids=likely) for n in range(3)])
    for request, completion in turns:
        if drawn := set(request.sampling.suppressed_ids) & set(completion.ids):
            found = f"ids {sorted(drawn)} were drawn at temperature {request.sampling.temperature:g}"
            raise Broken(found, "set the logits of suppressed_ids to -inf before drawing")
    return trial.compare(turns, "suppress before the softmax, so that the other tokens' probabilities add up to 1")


async def check_new_weights(trial: Trial) -> Verdict:
    """After an update everything is the new network's: scores, turns, open sessions, images seen before."""
    other = trial.other_network
    network = trial.network
    prompt = trial.with_image()

    async def run() -> float:
        nonlocal network
        async with trial.paused():
            await trial.push(other)
        network = other
        old = trial.network.logprobs(prompt.ids, prompt.images)
        new = other.logprobs(prompt.ids, prompt.images)
        return text_gap(prompt.ids, old, new, trial.renderer.image_token_id)

    async def turn_gap(request: GenerateRequest, completion: Completion) -> float:
        version = trial.engine.weight_version
        if completion.versions != ((version, len(completion.ids)),):
            found = f"versions {completion.versions} of a turn by weights {version}"
            raise Broken(found, "stamp each token with the version that wrote it")
        return network.gap(request, completion)

    async with trial.first_weights_again():
        # The network of the moment, which `run` changes.
        update = Update(run, lambda ids, images: network.score(ids, images), turn_gap, trial.network.dtype)
        return await check_update(trial.engine, prompt, trial.request(prompt), update, trial.renderer)
