"""Converts slime's samples into trajectories.

The model's turns are the runs of loss mask 1 in the response. Tokens after the last turn are an answer that the model
never read; they are left out, as in the agent loop.

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

from agents.recording.json_values import to_json
from agents.rendering.renderer import Renderer
from agents.replaying.slime_dump import DumpedSample
from agents.types import EndReason, ProcessedImage, Trajectory, Turn
from envs.errors import UserError
from envs.images import load_image
from envs.types import Message, content_parts

#: Replaces a picture in a message that the dump does not hold.
NO_PICTURE = "[a picture that is not in the dump]"
#: After this many samples whose text is not that of their tokens, the tokenizer must be another one.
MAX_MISMATCHES = 8

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
    """Converts the samples of one or more dumps.

    `missing` counts what samples lack. `has_texts` says whether prompts were texts, already rendered with their tools.

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
        self._num_checked = self._num_mismatches = 0
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._mismatch = ""
        self._num_groups = 0

    def trajectories(self, samples: Iterable[DumpedSample], phase: str) -> Iterator[Trajectory]:
        """Yield the trajectories of one dump.

        Raises:
            UserError: a sample has no reward, or its tokens are of another tokenizer.
        """
        indices: Counter[int] = Counter()
        # In a dump without groups, the samples of one problem follow one another.
        for _, same in groupby(samples, _problem):
            self._num_groups += 1
            for sample in same:
                self.num_samples += 1
                group = self._num_groups - 1 if sample.group is None else sample.group
                self._check_text(sample)
                trajectory = self._trajectory(sample, group, indices[group], self._attempts[phase, group])
                indices[group] += 1
                if trajectory is not None:
                    yield trajectory
        for group in indices:
            self._attempts[phase, group] += 1

    def _trajectory(self, sample: DumpedSample, group: int, index: int, attempt: int) -> Trajectory | None:
        """Return a sample's trajectory; None if its response has no turn of the model."""
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
            messages=(*prompt, *self._conversation(sample, spans)),
            error="slime's status is failed" if sample.status == "failed" else None,
            metadata=to_json(sample.metadata),
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
        except (OverflowError, TypeError):  # ids outside the vocabulary
            return ""

    def _check_text(self, sample: DumpedSample) -> None:
        """Compare a sample's text with that of its tokens, until one matches."""
        if not sample.response or self._num_checked > self._num_mismatches:
            return
        ids = list(sample.tokens[sample.prompt_length :])
        try:
            texts = [self.renderer.tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        except (OverflowError, TypeError):
            texts = []
        self._num_checked += 1
        self._num_mismatches += sample.response.strip() not in [text.strip() for text in texts]
        self._mismatch = f"{self._decode(ids)[:60]!r} where slime has {sample.response[:60]!r}"
        if self._num_mismatches == MAX_MISMATCHES:
            self.check_tokenizer()

    def check_tokenizer(self) -> None:
        """Raise `UserError` if no sample's text matches its tokens."""
        if self._num_checked and self._num_checked == self._num_mismatches:
            raise UserError("--model", "must be the model that wrote the dump", self._mismatch, "give its folder")

    # Messages and pictures -----------------------------------------------------------------------------------------

    def _prompt(self, sample: DumpedSample) -> tuple[Message, ...]:
        """Return the problem's messages: as dumped, or parsed from the rendered text, or one message with that text."""
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
        except Exception:  # a template can raise anything
            pass
        self.missing["have a prompt that is known only as text"] += 1
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
        except UserError:  # a path or URL on the machine that wrote the dump
            self.missing["show a picture that is not in the dump"] += 1
            return {"type": "text", "text": NO_PICTURE}
        return {"type": "image", "image": picture}

    def _parts(self, text: str, pictures: Iterator[Image.Image]) -> str | list[dict[str, Any]]:
        """Return a rendered text as message content, with pictures in place of their placeholders."""
        texts = _PICTURE.split(text)
        if len(texts) == 1:
            return text
        parts: list[dict[str, Any]] = []
        for place, piece in enumerate(texts):
            if place:
                parts.append(self._part({"image": None}, pictures))
            parts += [{"type": "text", "text": piece}] * bool(piece)
        return parts

    def _conversation(self, sample: DumpedSample, spans: Sequence[tuple[int, int]]) -> Iterator[Message]:
        """Yield the messages after the problem: the model's turns, and between them the decoded tokens that it read."""
        for number, (start, end) in enumerate(spans):
            if number:
                yield {"role": "user", "content": self.renderer.shown(sample.tokens[spans[number - 1][1] : start])}
            yield {"role": "assistant", "content": self._decode(sample.tokens[start:end])}

    def _images(self, sample: DumpedSample, ids: Sequence[int]) -> tuple[ProcessedImage, ...]:
        """Return the pictures of the stream; none if they do not match its placeholders."""
        token = self.renderer.image_token_id
        runs = [len(list(run)) for is_image, run in groupby(ids, lambda each: each == token) if is_image]
        if token is None or not runs:
            return ()
        store, pictures = self.renderer.images, sample.pictures[: len(runs)]
        assert store is not None, "a model with an image token reads images"
        images = tuple(store.process(picture) for picture in pictures)
        if [image.num_tokens for image in images] == runs:
            return images
        self.missing["have pictures that do not match their tokens"] += 1
        return ()


def _problem(sample: DumpedSample) -> tuple[int | None, str | None, str]:
    """Return what identifies a sample's problem: its group or, without one, label and text."""
    if sample.group is not None:
        return sample.group, None, ""
    if isinstance(sample.prompt, str):
        return None, sample.label, sample.prompt
    texts = [part.get("text", "") for message in sample.prompt for part in content_parts(dict(message))]
    return None, sample.label, "\n".join(map(str, texts))


def _spans(sample: DumpedSample) -> list[tuple[int, int]]:
    """Return start and end of the model's turns in the stream.

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
    """Return the weight version of a turn; -1 if the sample does not have one for each turn."""
    if len(sample.weight_versions) != num_turns or not sample.weight_versions[turn - 1].isdigit():
        return -1
    return int(sample.weight_versions[turn - 1])
