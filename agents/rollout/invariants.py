"""The rules that every stream must keep before it may train.

A function here returns the first broken rule as one sentence with the turn, the tokens and both numbers, or None. It
never raises and changes nothing. The agent loop checks every trajectory, after each turn (`broken_turn`) and at the end
(`broken_invariant`). Whoever reads a recorded stream checks it again: it may be a stranger's.

Legend: T tokens of one stream, R of them with known experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, zip_longest
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from agents.rendering.renderer import Rendered, Renderer
from agents.rollout.stream import first_difference
from agents.types import Completion, Finish, GenerateRequest, RouteShape, TokenStream, Turn

if TYPE_CHECKING:
    from agents.recording.schema import TurnRecord

#: Rounding may lift a log-prob this far above 0.
MAX_LOGPROB = 1e-4
FINISHES = get_args(Finish)
#: Ids are 32-bit in every tokenizer.
MAX_ID = 2**31
MAX_SHOWN = 4


@dataclass(frozen=True)
class Vocabulary:
    """What the rules need to know about a model's tokens.

    `image_token_id` is the image placeholder, None where the model reads no images; one placeholder stands for
    `merge_size` x `merge_size` patches. The model must not sample `suppressed_ids`. `decode` gives the text of ids, for
    messages.

    Example::

        Vocabulary(image_token_id=5, merge_size=2, suppressed_ids=frozenset({3, 4, 5, 6}), decode=tokenizer.decode)
    """

    image_token_id: int | None
    merge_size: int
    suppressed_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str] = str

    @classmethod
    def of(cls, renderer: Renderer) -> Vocabulary:
        """Return the vocabulary of a renderer's model."""
        # A sampled placeholder would ask for pixels that are not there.
        suppressed_ids = frozenset(renderer.suppressed_ids)
        return cls(renderer.image_token_id, renderer.merge_size, suppressed_ids, renderer.tokenizer.decode)

    def show(self, ids: Sequence[int]) -> str:
        """Return a few ids with their text: ``[5 '<|image_pad|>', 31 'a']``."""
        return f"[{', '.join(f'{each} {self._spelled(each)}' for each in islice(ids, MAX_SHOWN))}]"

    def _spelled(self, each: int) -> str:
        try:
            return repr(self.decode([each]))
        except Exception:  # an id that no tokenizer knows
            return "(no token)"


def check_types(completion: object) -> None:
    """Raise TypeError for what is no completion: code that returns this is broken, not an episode."""
    if not isinstance(completion, Completion):
        raise TypeError(f"an engine's generate must return a Completion, got {type(completion).__name__}")
    kept = completion.kept_NK
    if kept is not None and not (isinstance(kept, np.ndarray) and kept.dtype == np.int32):
        raise TypeError(f"kept_NK of a Completion must be an array of int32, got {type(kept).__name__}")
    routes = completion.routes_RLK
    if routes is not None and not (
        isinstance(routes, np.ndarray) and routes.dtype in (np.uint8, np.uint16) and routes.ndim == 3
    ):
        rule = "must be an array (tokens, layers, experts) of uint8 or uint16"
        raise TypeError(f"routes_RLK of a Completion {rule}, got {type(routes).__name__}")


def broken_turn(number: int, request: GenerateRequest, completion: Completion) -> str | None:
    """Return the first rule that the completion of a turn breaks; None when all hold.

    Rules: the engine read the whole stream and nothing else. It wrote token ids, no more than requested, and at least
    one unless it was aborted. Each has a log-prob, and the runs of `versions` add up to their number. A turn that stops
    by itself ends with a stop id. With a `top_k`, there are so many ids that each token was drawn from.
    """
    c = completion
    num_tokens = len(completion.ids)
    if c.prompt_length != len(request.ids):
        return f"turn {number}: the engine read {c.prompt_length} tokens, the stream has {len(request.ids)}"
    if num_tokens > request.max_new_tokens:
        return f"turn {number}: the engine wrote {num_tokens} tokens, asked for {request.max_new_tokens} at most"
    if not num_tokens and c.finish != "abort":
        return f"turn {number}: the engine wrote no token and ended with {c.finish!r}"
    # Beyond, an array of 32 bits or an embedding would fail far from here.
    if num_tokens and not 0 <= min(c.ids) <= max(c.ids) < MAX_ID:
        return f"turn {number}: the engine wrote ids from {min(c.ids)} to {max(c.ids)}"
    if len(c.logprobs) != num_tokens:
        return f"turn {number}: {len(c.logprobs)} log-probs for {num_tokens} tokens"
    # Staleness and its corrections are counted by them.
    if rule := _broken_versions(number, c.versions, num_tokens):
        return rule
    if c.finish not in FINISHES:
        return f"turn {number}: the engine ended with {c.finish!r}, which is none of {', '.join(FINISHES)}"
    if c.finish == "stop" and c.ids[-1] not in request.sampling.stop_ids:
        return f"turn {number}: the engine stopped at id {c.ids[-1]}, the stop ids are {request.sampling.stop_ids}"
    return _broken_sets(number, request.sampling.top_k, c)


