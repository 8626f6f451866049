"""Decides whether `--compile auto` compiles the learner: where that saves more time than it costs."""

from __future__ import annotations

from trainer.config.learner import LearnerConfig

#: Seconds that the first step takes longer (H100, H200; 5.6 M to 2 B parameters: 25 to 54 s).
COST_S = 40.0
#: A 2 B network on one H100, not compiled: 19,600 tokens a second, 6 operations for each parameter and token.
EAGER_FLOPS_PER_S = 2.5e14
#: The share of the time that compiling saves: 19,600 tokens a second became 31,900.
SAVED_FRAC = 0.4
#: From this size on, the memory that compiled blocks save counts too, so that networks are always compiled.
LARGE = 500_000_000


def saved_s(num_parameters: int, num_tokens: int) -> float:
    """Return the seconds that compiling saves one GPU over all steps that train on `num_tokens` tokens.

    >>> round(saved_s(5_600_000, 4_096_000), 2), round(saved_s(2_128_000_000, 4_096_000))
    (0.22, 84)
    """
    return SAVED_FRAC * 6 * num_parameters * num_tokens / EAGER_FLOPS_PER_S


def is_compiled(config: LearnerConfig, on_gpu: bool, num_parameters: int, num_tokens: int) -> bool:
    """Return whether the learner is compiled; `num_tokens` are those that each GPU trains on in all steps, at most."""
    if config.compile != "auto":
        return config.compile == "on"
    return on_gpu and (num_parameters >= LARGE or saved_s(num_parameters, num_tokens) > COST_S)


def explain(is_on: bool, num_parameters: int, num_tokens: int) -> str:
    """Return the line that says what `--compile auto` has chosen on a GPU, and why."""
    if is_on:
        return f"the learner is compiled, which takes about {COST_S:.0f} s (--compile off does without)"
    saved = f"save {saved_s(num_parameters, num_tokens):.1f} s at {num_parameters / 1e6:.1f} M parameters"
    return f"the learner is not compiled: that would {saved} and take about {COST_S:.0f} s (--compile on does it)"
