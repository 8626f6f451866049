"""Checks of what a network decides: that the engine draws from its probabilities, and reports them.

Each check returns what was seen, or raises `Broken` or `NotApplicable`. Legend: N places of new tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from agents.checking.image_gaps import changed_images, measure_image_gaps
from agents.checking.reference import LEAST_MOVE, text_gap
from agents.checking.trial import Trial
from agents.rendering.renderer import Rendered
from agents.types import Completion, GenerateRequest, SamplingDistribution
from envs.checks import Broken, NotApplicable

#: Turns that are drawn for the check of the distribution.
NUM_DRAWN = 24
#: Shares of the distribution, counted from its least likely token, whose tokens are counted.
TAILS = (0.5, 0.2, 0.1, 0.05, 0.02)
#: An engine that draws rightly is called wrong once in a hundred thousand checks.
CHANCE = 1e-5 / (2 * len(TAILS))
#: How many of the most likely tokens are suppressed.
NUM_SUPPRESSED = 8

Pairs = list[tuple[GenerateRequest, Completion]]


async def _written(trial: Trial, requests: list[GenerateRequest]) -> Pairs:
    return list(zip(requests, await trial.write_all(requests), strict=True))


async def check_log_probs(trial: Trial) -> str:
    """Log-probs of turns at temperature 1 are the network's, with and without images."""
    requests = [trial.request(prompt, seed=number) for number, prompt in enumerate(trial.prompts())]
    fix = "report the log-probs of the distribution that is drawn from, from the weights, positions and pixels given"
    return trial.compare(await _written(trial, requests), fix)


async def check_temperature(trial: Trial) -> str:
    """Log-probs at temperature 0.7 are those of the logits divided by 0.7."""
    pairs = await _written(trial, [trial.request(prompt, temperature=0.7) for prompt in trial.prompts()])
    request, completion = pairs[0]
    fix = "divide the logits by the temperature before the softmax"
    if (
        trial.network.gap(request, completion, replace(request.sampling.distribution, temperature=1.0))
        < trial.network.bound
    ):
        fix += "; they are those of temperature 1"
    return trial.compare(pairs, fix)


async def check_greedy(trial: Trial) -> str:
    """Temperature 0 takes the most likely token and reports its log-prob at temperature 1."""
    network = trial.network
    requests = [trial.request(prompt, temperature=0.0) for prompt in trial.prompts()]
    pairs = await _written(trial, requests)
    for request, completion in pairs:
        table_NV = network.table(request, completion.ids)
        own_N = table_NV[torch.arange(len(completion.ids)), torch.tensor(completion.ids)]
        short = float((table_NV.max(-1).values - own_N).max())
        if short > 4 * network.bound:
            found = f"a token was taken that is {short:.2g} nats less likely than the most likely one"
            raise Broken(found, "take the most likely token at temperature 0")
    return trial.compare(pairs, "report log-probs of temperature 1 at temperature 0")


async def check_drawing(trial: Trial) -> str:
    """Tokens are drawn with the probabilities that are reported: no top-k, top-p, penalty or other temperature."""
    requests = [trial.request(trial.prompt(n), temperature=2.0, seed=100 + n) for n in range(NUM_DRAWN)]
    ranks = np.concatenate([_ranks(trial, *pair) for pair in await _written(trial, requests)])
    fix = "draw from the whole distribution: top_p 1, no top_k, no penalty, no defaults of generation_config.json"
    counts = {tail: int((ranks > 1 - tail).sum()) for tail in TAILS}
    least = min(TAILS, key=lambda tail: _chance(counts[tail], len(ranks), tail))
    found = (
        f"{counts[least]} of {len(ranks)} tokens are from the least likely {100 * least:g} % of the distribution, "
        f"{least * len(ranks):.0f} are expected"
    )
    if _chance(counts[least], len(ranks), least) < CHANCE:
        raise Broken(found, fix)
    return f"at worst, {found}"