def broken_routes(
    number: int,
    request: GenerateRequest,
    c: Completion,
    shape: RouteShape | None,
    before: Completion | None = None,
) -> str | None:
    """Return the first rule that the experts of a turn break; None when all hold, or the turn was cut off.

    Rules: every token that the engine has read has as many experts in each layer as the network's `shape` says, each
    with the number of one. Tokens of the turn `before` have the same ones as there. Nobody gets any without asking.
    """
    if request.num_routed is None or shape is None:
        return None if c.routes_RLK is None else f"turn {number}: experts of tokens that nobody asked for"
    if c.finish == "abort":
        return None
    num_new = c.prompt_length + len(c.ids) - 1 - request.num_routed
    num_again = 0
    if c.routes_RLK is not None:
        num_again = min(request.num_routed, max(0, len(c.routes_RLK) - num_new))
    rule = wrong_experts(c.routes_RLK, num_again + num_new, shape)
    if rule is None and before and before.routes_RLK is not None and c.routes_RLK is not None:
        same = min(num_again, len(before.routes_RLK))
        if _mostly_differ(before.routes_RLK[len(before.routes_RLK) - same :], c.routes_RLK[num_again - same :][:same]):
            rule = f"the last {same} tokens of the turn before have other experts than they had there"
    return rule and f"turn {number}: {rule}"


def _mostly_differ(one_RLK: NDArray[np.uint8 | np.uint16], other_RLK: NDArray[np.uint8 | np.uint16]) -> bool:
    """Return whether most sets of experts differ.

    A few may: of two episodes with an equal turn, a server keeps what one of them has read, and routed a tenth of it
    otherwise because their batches were others.
    """
    differ_RL = (np.sort(one_RLK) != np.sort(other_RLK)).any(-1)
    # A layer without experts has zeros in both.
    has_experts_RL = one_RLK.any(-1) | other_RLK.any(-1)
    return bool(2 * differ_RL.sum() > has_experts_RL.sum())


def wrong_experts(routes_RLK: NDArray[np.uint8 | np.uint16] | None, num_tokens: int, shape: RouteShape) -> str | None:
    """Return why these are no experts of so many tokens; None if they are."""
    wanted = (num_tokens, shape.num_layers, shape.top_k)
    if routes_RLK is None or routes_RLK.shape != wanted:
        found = None if routes_RLK is None else routes_RLK.shape
        return f"experts of shape {found}, the tokens that were read need {wanted}"
    largest = routes_RLK.max(initial=0)
    if largest >= shape.num_experts:
        return f"a token went to expert {largest}, the network has {shape.num_experts}"
    return None


def expert_twice(routes_RLK: NDArray[np.uint8 | np.uint16]) -> str | None:
    """Return where a token has an expert twice, if one has: a trainer sends each token to different experts."""
    # Twenty times faster than sorting each token's experts.
    experts_KRL = np.ascontiguousarray(routes_RLK.transpose(2, 0, 1))
    is_twice_RL = np.zeros(routes_RLK.shape[:2], dtype=np.bool_)
    for one_RL, other_RL in combinations(experts_KRL, 2):
        is_twice_RL |= one_RL == other_RL
    # A layer without experts has zeros.
    is_twice_RL &= experts_KRL.any(0)
    if not is_twice_RL.any():
        return None
    token, layer = np.argwhere(is_twice_RL)[0].tolist()
    return f"token {token} goes to {sorted(routes_RLK[token, layer].tolist())} in layer {layer}"


def _broken_sets(number: int, top_k: int, c: Completion) -> str | None:
    if not top_k or not c.ids:
        return None
    shape = None if c.kept_NK is None else c.kept_NK.shape
    if c.kept_NK is None or shape != (len(c.ids), top_k):
        return f"turn {number}: {len(c.ids)} tokens need {top_k} ids each that they were drawn from, got {shape}"
    return _broken_kept(np.array(c.ids), c.kept_NK, f"turn {number}: ")


