"""Settings of the algorithm: advantages, loss, aggregation, regularisers and importance sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from envs.config.plugins import Plugin
from envs.config.settings import NO_FLAG, Section

AdvantageName = Literal["grpo", "rloo", "reinforce++", "turn", "gigpo"]
PolicyLossName = Literal["ppo", "gspo", "likelihood"]
AggregationName = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
KLEstimatorName = Literal["k1", "k2", "k3"]
CorrectionName = Literal["none", "tis", "icepop", "mis"]
ADVANTAGE = Plugin("an advantage", ("groups", "config"))
POLICY_LOSS = Plugin("a policy loss", ("tokens", "config"))
CORRECTION = Plugin("a correction", ("tokens", "config"))


class AlgorithmConfig(Section):
    """Advantages, policy loss, aggregation, regularisers and importance sampling."""

    advantage: AdvantageName | Annotated[str, ADVANTAGE] = Field(
        default="grpo",
        description="baseline of a reward: the group's mean (grpo), the mean of the group's other episodes (rloo), or "
        "the group's mean, divided by the step's standard deviation (reinforce++); or an advantage for each turn, from "
        "the rewards that follow it: against the group's other episodes (turn), or against turns from the same state "
        "too (gigpo)",
    )
    discount: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="with --advantage turn or gigpo: what a reward counts for the turn before, as a share",
    )
    # Dr. GRPO (arXiv 2503.20783): dividing weighs easy and hard problems up.
    scale_by_std: bool = Field(
        default=True,
        description="with --advantage grpo or gigpo: divide by the group's standard deviation; Dr. GRPO does not",
    )
    policy_loss: PolicyLossName | Annotated[str, POLICY_LOSS] = Field(
        default="ppo",
        description="clipped ratio of each token (ppo) or of the whole sequence (gspo), or the log-prob without "
        "clipping (likelihood: REINFORCE)",
    )
    # The asymmetric bounds of DAPO (arXiv 2503.14476): rare tokens may gain more than they lose.
    clip_low: float = Field(default=0.2, ge=0, lt=1, description="lower clip of the ratio: 1 - clip_low")
    clip_high: float = Field(default=0.28, ge=0, description="upper clip of the ratio: 1 + clip_high")
    # Without it a negative advantage with a large ratio is unbounded (arXiv 1912.09729).
    dual_clip: float = Field(
        json_schema_extra=NO_FLAG,
        default=0.0,
        ge=0,
        description="bound on the loss of a token with negative advantage, as a multiple of the advantage; above 1, "
        "such as 3; 0: no bound",
    )
    # Denominators are those of the whole update, so gradients do not depend on micro-batches or ranks.
    aggregation: AggregationName = Field(default="token-mean", description="how to combine the token losses of a step")
    loss_constant: int = Field(
        json_schema_extra=NO_FLAG,
        default=0,
        ge=0,
        description="divisor of each sequence's sum with --aggregation constant; 0: --max-new-tokens",
    )
    # Above 0 the reference network is loaded too, which takes its memory.
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference network in the loss")
    # Schulman's estimators: joschu.net/blog/kl-approx.html.
    kl_estimator: KLEstimatorName = Field(
        json_schema_extra=NO_FLAG,
        default="k3",
        description="estimator of that KL; k1 and k3 are unbiased in value, k2 in gradient",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus in the loss")
    # Engine and trainer compute the same token with other kernels, so their probabilities differ.
    correction: CorrectionName | Annotated[str, CORRECTION] = Field(
        default="tis",
        description="importance weight, the trainer's over the engine's probability: clamped per token (tis), or 0 out "
        "of bounds per token (icepop) or per sequence (mis)",
    )
    # Truncated importance sampling bounds the variance from above alone.
    correction_cap: float = Field(
        json_schema_extra=NO_FLAG, default=2.0, gt=0, description="largest weight of --correction tis"
    )
    correction_low: float = Field(
        json_schema_extra=NO_FLAG, default=0.5, ge=0, description="smallest ratio that icepop and mis keep"
    )
    correction_high: float = Field(
        json_schema_extra=NO_FLAG,
        default=5.0,
        gt=0,
        validate_default=True,
        description="largest ratio that icepop and mis keep",
    )
    # A limit says nothing of the answer; still, without a loss the policy may learn to run into it.
    mask_truncated: bool = Field(
        json_schema_extra=NO_FLAG,
        default=False,
        description="leave episodes that reached a limit (turns, tokens, context) out of the loss; the statistics "
        "include them",
    )

    @field_validator("dual_clip")
    @classmethod
    def _is_off_or_above_one(cls, value: float) -> float:
        # At 1 or below, the bound would cut the loss of tokens that are not off-policy at all.
        if 0 < value <= 1:
            raise ValueError("must be above 1, or 0 for none")
        return value

    @field_validator("discount")
    @classmethod
    def _is_of_turns(cls, value: float, info: ValidationInfo) -> float:
        # Advantages of whole episodes read no turn, so the setting would do nothing in silence.
        if value != 1 and info.data.get("advantage") in ("grpo", "rloo", "reinforce++"):
            raise ValueError("needs --advantage turn or gigpo, or nothing reads it")
        return value

    @field_validator("loss_constant")
    @classmethod
    def _is_read(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("aggregation") != "constant":
            raise ValueError("needs --aggregation constant, or nothing reads it")
        return value

    @field_validator("correction_high")
    @classmethod
    def _is_above_low(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("correction_low", 0.0)
        if value <= low:
            raise ValueError(f"must be above correction_low {low:g}")
        return value
