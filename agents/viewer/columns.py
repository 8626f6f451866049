"""Computes the table row of an episode: one cell for each column of the overview.

Legend: N tokens of one episode that the model wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.recording import EpisodeRecord, OutcomeRecord
from agents.recording.schema import image_names
from agents.types import is_success
from envs.checking.error_location import located_line
from envs.success import ENVIRONMENT, Success
from envs.tool_calls.thinking import Thinking
from envs.types import bare_text

Cell = str | int | float | None
#: The cells of one episode, by column name.
Row = dict[str, Cell]

MAX_TEXT = 200
MAX_ERROR = 300

#: The cells that are empty until the trainer has recorded the episode's outcome and score.
UNKNOWN: Row = {"advantage": None, "fate": "", "mean_gap": None, "max_gap": None, "kl": None}


def row_of(episode: EpisodeRecord, thinking: Thinking | None = None, success: Success | None = None) -> Row:
    """Return the cells of an episode whose outcome and score are not known yet; its answer is no thought.

    The cell `success` is None where the environment does not say what a success is.

    Example: the log-probs (-0.5, -1.5) give a `mean_logprob` of -1.0.
    """
    # The last turn, because the answer that counts stands there.
    last = episode.turns[-1].text if episode.turns else ""
    answer = thinking.said(last) if thinking else last
    calls = list(tool_calls(episode))
    return {
        "id": episode.id,
        "phase": episode.phase,
        "way": episode.way,
        "step": episode.step,
        "group": episode.group,
        "sample_index": episode.sample_index,
        "attempt": episode.attempt,
        "sample_id": episode.sample_id[:MAX_TEXT],
        "env": str(episode.metadata.get(ENVIRONMENT, ""))[:MAX_TEXT],  # of a mixture
        "label": (episode.label or "")[:MAX_TEXT],
        "reward": finite(episode.reward),
        "success": is_success(episode, success),
        "end_reason": episode.end_reason.value,
        "error": located_line(episode.error)[:MAX_ERROR] if episode.error else "",
        "num_turns": len(episode.turns),
        "num_streams": 1 + len(episode.later),
        "num_tokens": episode.num_tokens,
        "num_model_tokens": episode.num_model_tokens,
        "num_tool_calls": len(calls),
        "num_tool_errors": sum(call.get("outcome") != "ok" for call in calls),
        "mean_logprob": _mean(_values(episode.all_logprobs)),
        "total_s": finite(episode.total_s),
        "env_s": finite(episode.env_s),
        "engine_s": finite(episode.engine_s),
        "image": next(iter(image_names(episode.messages)), "")[:MAX_TEXT],
        "question": question_of(episode.opening)[:MAX_TEXT],
        # The end of a long turn: the answer comes last.
        "answer": answer[-MAX_TEXT:],
        **UNKNOWN,
    }


def outcome_cells(outcome: OutcomeRecord) -> Row:
    """Return the cells that an outcome fills."""
    return {"advantage": finite(outcome.advantage), "fate": outcome.fate}


def gap_cells(rollout: Sequence[float | None] | NDArray[np.float64], train: Sequence[float | None]) -> Row:
    """Return the cells that a score fills: mean and max |d|, and the k3 estimate of the KL divergence.

    d = train - rollout for each token with both log-probs; k3 = mean(rho - 1 - log rho) with log rho = d. The cells are
    None if no token has both, or if the two are not of the same tokens.

    Source: http://joschu.net/blog/kl-approx.html

    >>> gap_cells([-1.0, -0.5], [-1.0, -0.25])
    {'mean_gap': 0.125, 'max_gap': 0.25, 'kl': 0.017012708343870603}
    """
    rollout_N = _values(rollout)
    train_N = _values(train)
    # A broken file, or a resumed run that played other tokens under the same id.
    if len(rollout_N) != len(train_N):
        return dict.fromkeys(("mean_gap", "max_gap", "kl"))
    d_N = train_N - rollout_N
    d_N = d_N[np.isfinite(d_N)]
    # A broken score may be far off: its exponential is infinite, and the cell stays empty.
    with np.errstate(over="ignore"):
        k3_N = np.expm1(d_N) - d_N
    return {"mean_gap": _mean(np.abs(d_N)), "max_gap": _max(np.abs(d_N)), "kl": _mean(k3_N)}


def tool_calls(episode: EpisodeRecord) -> Iterator[Mapping[str, Any]]:
    """Yield the environment's entry for each tool call of an episode."""
    for turn in episode.turns:
        calls = turn.info.get("tool_calls")
        if isinstance(calls, list):
            yield from (call for call in calls if isinstance(call, Mapping))


def question_of(opening: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that a model is asked: the user's messages, or all messages if none is the user's."""
    asked = [message for message in opening if message.get("role") == "user"]
    return "\n".join(bare_text(message) for message in asked or opening).strip()


def finite(value: float | None) -> float | None:
    """Return the number; None for NaN and infinity, which JSON does not have."""
    if value is not None and np.isfinite(value):
        return value
    return None


def _values(logprobs: Sequence[float | None] | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array(logprobs, dtype=np.float64)  # None becomes NaN


def _mean(values: NDArray[np.float64]) -> float | None:
    values = values[~np.isnan(values)]
    if len(values):
        return finite(float(values.mean()))
    return None


def _max(values: NDArray[np.float64]) -> float | None:
    if len(values):
        return finite(float(values.max()))
    return None