def _broken_kept(ids_N: NDArray[Any], kept_NK: NDArray[np.int32], where: str = "") -> str | None:
    if kept_NK.min(initial=0) < 0:
        return f"{where}a token was drawn from id {kept_NK.min()}"
    is_in_N = (kept_NK == ids_N[:, None]).any(-1)
    if is_in_N.all():
        return None
    place = int(np.flatnonzero(~is_in_N)[0])
    return f"{where}token {place + 1}, id {ids_N[place]}, is none of the ids that it was drawn from"


def in_stream(number: int, rule: str) -> str:
    """Return a rule with the number of the stream that breaks it, from 1; most episodes have the first one alone."""
    if number == 1:
        return rule
    return f"stream {number}: {rule}"


def broken_invariant(
    stream: TokenStream, vocabulary: Vocabulary, pieces: Sequence[Rendered | Completion] = ()
) -> str | None:
    """Return the first rule that a finished stream breaks; None when all hold.

    Rules: those of `broken_stream`. The model sampled no suppressed id. Each image has one unbroken run of
    placeholders, as long as its grid says, in order.

    `pieces` are all tokens that were read and written, in order. With them, two more rules: the stream is these pieces
    and nothing else, and each turn begins where the engine's own count of its prompt ends.
    """
    return (
        broken_stream(stream)
        or _broken_samples(stream, vocabulary)
        or _broken_images(stream, vocabulary)
        or (_broken_pieces(stream, vocabulary, pieces) if pieces else None)
    )


def broken_stream(stream: TokenStream) -> str | None:
    """Return the first rule that a stream breaks, of those that need no vocabulary; None when all hold.

    Rules: those of `broken_spans`. The first turn follows the prompt. Log-probs are finite, at most 0, and 0 outside
    the mask. Each token is one of the ids that it was drawn from. Experts are known of all tokens but the last one of
    the last turn and those after it, or of none; no token has one twice in a layer.
    """
    rule = _broken_lengths(stream) or _broken_start(stream) or _broken_turns(stream) or _broken_logprobs(stream)
    if rule is None and stream.kept_NK is not None:
        rule = _broken_kept(stream.ids_T[stream.mask_T], stream.kept_NK)
    if rule is None and stream.routes_RLK is not None:
        rule = _broken_rows(stream, len(stream.routes_RLK)) or expert_twice(stream.routes_RLK)
    return rule


def broken_spans(stream: TokenStream) -> str | None:
    """Return the rule that the places of turns and mask break; None when all hold.

    Rules: ids, mask and log-probs have one length. Turns follow the prompt in order and are exactly the masked tokens;
    the runs of versions add up to each turn. These hold of every stream, also of one that ended as `invalid_stream`.
    """
    return _broken_lengths(stream) or _broken_turns(stream)


def _broken_lengths(t: TokenStream) -> str | None:
    if len(t.ids_T) == len(t.mask_T) == len(t.logprobs_T):
        return None
    return f"lengths differ: {len(t.ids_T)} ids, {len(t.mask_T)} mask, {len(t.logprobs_T)} logprobs"


def _broken_rows(t: TokenStream, num_routed: int) -> str | None:
    num_read = t.turns[-1].end - 1 if t.turns else 0
    if num_routed == num_read:
        return None
    return f"experts of {num_routed} tokens, {num_read} were read by the end of the last turn"


def _broken_start(t: TokenStream) -> str | None:
    if t.turns and t.turns[0].start != t.prompt_length:
        return f"turn 1: begins at {t.turns[0].start}, the prompt ends at {t.prompt_length}"
    return None


def _broken_turns(t: TokenStream) -> str | None:
    length = len(t.ids_T)
    cursor = t.prompt_length
    if not 0 <= cursor <= length:
        return f"a prompt of {cursor} tokens in a stream of {length}"
    # Built from the turns alone, to be compared with the mask.
    spans = np.zeros(length, dtype=np.bool_)
    for number, turn in enumerate(t.turns, 1):
        if not cursor <= turn.start <= turn.end <= length:  # an aborted turn may be empty
            return f"turn {number}: span {turn.start}:{turn.end} after {cursor} in a stream of {length}"
        if rule := _broken_versions(number, turn.versions, turn.end - turn.start):
            return rule
        spans[turn.start : turn.end] = True
        cursor = turn.end
    if spans.tobytes() != t.mask_T.tobytes():  # several times faster than comparing short arrays
        return f"mask covers {int(t.mask_T.sum())} tokens, the turns {int(spans.sum())}"
    return None


