"""Checks the lengths of prompts: how many problems are too long, and whether the others leave room to answer."""

from __future__ import annotations

from collections.abc import Sequence

from envs.checks import Verdict, ok, warning

#: A larger share of problems left out is a warning.
MANY_LEFT_OUT = 0.1


def check_lengths(
    lengths: Sequence[int], num_kept: int, num_left_out: int, max_new_tokens: int, context_length: int
) -> Verdict:
    """Return whether prompts fit; `lengths` holds the tokens of some of the prompts that were kept.

    >>> check_lengths([300, 800], num_kept=90, num_left_out=10, max_new_tokens=256, context_length=1024).found
    'prompts of 300 to 800 tokens, and 256 more, do not fit into 1024'
    """
    share = num_left_out / max(1, num_kept + num_left_out)
    if lengths:
        shown = f"prompts of {min(lengths)} to {max(lengths)} tokens"
    else:
        shown = "no prompt could be opened"
    if lengths and max(lengths) + max_new_tokens > context_length:
        found = f"{shown}, and {max_new_tokens} more, do not fit into {context_length}"
        return warning(found, "raise --context-length, or lower --max-prompt-tokens")
    if share > MANY_LEFT_OUT:
        found = f"{num_left_out} of {num_kept + num_left_out} problems are left out for their length ({share:.0%})"
        return warning(f"{found}; {shown}", "raise --max-prompt-tokens")
    return ok(f"{shown}, {num_kept} problems, {num_left_out} left out")
