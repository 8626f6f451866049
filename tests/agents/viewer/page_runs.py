"""Runs to be shown, written by the Recorder: a small one with known figures, one that would break out, a long one.

Legend: T tokens of one stream, N those of them that the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from agents.recording import Manifest, Recorder, WayRecord
from agents.types import EndReason, ProcessedImage, Timing, Trajectory, Turn
from envs.images import image_digest
from envs.spec import EnvSpec
from envs.tool_calls.thinking import Thinking
from tests.prompts import make_image

#: The trainer's log-prob of this token of `train-2-1` is lower than the engine's by so many nats.
PLANTED_TOKEN, PLANTED_GAP = "\\boxed", 1.5
IMAGE_TOKENS = 6
_PIECES = re.compile(r"<[^<> ]+>|\\?\w+| \w+|\n|.", re.DOTALL)


class Words:
    """A tokenizer for tests: words are tokens, and a character that is not ASCII is one token a byte."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = []

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, new ones for what was never seen."""
        pieces = [piece for word in _PIECES.findall(text) for piece in _cut(word)]
        self.bytes += [piece for piece in dict.fromkeys(pieces) if piece not in self.bytes]
        return [self.bytes.index(piece) for piece in pieces]

    def spell(self, token_id: int) -> bytes:
        """Return the bytes of an id."""
        return self.bytes[token_id]


def _cut(word: str) -> list[bytes]:
    spelled = word.encode("utf-8", errors="surrogatepass")
    return [spelled] if word.isascii() else [spelled[k : k + 1] for k in range(len(spelled))]


def manifest(name: str = "starter") -> Manifest:
    """Return what a recording says of itself."""
    spec = EnvSpec(
        id="geo3k", entry_point="envs.geo3k.env:build_env", version="1", description="Geometry.", max_turns=3
    )
    return Manifest(created="2026-01-02T03:04:05+00:00", env=spec, model=name)


def processed(image: Image.Image) -> ProcessedImage:
    """Return an image as the model takes it, without its patches."""
    return ProcessedImage(image_digest(image), np.zeros((0, 0), np.float32), (1, 4, 6), IMAGE_TOKENS)


def episode(
    words: Words,
    texts: Sequence[str],
    answers: Sequence[str] = (),
    group: int = 0,
    sample_index: int = 0,
    reward: float = 1.0,
    image: Image.Image | None = None,
    end_reason: EndReason = EndReason.COMPLETED,
    error: str | None = None,
    question: str = "Find x.",
    label: str | None = "68",
    sample_id: str = "",
    call: dict | None = None,
    first: str = "",
) -> Trajectory:
    """Return an episode in which the model says `texts`, each but the last answered by a tool.

    `first` is the first observation.
    """
    parts = [{"type": "image", "image": image}] if image else []
    messages: list[dict] = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    ids = words.ids("<|im_start|>user\n") + words.ids("<|image_pad|>") * (IMAGE_TOKENS if image else 0)
    messages += [{"role": "user", "content": first}] if first else []
    ids += words.ids(f"{question}<|im_end|>\n{first}")
    mask, turns = [0] * len(ids), []
    prompt_length = len(ids)
    for k, text in enumerate(texts):
        start, written = len(ids), words.ids(f"{text}<|im_end|>")
        ids, mask = ids + written, mask + [1] * len(written)
        said = [{"role": "tool", "content": answers[k]}] if k < len(answers) else []
        calls = [call or {"name": "calc_score", "arguments": {"answer": "67"}, "outcome": "ok"}] if said else []
        is_last = k == len(texts) - 1
        info = {"tool_calls": calls, "tool_score": 0.0} if said else {"tool_calls": []}
        turns.append(
            Turn(
                start,
                len(ids),
                text,
                "stop",
                ((3, len(ids) - start),),
                start - 1,
                tuple(said),
                info,
                0.25,
                0.002,
                is_last,
            )
        )
        messages += [{"role": "assistant", "content": text}, *said]
        if said and not is_last:
            heard = words.ids(f"\n<|im_start|>tool\n{answers[k]}<|im_end|>\n")
            ids, mask = ids + heard, mask + [0] * len(heard)
    mask_T = np.array(mask, dtype=np.bool_)
    logprobs_T = np.where(mask_T, -0.01 * (1 + np.arange(len(ids)) % 7), 0.0).astype(np.float32)
    return Trajectory(
        sample_id=sample_id or f"problem-{group}",
        sample_index=sample_index,
        seed=17,
        ids_T=np.array(ids, dtype=np.int64),
        mask_T=mask_T,
        logprobs_T=logprobs_T,
        images=(processed(image),) if image else (),
        turns=tuple(turns),
        reward=reward,
        end_reason=end_reason,
        prompt_length=prompt_length,
        messages=tuple(messages),
        error=error,
        metadata={"family": "angles"},
        timing=Timing(1.7e9, 1.5, 1.4, 0.06, 0.0),
        label=label,
        num_prompt_messages=1,
        group=group,
    )


def write_small(folder: Path, groups: Sequence[int] = range(6), better: float = 0.0) -> Words:
    """Write a run of three steps, two groups of four samples each, and an evaluation before; `better` shifts rewards.

    Sample 3 of each group is right at once, samples 0 to 2 call a tool first. `train-2-1` has the planted gap,
    `train-1-0` is broken, group 5 was filtered.
    """
    words = Words()
    call = 'So <tool_call>{"name": "calc_score", "arguments": {"answer": "67"}}</tool_call>'
    with Recorder(folder / "episodes", manifest(), words.spell) as recorder:
        for k in range(2):
            recorder.write(episode(words, ["\\boxed{1}"], group=k, reward=float(k)), 0, "before", "greedy")
        for group in groups:
            shown, step = make_image(96, 64, seed=group), 1 + group // 2
            for sample in range(4):
                texts = ["So \\boxed{68}"] if sample == 3 else [call, f"So \\boxed{{{sample}}}"]
                played = episode(
                    words, texts, ["Score 0: 67 is wrong."] * (len(texts) - 1), group, sample, float(sample == 3), shown
                )
                if (group, sample) == (1, 0):
                    played = episode(
                        words, [call], [], 1, 0, 0.0, shown, EndReason.ENV_ERROR, "Traceback\nValueError: no score"
                    )
                elif better and sample == 2:
                    played = episode(words, texts, ["Score 0: 67 is wrong."], group, sample, better, shown)
                recorder.write(played, step)
                fate = "filtered" if group == 5 else "train"
                recorder.write_outcome(
                    played, step, fate, None if fate == "filtered" else (1.5 if sample == 3 else -0.5)
                )
                if fate == "train":
                    recorder.write_scores(played, step, scores(played, words, (group, sample) == (2, 1)))
    rows = [
        {"step": k, "reward": 0.1 * k, "turns": 1.75, "entropy": 0.5 / k, "lr": 1e-5, "rollout_train_kl": 10.0**-k}
        for k in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"accuracy_before": {"greedy": 0.5}, "accuracy_after": {"greedy": 0.75}, "seconds": 12.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    return words


def write_thinking(folder: Path) -> None:
    """Write an episode of two turns whose template opens each with `<think>`; the second never closes its thought."""
    words, thinking = Words(), Thinking("<think>", "</think>", is_opened=True)
    way = WayRecord(
        max_turns=2, use_tools=True, max_new_tokens=99, context_length=99, temperature=1.0, thinking=thinking
    )
    with Recorder(folder, manifest().model_copy(update={"ways": {"train": way}}), words.spell) as recorder:
        recorder.write(episode(words, ["Is it 67?</think>\n\nTry 67.", "Then <b>68</b>"], ["No."]), 1)


def scores(played: Trajectory, words: Words, is_planted: bool) -> np.ndarray:
    """Return the trainer's log-probs: those of the engine but for 1e-4, and for the planted gap."""
    logprobs_N = played.logprobs_T[played.mask_T] - np.float32(1e-4)
    if is_planted:
        spelled_N = [words.spell(token) for token in played.ids_T[played.mask_T]]
        logprobs_N[spelled_N.index(PLANTED_TOKEN.encode())] -= np.float32(PLANTED_GAP)
    return logprobs_N


