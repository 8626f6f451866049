"""Makes a trajectory of a sample of slime's: what a dump holds and a renderer in, what our recordings hold out.

The model's turns are the runs of loss mask 1 in the response. What stands behind the last of them, an answer that no
model was shown, is left away, as the agent loop leaves it.

Legend: T tokens of one stream.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image

from agents.recording.plain import plain
from agents.renderer import Renderer
from agents.replaying.slime_dump import DumpedSample
from agents.types import EndReason, ProcessedImage, Trajectory, Turn
from envs.errors import UserError
from envs.images import load_image
from envs.types import Message, content_parts

#: Stands in a message for a picture that the dump does not hold.
NO_PICTURE = "[a picture that is not in the dump]"
#: After so many samples whose text is not that of their tokens, the tokenizer is not the one that wrote them.
MAX_STRANGE = 8

_REASONS = {
    "pending": EndReason.COMPLETED,
    "completed": EndReason.COMPLETED,
    "truncated": EndReason.TOKEN_BUDGET,
    "aborted": EndReason.ABORTED,
    "failed": EndReason.ENV_ERROR,
}
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_PICTURE = re.compile(r"<\|vision_start\|><\|image_pad\|><\|vision_end\|>")


class Converter:
    """Converts samples, dump after dump; `missing` counts what was not there, `has_texts` says whether prompts were
    texts, which a template had written already, tools included.

    Example::

        converter = Converter(Renderer.from_checkpoint("path/to/model"))
        for trajectory in converter.trajectories(samples):
            trajectory.turns[0].text, trajectory.reward      # ("\\\\boxed{68}", 1.0)
        converter.missing       # Counter({"have no log-probs": 8})
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.missing: Counter[str] = Counter()
        self.has_texts = False
        self.num_samples = 0
        self._num_told = self._num_strange = 0
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._strange = ""
        self._num_groups = 0

    def trajectories(self, samples: Iterable[DumpedSample], phase: str) -> Iterator[Trajectory]:
        """Yield the trajectories of one dump.

        Raises:
            UserError: a sample has no reward, or the tokens were written with another tokenizer.
        """
        indices: Counter[int] = Counter()
        # A dump without groups holds the samples of one problem one after the other.
        for _, same in groupby(samples, _problem):
            self._num_groups += 1
            for sample in same:
                self.num_samples += 1
                group = self._num_groups - 1 if sample.group is None else sample.group
                self._read_text(sample)
                trajectory = self._trajectory(sample, group, indices[group], self._attempts[phase, group])
                indices[group] += 1
                if trajectory is not None:
                    yield trajectory
        for group in indices:
            self._attempts[phase, group] += 1

    def _trajectory(self, sample: DumpedSample, group: int, index: int, attempt: int) -> Trajectory | None:
        """Return what a sample tells; None where it has no turn of the model though it has a response."""
        spans = _spans(sample)
        if sample.mask and not spans:
            self.missing["have loss mask 0 throughout, and are left out"] += 1
            return None
        end_reason = _REASONS[sample.status]
        end = spans[-1][1] if spans else sample.prompt_length
        if end_reason is EndReason.COMPLETED and end < len(sample.tokens):
            end_reason = EndReason.MAX_TURNS
        if sample.reward is None and end_reason.is_valid:
            rule = "must be a number in a sample that has ended"
            raise UserError(f"{sample.where} reward", rule, "none", "dump after the rewards were given")
        prompt = self._prompt(sample)
        ids = sample.tokens[:end]
        mask_T = np.zeros(end, dtype=np.bool_)
        logprobs_T = np.zeros(end, dtype=np.float32)
        for start, stop in spans:
            mask_T[start:stop] = True
            first = start - sample.prompt_length
            logprobs_T[start:stop] = sample.logprobs[first : first + stop - start] if sample.logprobs else np.nan
        self.missing["have no log-probs"] += not sample.logprobs
        return Trajectory(
            sample_id=str(sample.metadata.get("id") or f"slime-{group}"),
            sample_index=index,
            seed=0,
            ids_T=np.array(ids, dtype=np.int64),
            mask_T=mask_T,
            logprobs_T=logprobs_T,
            images=self._images(sample, ids),
            turns=self._turns(sample, spans, end_reason),
            reward=sample.reward or 0.0,
            end_reason=end_reason,
            prompt_length=sample.prompt_length,
            messages=(*prompt, *self._said(sample, spans)),
            error="slime's status is failed" if sample.status == "failed" else None,
            metadata=plain(sample.metadata),
            label=sample.label,
            num_prompt_messages=len(prompt),
            group=group,
            attempt=attempt,
        )

    def _turns(self, sample: DumpedSample, spans: Sequence[tuple[int, int]], end_reason: EndReason) -> tuple[Turn, ...]:
        turns = []
        for number, (start, end) in enumerate(spans, 1):
            is_last, finish = number == len(spans), "stop"
            if is_last and sample.tokens[end - 1] not in self.renderer.stop_ids:
                finish = {"truncated": "length", "aborted": "abort"}.get(sample.status, "stop")
            turns.append(
                Turn(
                    start=start,
                    end=end,
                    text=self._decode(sample.tokens[start:end]),
                    finish=finish,
                    versions=((_version(sample, number, len(spans)), end - start),),
                    num_cached=0,
                    observations=(),
                    info={},
                    engine_s=0.0,
                    env_s=0.0,
                    done=is_last and end_reason is EndReason.COMPLETED,
                )
            )
        return tuple(turns)

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self.renderer.decode(ids)
        except (OverflowError, TypeError):  # ids that are no tokens of this tokenizer
            return ""

    def _read_text(self, sample: DumpedSample) -> None:
        """Compare a sample's text with that of its tokens, until one has been the same."""
        if not sample.response or self._num_told > self._num_strange:
            return
        ids = list(sample.tokens[sample.prompt_length :])
        try:
            texts = [self.renderer.tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        except (OverflowError, TypeError):
            texts = []
        self._num_told += 1
        self._num_strange += sample.response.strip() not in [text.strip() for text in texts]
        self._strange = f"{self._decode(ids)[:60]!r} where slime has {sample.response[:60]!r}"
        if self._num_strange == MAX_STRANGE:
            self.check_tokenizer()

    def check_tokenizer(self) -> None:
        """Raise `UserError` where no text of a sample is that of its tokens."""
        if self._num_told and self._num_told == self._num_strange:
            raise UserError("--model", "must be the model that wrote the dump", self._strange, "give its folder")

    # Messages and pictures -----------------------------------------------------------------------------------------

    def _prompt(self, sample: DumpedSample) -> tuple[Message, ...]:
        """Return the problem as messages: its own, those that its text was rendered from, or the text as the user's."""
        pictures = iter(sample.pictures)
        if not isinstance(sample.prompt, str):
            return tuple(self._message(message, pictures) for message in sample.prompt)
        self.has_texts = True
        parsed = [
            {"role": role, "content": self._parts(text, pictures)} for role, text in _MESSAGE.findall(sample.prompt)
        ]
        try:
            if parsed and self.renderer.text(parsed, num_prompt=len(parsed)) == sample.prompt:
                return tuple(parsed)
        except Exception:  # a template raises what it likes
            pass
        self.missing["have a prompt that is known as a text only"] += 1
        shown = [{"type": "image", "image": picture} for picture in sample.pictures]
        shown = shown[: len(_PICTURE.findall(sample.prompt))]
        return ({"role": "user", "content": [*shown, {"type": "text", "text": sample.prompt}]},)

    def _message(self, message: Mapping[str, Any], pictures: Iterator[Image.Image]) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return {"role": message["role"], "content": "" if content is None else str(content)}
        return {"role": message["role"], "content": [self._part(part, pictures) for part in content]}

    def _part(self, part: Any, pictures: Iterator[Image.Image]) -> dict[str, Any]:
        if not isinstance(part, Mapping) or "image" not in part:
            text = part.get("text") if isinstance(part, Mapping) else part
            return {"type": "text", "text": str(text or "")}
        picture = next(pictures, None)
        try:
            picture = picture or load_image(part["image"], "prompt", None)
        except UserError:  # a path or an address on the machine that wrote the dump
            self.missing["show a picture that is not in the dump"] += 1
            return {"type": "text", "text": NO_PICTURE}
        return {"type": "image", "image": picture}

    def _parts(self, text: str, pictures: Iterator[Image.Image]) -> str | list[dict[str, Any]]:
        """Return a rendered text as content, with pictures where their placeholders are."""
        texts = _PICTURE.split(text)
        if len(texts) == 1:
            return text
        parts: list[dict[str, Any]] = []
        for place, piece in enumerate(texts):
            if place:
                parts.append(self._part({"image": None}, pictures))
            parts += [{"type": "text", "text": piece}] * bool(piece)
        return parts

    def _said(self, sample: DumpedSample, spans: Sequence[tuple[int, int]]) -> Iterator[Message]:
        """Yield what follows the problem: the model's turns, and between them what was read, as its tokens spell it."""
        for number, (start, end) in enumerate(spans):
            if number:
                yield {"role": "user", "content": self.renderer.shown(sample.tokens[spans[number - 1][1] : start])}
            yield {"role": "assistant", "content": self._decode(sample.tokens[start:end])}

    def _images(self, sample: DumpedSample, ids: Sequence[int]) -> tuple[ProcessedImage, ...]:
        """Return the pictures of the stream, where they are those that its placeholders stand for."""
        token = self.renderer.image_token_id
        runs = [len(list(run)) for is_image, run in groupby(ids, lambda each: each == token) if is_image]
        if token is None or not runs:
            return ()
        store, pictures = self.renderer.images, sample.pictures[: len(runs)]
        assert store is not None, "a model with an image token reads images"
        images = tuple(store.process(picture) for picture in pictures)
        if [image.num_tokens for image in images] == runs:
            return images
        self.missing["have other pictures than their tokens stand for"] += 1
        return ()


def _problem(sample: DumpedSample) -> tuple[int | None, str | None, str]:
    """Return what the samples of one problem have in common: their group or, where there is none, label and text."""
    if sample.group is not None:
        return sample.group, None, ""
    if isinstance(sample.prompt, str):
        return None, sample.label, sample.prompt
    texts = [part.get("text", "") for message in sample.prompt for part in content_parts(dict(message))]
    return None, sample.label, "\n".join(map(str, texts))


def _spans(sample: DumpedSample) -> list[tuple[int, int]]:
    """Return where the model's turns are in the stream.

    Example: a prompt of 4 tokens and the mask 1 1 0 0 1 give [(4, 6), (8, 9)].
    """
    spans, place = [], sample.prompt_length
    for is_written, run in groupby(sample.mask, bool):
        length = len(list(run))
        if is_written:
            spans.append((place, place + length))
        place += length
    return spans


def _version(sample: DumpedSample, turn: int, num_turns: int) -> int:
    """Return which weights wrote a turn, where the sample tells one for each; -1 where it does not."""
    if len(sample.weight_versions) != num_turns or not sample.weight_versions[turn - 1].isdigit():
        return -1
    return int(sample.weight_versions[turn - 1])