def _broken_versions(number: int, versions: Sequence[tuple[int, int]], num_tokens: int) -> str | None:
    total = 0
    for _, count in versions:
        total += count if count >= 0 else math.inf
    if total == num_tokens:
        return None
    return f"turn {number}: versions {tuple(versions)} do not add up to the {num_tokens} tokens of the turn"


def _broken_samples(t: TokenStream, vocabulary: Vocabulary) -> str | None:
    if vocabulary.suppressed_ids.isdisjoint(t.ids_T[t.mask_T].tolist()):
        return None
    places = np.flatnonzero(t.mask_T & np.isin(t.ids_T, list(vocabulary.suppressed_ids)))
    number = _turn_of(t.turns, int(places[0]))
    ids = vocabulary.show(t.ids_T[places].tolist())
    return f"turn {number}: the model sampled suppressed ids: {ids} at {places[:MAX_SHOWN].tolist()}"


def _broken_images(t: TokenStream, vocabulary: Vocabulary) -> str | None:
    if vocabulary.image_token_id is None and not t.images:
        return None
    is_image = t.ids_T == vocabulary.image_token_id
    # Counted first: most streams have no image.
    placeholders = np.count_nonzero(is_image)
    if not t.images and not placeholders:
        return None
    areas = [time * height * width for time, height, width in (image.grid_thw for image in t.images)]
    expected = [area // vocabulary.merge_size**2 for area in areas]
    if placeholders != sum(expected):
        return f"{placeholders} image placeholders, {sum(expected)} in the image grids"
    places = np.flatnonzero(is_image)
    # A run begins where the place before is no placeholder.
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    runs = np.diff(starts, append=len(places)).tolist()
    for number, (image, run, count) in enumerate(zip(t.images, runs, expected, strict=False), 1):
        if not run == count == image.num_tokens:
            at = int(places[starts[number - 1]])
            return (
                f"image {number}: a run of {run} placeholders at {at}, {count} in its grid {image.grid_thw}, "
                f"num_tokens {image.num_tokens}"
            )
    if len(runs) != len(t.images):
        return f"{len(runs)} runs of image placeholders, {len(t.images)} images"
    return None


def _broken_logprobs(t: TokenStream) -> str | None:
    logprobs = t.logprobs_T
    if not len(logprobs):
        return None
    if not (logprobs.min() > -math.inf and logprobs.max() <= MAX_LOGPROB):  # a NaN is in no order
        place = int(np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)))[0])
        number = _turn_of(t.turns, place)
        return f"turn {number}: log-probs must be finite and at most 0, got {logprobs[place]} at {place}"
    # A log-prob of a token that nobody sampled would enter the loss.
    outside = logprobs[~t.mask_T]
    if np.count_nonzero(outside):
        place = int(np.flatnonzero(~t.mask_T & (logprobs != 0))[0])
        return f"log-probs outside the mask must be 0, got {logprobs[place]} at {place}"
    return None


def _broken_pieces(t: TokenStream, vocabulary: Vocabulary, pieces: Sequence[Rendered | Completion]) -> str | None:
    """Compare the stream with the pieces that renderer and engine gave."""
    ids: list[int] = []
    written = []
    for piece in pieces:
        start = len(ids)
        ids += piece.ids
        if isinstance(piece, Completion):
            written.append((piece.prompt_length, start, len(ids)))
    # A reward function gets the trajectory, and may have written into its arrays.
    if ids != t.ids_T.tolist():
        return _different_piece(t.ids_T.tolist(), vocabulary, pieces)
    turns = [(turn.start, turn.start, turn.end) for turn in t.turns]
    if turns == written:
        return None
    pairs = enumerate(zip_longest(turns, written, fillvalue=(None, None, None)), 1)
    number, ((_, start, end), (read, *span)) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"turn {number}: span {start}:{end}, {span[0]}:{span[1]} was written, the engine read {read} tokens"


def _different_piece(ids: Sequence[int], vocabulary: Vocabulary, pieces: Sequence[Rendered | Completion]) -> str:
    """Return a sentence that says where the stream first differs from its pieces."""
    given = [each for piece in pieces for each in piece.ids]
    place = first_difference(ids, given)
    kept = vocabulary.show(ids[place:])
    return f"the stream has {kept} at {place}, read and written were {vocabulary.show(given[place:])}"


def _turn_of(turns: Sequence[Turn | TurnRecord], place: int) -> int:
    """Return the number of the turn that a token is in; 0 where it is in none."""
    return next((number for number, turn in enumerate(turns, 1) if turn.start <= place < turn.end), 0)