HACK = "window.__hacked = 1; alert(1)"
HOSTILE = (
    f"<script>{HACK}</script>",
    f"</script><script>{HACK}</script>",
    f'<img src="x" onerror="{HACK}">',
    f"javascript:{HACK}",
    '"></div><iframe src="https://example.org/"></iframe><style>body{display:none}</style>',
    "<!-- <svg onload=alert(1)> ]]> {{7*7}} ${alert(1)}",
    "[click](javascript:alert(1)) <a href='https://example.org/track'>x</a>",
)


def write_hostile(folder: Path) -> None:
    """Write a run in which everything that somebody else says tries to run, to leave the page or to look otherwise."""
    words = Words()
    with Recorder(folder, manifest("<b>model</b>"), words.spell) as recorder:
        for k, text in enumerate(HOSTILE):
            call = {"name": text, "arguments": {text: text}, "outcome": text}
            recorder.write(
                episode(
                    words,
                    [text, text],
                    [text],
                    k,
                    0,
                    -0.5,
                    make_image(seed=k),
                    question=text,
                    label=text,
                    sample_id=text,
                    call=call,
                    error=text,
                    end_reason=EndReason.ENV_ERROR,
                ),
                1,
            )
        recorder.write(episode(words, ["مرحبا بالعالم abc"], group=20, question="ما هي x؟"), 1)
        recorder.write(episode(words, ["safe\u202egnp.exe\u2066 \x00\x1b[31m \ud800 end"], group=21), 1)
        recorder.write(episode(words, ["seen"], group=22, image=make_image(seed=99)), 1)
        recorder.write(
            episode(words, ["odd"], ["x"], group=23, call={"arguments": [1, {"a": None}]}),
            1,
            phase="</script>",
            way='"><img src=x onerror=alert(1)>',
        )
    broken = folder / "images" / f"{image_digest(make_image(seed=99))}.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n<script>alert(1)</script>")


def write_long(folder: Path, num_characters: int, num_tokens: int) -> None:
    """Write an episode with a turn of so many characters, and one with so many tokens."""
    words = Words()
    with Recorder(folder, manifest(), words.spell) as recorder:
        text = episode(words, ["short"], group=0)
        (turn,) = text.turns
        long = Turn(**{**turn.__dict__, "text": "word " * (num_characters // 5 - 1) + "end.\n"})
        recorder.write(Trajectory(**{**text.__dict__, "turns": (long,)}), 1)
        recorder.write(episode(words, ["go on " * (num_tokens // 2)], group=1), 1)