def _ranks(trial: Trial, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Return for each token the probability of all more likely ones, and a random part of its own: uniform in [0, 1].

    The randomised probability integral transform; Czado et al., Biometrics 65 (2009), section 2.
    """
    table_NV = trial.network.table(request, completion.ids).double()
    places = torch.arange(len(completion.ids))
    own_N1 = table_NV[places, torch.tensor(completion.ids)][:, None]
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


async def check_verbatim(trial: Trial) -> str:
    """Ids that the tokenizer would never choose for their text come back as drawn, and are read as they are."""
    encoder = trial.renderer.tokenizer
    decode = trial.renderer.decode
    requests = [trial.request(trial.prompt(n), temperature=2.0, seed=200 + n) for n in range(4)]
    pairs = await _written(trial, requests)

    def is_odd(completion: Completion) -> bool:
        return tuple(encoder(decode(completion.ids), add_special_tokens=False)["input_ids"]) != completion.ids

    fix = "keep ids as ids: never decode and encode them"
    trial.compare(pairs, fix)
    longer = [trial.following(request, completion) for request, completion in pairs]
    answers = await _written(trial, longer)
    for request, completion in answers:
        if completion.prompt_length != len(request.ids):
            raise Broken(f"read {completion.prompt_length} tokens of {len(request.ids)}", fix)
    seen = trial.compare(answers, fix)
    num_odd = sum(is_odd(completion) for _, completion in pairs)
    return f"{num_odd} of {len(pairs)} turns would be cut otherwise by the tokenizer; read again: {seen}"


async def check_suppressed(trial: Trial) -> str:
    """Suppressed ids, here the most likely ones, are never drawn, and the others share their probability."""
    prompt = trial.prompt()
    row_V = trial.network.table(trial.request(prompt), [0])[0]
    likely = tuple(row_V.topk(NUM_SUPPRESSED).indices.tolist())
    pairs: Pairs = []
    for temperature in (0.0, 1.0):  # one after the other: a batch has one temperature
        seeds = range(3)
        pairs += await _written(
            trial, [trial.request(prompt, temperature, seed, suppressed_ids=likely) for seed in seeds]
        )
    for request, completion in pairs:
        if drawn := set(request.sampling.suppressed_ids) & set(completion.ids):
            found = f"ids {sorted(drawn)} were drawn at temperature {request.sampling.temperature:g}"
            raise Broken(found, "set the logits of suppressed_ids to -inf before drawing")
    request, completion = pairs[-1]
    fix = "suppress before the softmax, so that the other tokens' probabilities add up to 1"
    if trial.network.gap(request, completion, SamplingDistribution()) < trial.network.bound:
        fix += "; they are those without suppression"
    return trial.compare(pairs, fix)


async def check_images(trial: Trial) -> str:
    """Another image of the same size moves the log-probs after it as it moves the network's."""
    if not trial.reads_images:
        raise NotApplicable("a model without images")
    network = trial.network
    request = trial.request(trial.prompt(2, [1]))
    written = await trial.write(request)
    stream = Rendered((*request.ids, *written.ids), request.images)
    wanted = (await measure_image_gaps(network.score, stream, trial.renderer)).changed
    trial.doing = "score(ids, images)"
    got = (await measure_image_gaps(trial.engine.score, stream, trial.renderer)).changed
    found = f"another image moves the text after it by {got:.2g} nats, in the network by {wanted:.2g}"
    if wanted < LEAST_MOVE * network.bound:
        raise NotApplicable(f"{found}: too little to tell")
    if not 0.5 * wanted < got < 2 * wanted:
        raise Broken(found, "give the pixels of the request's images to the network, and cache them by their digest")
    fix = "give the pixels of the request's images to the network when it writes, too"
    other = replace(request, images=changed_images(stream, trial.renderer))
    trial.compare([(request, written), (other, await trial.write(other))], fix)
    return found


async def check_score(trial: Trial) -> str:
    """`score` returns the log-prob of each id but the first, at temperature 1 and with nothing suppressed."""
    trial.doing = "score(ids, images)"
    longest = 0.0
    for prompt in [*trial.prompts(), replace(trial.prompt(), ids=trial.prompt().ids[:1])]:
        got = await trial.engine.score(prompt.ids, prompt.images)
        if not isinstance(got, np.ndarray) or got.shape != (len(prompt.ids) - 1,) or got.dtype != np.float32:
            if isinstance(got, np.ndarray):
                shown = f"{got.dtype} of shape {got.shape}"
            else:
                shown = type(got).__name__
            raise Broken(f"{shown} for {len(prompt.ids)} ids", "return float32, one number less than ids")
        if trial.reference is not None and len(got):
            wanted = await trial.reference.score(prompt.ids, prompt.images)
            longest = max(longest, text_gap(prompt.ids, got, wanted, trial.renderer.image_token_id))
    if trial.reference is None:
        return "as many numbers as ids but the first"
    found = f"mean |d| {longest:.1g} nats to the network, at most {trial.network.bound:g} is rounding"
    if not longest <= trial.network.bound:
        raise Broken(found, "score at temperature 1, with nothing suppressed, each id given those before it")
    return f"{len(trial.prompts())} streams, {found}"
