"""The bodies of requests to an SGLang server, and the parsing of its answers.

`/generate` takes ids with one placeholder per image, expands them itself and keeps all other ids verbatim.
`flush_cache` empties the prefix cache but not the cache of encoded images; what names an image there depends on the
release.

Legend: N tokens of an answer, K ids that one was drawn from, or experts of a token in one of L layers; R tokens read.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agents.engines.weight_servers import ServerLost
from agents.types import GenerateRequest, ProcessedImage, RouteShape, SamplingParams

#: Added to the logit of a token that must never be drawn. Finite, because JSON has no infinity; its exponential is 0.
NEVER = -1e9


def collapse(ids: Sequence[int], images: Sequence[ProcessedImage], image_token_id: int | None) -> list[int]:
    """Return the stream with one placeholder per image, as the server expects it.

    >>> collapse([7, 9, 9, 7], [ProcessedImage("", np.zeros((8, 1)), (1, 2, 4), num_tokens=2)], image_token_id=9)
    [7, 9, 7]
    """
    ids = list(ids)
    short = []
    position = 0
    # Images are in the order of their placeholders.
    for image in images:
        first = ids.index(image_token_id, position)  # type: ignore[arg-type]
        short += ids[position : first + 1]
        position = first + image.num_tokens
    return short + ids[position:]


def generate_body(
    request: GenerateRequest,
    written: Sequence[int],
    rid: str,
    image_token_id: int | None,
    adapter: str = "",
    first_route: int | None = None,
) -> dict[str, Any]:
    """Return the body of `/generate` that continues a turn after the ids `written` so far, without its images.

    It asks for the experts of the tokens from `first_route` on, or for none. A server that has no adapter of the name
    `adapter` refuses the request; it keeps the prefixes that each adapter has read apart.
    """
    sampling = request.sampling
    body = {
        "rid": rid,
        "input_ids": [*collapse(request.ids, request.images, image_token_id), *written],
        "sampling_params": {
            "temperature": sampling.temperature,
            # Said in full: else the server takes them from the checkpoint's generation_config.json.
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "max_new_tokens": request.max_new_tokens - len(written),
            "stop_token_ids": list(sampling.stop_ids),
            "logit_bias": {str(token): NEVER for token in sampling.suppressed_ids} or None,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            # The stop id belongs to the turn, and is trained on.
            "no_stop_trim": True,
        },
        "return_logprob": True,
    }
    if sampling.top_k:
        body["top_logprobs_num"] = sampling.top_k
    if first_route is not None:
        body["return_routed_experts"] = True
        # Of the whole stream they would take 2,048 characters a token at 48 layers.
        body["routed_experts_start_len"] = first_route
    return body | adapter_field(adapter)


def score_body(
    ids: Sequence[int], images: Sequence[ProcessedImage], image_token_id: int | None, adapter: str = ""
) -> dict[str, Any]:
    """Return the body of `/generate` that requests the log-probs of a whole stream, without its images."""
    return {
        "input_ids": collapse(ids, images, image_token_id),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    } | adapter_field(adapter)


def adapter_field(name: str) -> dict[str, Any]:
    """Return the field of a body for the adapter that writes; none for the checkpoint alone."""
    if name:
        return {"lora_path": name}
    return {}


@dataclass(frozen=True)
class AskedRoutes:
    """The experts that a request asks for: those of its tokens from `first` on, of a network of this `shape`."""

    first: int
    shape: RouteShape


class GenerateAnswer:
    """The parsed answer of `/generate`: ids and log-probs of the tokens written, why it ended, counts, version.

    A request that was aborted has the finish "": its turn goes on. `routes_RLK` are the experts that were asked for, of
    a request that was aborted perhaps fewer, or none.
    """

    def __init__(self, answer: dict[str, Any], sampling: SamplingParams, asked: AskedRoutes | None = None) -> None:
        meta = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        self.ids = [int(token) for _, token, *_ in pairs]
        self.logprobs = [math.nan if logprob is None else float(logprob) for logprob, *_ in pairs]  # NaN is no JSON
        finish = meta["finish_reason"]["type"]
        if finish not in ("stop", "length", "abort"):
            raise ValueError(f"finish {finish!r}")
        self.finish: Literal["", "stop", "length"] = "" if finish == "abort" else finish
        # A request that was aborted in the server's queue has read nothing; its answer has no count.
        self.prompt_length = None
        if self.finish or "prompt_tokens" in meta:
            self.prompt_length = int(meta["prompt_tokens"])
        self.num_cached = int(meta.get("cached_tokens") or 0)
        self.version = str(meta["weight_version"])
        if self.ids != answer["output_ids"]:
            raise ValueError(f"log-probs are of {self.ids}, the answer is {answer['output_ids']}")
        self.kept_NK = None
        if sampling.top_k and self.ids:
            self.kept_NK, self.logprobs = _kept(meta["output_top_logprobs"], self.ids, self.logprobs, sampling)
        self.routes_RLK = None
        # One that was aborted in the queue has read nothing.
        if asked and self.prompt_length is not None and (self.finish or meta.get("routed_experts")):
            routes_RLK = _routes(meta["routed_experts"], asked.shape)
            num_asked = self.prompt_length + len(self.ids) - 1 - asked.first
            # An abort may come between the reading of a token and its being counted.
            if self.finish and len(routes_RLK) != num_asked:
                raise ValueError(f"experts of {len(routes_RLK)} tokens, asked for {num_asked}")
            self.routes_RLK = routes_RLK[:num_asked]


def _routes(text: str, shape: RouteShape) -> NDArray[np.uint8 | np.uint16]:
    """Return the experts of tokens from their base64; SGLang writes int32 and no shape."""
    # Read without a sign, so that a number below 0 is too large.
    experts = np.frombuffer(base64.b64decode(text, validate=True), dtype="<u4")
    experts_RLK = experts.reshape(-1, shape.num_layers, shape.top_k)
    largest = experts_RLK.max(initial=0)
    if largest >= shape.num_experts:
        raise ValueError(f"expert {largest} of {shape.num_experts}")
    return experts_RLK.astype(shape.dtype)


def _kept(
    top: Sequence[Any], ids: Sequence[int], logprobs: Sequence[float], sampling: SamplingParams
) -> tuple[NDArray[np.int32], list[float]]:
    """Return the ids that each token was drawn from, and its log-prob among them.

    `top` has (log-prob, id, text) of the most likely ids at each token. SGLang reports log-probs among all ids,
    whatever it draws from (its `srt/layers/sampler.py`).
    """
    entries_NK2 = np.array([entry[:2] for entry in chain.from_iterable(top)], dtype=np.float64)
    entries_NK2 = entries_NK2.reshape(len(ids), sampling.top_k, 2)
    top_NK = entries_NK2[..., 0]
    ids_NK = entries_NK2[..., 1].astype(np.int32)
    is_kept_NK = sampling.keeps(np.exp(top_NK))
    ids_N = np.array(ids)
    rows_N = np.arange(len(ids))
    last_N = is_kept_NK.sum(-1) - 1
    # The order of equally likely ids is arbitrary: the last one that is kept may be another one there than here.
    is_in_N = (is_kept_NK & (ids_NK == ids_N[:, None])).any(-1)
    swapped = rows_N[~is_in_N & (top_NK[rows_N, last_N] == logprobs)]
    ids_NK[swapped, last_N[swapped]] = ids_N[swapped]
    total_N = np.where(is_kept_NK, np.exp(top_NK), 0.0).sum(-1)
    return np.where(is_kept_NK, ids_NK, ids_NK[:, :1]), (np.array(logprobs) - np.log(total_N)).tolist()


def parse_answer(answer: Any, sampling: SamplingParams, asked: AskedRoutes | None = None) -> GenerateAnswer:
    """Parse the answer of `/generate` to a request with `sampling`; raises `ServerLost` where it is malformed."""
    try:
        return GenerateAnswer(answer, sampling, asked)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise ServerLost(f"no answer: {type(error).__name__} {error} in {answer!r:.500}") from error


def parse_scores(answer: Any, num_ids: int) -> NDArray[np.float32]:
    """Return the log-prob of each id of a scored stream but the first; raises `ServerLost` where they are missing."""
    try:
        row = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
        if len(row) != num_ids:
            raise ValueError(f"{len(row)} log-probs for {num_ids} ids")
        return np.asarray(row[1:], dtype=np.float32)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ServerLost(f"no scores: {type(error).__name__} {error} in {answer!r:.500}") from error
