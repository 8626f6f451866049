"""The figures of one episode as the overview shows them: a record, its outcome and its score in; a cell per column out.

Legend: N tokens of one episode that the model wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.recording import EpisodeRecord, OutcomeRecord
from envs.runner import last_line

Cell = str | int | float | None
#: The cells of one episode, by column.
Row = dict[str, Cell]

MAX_TEXT = 200
MAX_ERROR = 300

#: What an episode has before the trainer has said anything of it.
_UNKNOWN: Row = {"advantage": None, "fate": "", "mean_gap": None, "max_gap": None, "kl": None}


def row_of(episode: EpisodeRecord) -> Row:
    """Return the cells of an episode whose outcome and score are not known.

    Example: of an episode with log-probs (-0.5, -1.5) `mean_logprob` is -1.0.
    """
    calls = list(tool_calls(episode))
    problem = episode.messages[: episode.num_prompt_messages]
    return {
        "id": episode.id,
        "phase": episode.phase,
        "way": episode.way,
        "step": episode.step,
        "group": episode.group,
        "sample_index": episode.sample_index,
        "attempt": episode.attempt,
        "sample_id": episode.sample_id[:MAX_TEXT],
        "label": (episode.label or "")[:MAX_TEXT],
        "reward": finite(episode.reward),
        "end_reason": episode.end_reason.value,
        "error": last_line(episode.error)[:MAX_ERROR] if episode.error else "",
        "num_turns": len(episode.turns),
        "num_tokens": len(episode.ids),
        "num_model_tokens": len(episode.logprobs),
        "num_tool_calls": len(calls),
        "num_tool_errors": sum(call.get("outcome") != "ok" for call in calls),
        "mean_logprob": _mean(_values(episode.logprobs)),
        "total_s": finite(episode.total_s),
        "env_s": finite(episode.env_s),
        "engine_s": finite(episode.engine_s),
        "image": next(pictures(episode.messages), ""),
        "question": question_of(problem)[:MAX_TEXT],
        "answer": episode.turns[-1].text[-MAX_TEXT:] if episode.turns else "",
        **_UNKNOWN,
    }


#: Columns of what becomes known later, by what makes it known.
LATER: Mapping[str, tuple[str, ...]] = {"outcome": ("advantage", "fate"), "score": ("mean_gap", "max_gap", "kl")}


def outcome_cells(outcome: OutcomeRecord) -> Row:
    """Return the cells that an outcome makes known."""
    return {"advantage": finite(outcome.advantage), "fate": outcome.fate}


def gap_cells(rollout: Sequence[float | None] | NDArray[np.float64], train: Sequence[float | None]) -> Row:
    """Return mean and max |d| and the k3 estimate of the KL divergence, mean(rho - 1 - log rho) with log rho = d, for
    d = train - rollout; tokens without one of the two are left out, None stands where there is no other.

    Source: http://joschu.net/blog/kl-approx.html

    >>> gap_cells([-1.0, -0.5], [-1.0, -0.25])
    {'mean_gap': 0.125, 'max_gap': 0.25, 'kl': 0.017012708343870603}
    """
    rollout_N, train_N = _values(rollout), _values(train)
    if len(rollout_N) != len(train_N):
        return dict.fromkeys(LATER["score"])
    d_N = train_N - rollout_N
    d_N = d_N[np.isfinite(d_N)]
    with np.errstate(over="ignore"):
        k3_N = np.expm1(d_N) - d_N
    return {"mean_gap": _mean(np.abs(d_N)), "max_gap": _max(np.abs(d_N)), "kl": _mean(k3_N)}


def tool_calls(episode: EpisodeRecord) -> Iterator[Mapping[str, Any]]:
    """Yield what the environment says of each tool call of an episode."""
    for turn in episode.turns:
        calls = turn.info.get("tool_calls")
        if isinstance(calls, list):
            yield from (call for call in calls if isinstance(call, Mapping))


def pictures(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the pictures of messages, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), str):
                yield part["image"]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, its parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def question_of(problem: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a problem: what the user says in it, or else all of it."""
    asked = [message for message in problem if message.get("role") == "user"]
    return "\n".join(text_of(message) for message in asked or problem).strip()


def finite(value: float | None) -> float | None:
    """Return the number, None for what JSON knows as none."""
    return value if value is not None and np.isfinite(value) else None


def _values(logprobs: Sequence[float | None] | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array(logprobs, dtype=np.float64)  # None becomes NaN


def _mean(values: NDArray[np.float64]) -> float | None:
    values = values[~np.isnan(values)]
    return finite(float(values.mean())) if len(values) else None


def _max(values: NDArray[np.float64]) -> float | None:
    return finite(float(values.max())) if len(values) else None
