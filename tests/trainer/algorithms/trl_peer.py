"""TRL's own trainers, given log-probs in place of a network's: the code that they train with, on numbers of our choice.

Legend: B completions padded to T tokens, N their model tokens, G completions of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.aggregation import token_weights
from trainer.algorithms.objective import objective
from trainer.config.algorithm import AlgorithmConfig
from trainer.types import ModelTokens

#: TRL's constant of `dr_grpo`, and the longest completion there is here.
MAX_TOKENS = 12


@dataclass(frozen=True, eq=False)
class Streams:
    """Completions of several turns: `mask_BT` is True on model tokens, `inside_BT` on those and the environment's."""

    inside_BT: Tensor
    mask_BT: Tensor
    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor
    entropy_BT: Tensor
    advantages_B: Tensor
    rewards_B: Tensor
    group_size: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """A loss and its gradients by log-probs and entropies of model tokens."""

    loss: float
    gradient_N: Tensor
    entropy_gradient_N: Tensor


def random_streams(seed: int, num_groups: int = 2, group_size: int = 4, spread: float = 0.8) -> Streams:
    """Return random float64 numbers; ratios have `spread` nats, so that some are far outside every bound."""
    generator = torch.Generator().manual_seed(seed)
    count = num_groups * group_size

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(count, MAX_TOKENS, generator=generator, dtype=torch.float64)

    lengths_B = torch.randint(1, MAX_TOKENS + 1, (count, 1), generator=generator)
    inside_BT = torch.arange(MAX_TOKENS) < lengths_B
    # The first token is the model's, so that no stream is without one; of the rest one in three is not.
    model_BT = torch.rand(count, MAX_TOKENS, generator=generator) > 1 / 3
    model_BT[:, 0] = True
    now_BT = -noise(1.0).abs()
    old_BT = now_BT + noise(spread)
    return Streams(
        inside_BT=inside_BT,
        mask_BT=inside_BT & model_BT,
        logprobs_BT=now_BT,
        old_logprobs_BT=old_BT,
        rollout_logprobs_BT=old_BT + noise(spread),
        ref_logprobs_BT=now_BT + noise(spread),
        entropy_BT=noise(1.0).abs(),
        advantages_B=torch.randn(count, generator=generator, dtype=torch.float64),
        # Eighths, which float32 holds exactly: TRL keeps rewards in it.
        rewards_B=torch.randint(-8, 9, (count,), generator=generator).double() / 8,
        group_size=group_size,
    )


def model_tokens(streams: Streams, config: AlgorithmConfig, dtype: torch.dtype = torch.float64) -> ModelTokens:
    """Return the model tokens of the streams as one micro-batch; log-probs and entropies are leaves."""
    mask_BT = streams.mask_BT
    lengths_B = mask_BT.sum(1)
    weights_B = torch.from_numpy(token_weights(lengths_B.tolist(), config.aggregation, config.loss_constant))
    sample_N = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    return ModelTokens(
        logprobs_N=streams.logprobs_BT[mask_BT].to(dtype).requires_grad_(),
        entropy_N=streams.entropy_BT[mask_BT].to(dtype).requires_grad_(),
        old_logprobs_N=streams.old_logprobs_BT[mask_BT].to(dtype),
        rollout_logprobs_N=streams.rollout_logprobs_BT[mask_BT].to(dtype),
        ref_logprobs_N=streams.ref_logprobs_BT[mask_BT].to(dtype),
        advantages_N=streams.advantages_B[sample_N].to(dtype),
        weights_N=weights_B[sample_N].to(dtype),
        sample_N=sample_N,
        num_samples=len(lengths_B),
    )


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Return the loss's gradient by each leaf, zeros where there is none."""
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def our_outcome(streams: Streams, config: AlgorithmConfig, dtype: torch.dtype = torch.float64) -> Outcome:
    """Return what `objective` makes of the streams."""
    tokens = model_tokens(streams, config, dtype)
    loss = objective(tokens, config).loss
    return Outcome(loss.item(), *gradients(loss, tokens.logprobs_N, tokens.entropy_N))


class TrlPeer:
    """A `GRPOTrainer` or `RLOOTrainer` on a network of a few hundred random weights, which is never run.

    `correct` applies the correction for vLLM without vLLM: what was sampled is given, too.

    Example::

        peer = TrlPeer(folder, "GRPO", loss_type="dapo", epsilon_high=0.28)
        peer.outcome(random_streams(seed=0)).loss
    """

    def __init__(self, folder: Path, kind: str, correct: bool = False, group_size: int = 4, **settings: Any) -> None:
        import trl

        write_network(folder)
        from datasets import Dataset

        arguments = getattr(trl, f"{kind}Config")(
            output_dir=str(folder / "out"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=2 * group_size,
            num_generations=group_size,
            max_completion_length=MAX_TOKENS,
            **settings,
        )
        self.trainer = getattr(trl, f"{kind}Trainer")(
            model=str(folder),
            args=arguments,
            reward_funcs=self._reward,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 2 * group_size),
        )
        self.kind = kind
        self.trainer.use_vllm = correct
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer._generate = self._generate
        self.trainer._get_per_token_logps_and_entropies = self._logprobs
        self._streams = random_streams(0)
        self._leaves: tuple[Tensor, Tensor] | None = None

    def _reward(self, completions: list[str], **_: Any) -> list[float]:
        return self._streams.rewards_B.tolist()

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        lengths = self._streams.inside_BT.sum(1).tolist()
        prompt_ids, completion_ids = [[1]] * len(lengths), [[1] * length for length in lengths]
        texts = ["a"] * len(lengths)
        if self.kind == "RLOO":
            return prompt_ids, completion_ids, texts
        masks, rollout = (
            [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
            for rows in (self._streams.mask_BT.long(), self._streams.rollout_logprobs_BT)
        )
        return prompt_ids, completion_ids, masks, texts, rollout, {}, None, []

    def _logprobs(self, model: Any, *_: Any, **options: Any) -> tuple[Tensor, Tensor | None, None]:
        if self._leaves is not None:
            return *self._leaves, None
        now = self._streams.ref_logprobs_BT if model is self.trainer.ref_model else self._streams.old_logprobs_BT
        return now[:, : self._width], None, None

    @property
    def _width(self) -> int:
        """The longest completion: TRL pads no further."""
        return int(self._streams.inside_BT.sum(1).max())

    def score(self, streams: Streams) -> dict[str, Any]:
        """Return what TRL makes of rollouts before the first update: advantages and correction among it."""
        self._streams, self._leaves = streams, None
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # what TRL makes tensors of from lists would be float32
        try:
            return self.trainer._generate_and_score_completions([{"prompt": "a"}] * len(streams.rewards_B))
        finally:
            torch.set_default_dtype(before)

    def outcome(self, streams: Streams) -> Outcome:
        """Return TRL's loss with the streams' own advantages, and its gradients."""
        inputs = self.score(streams) | {"advantages": streams.advantages_B}
        if self.kind == "GRPO":  # left out by TRL where it takes the present log-probs for them
            inputs["old_per_token_logps"] = streams.old_logprobs_BT[:, : self._width]
        now, entropy = (
            values[:, : self._width].clone().requires_grad_() for values in (streams.logprobs_BT, streams.entropy_BT)
        )
        self._leaves = now, entropy
        loss = self.trainer._compute_loss(self.trainer.model, inputs)
        mask_BT = streams.mask_BT[:, : self._width]
        gradient_BT, entropy_gradient_BT = gradients(loss, now, entropy)
        assert not gradient_BT[~mask_BT].any() and not entropy_gradient_BT[~mask_BT].any()
        return Outcome(loss.item(), gradient_BT[mask_BT], entropy_gradient_BT[mask_BT])


def write_network(folder: Path) -> None:
    """Write a checkpoint of a random Llama with eight words, unless it is there."""
    if (folder / "config.json").exists():
        return
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<pad>", "a", "b", "c", "d", "e", "f", "<eos>"))}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=7, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Pair:
    """The same algorithm in our settings, besides --correction none and equal clips of 0.2, and in TRL's."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    correct: bool = False
    config: AlgorithmConfig = field(init=False)

    def __post_init__(self) -> None:
        config = AlgorithmConfig(**{"correction": "none", "clip_high": 0.2, **self.ours})
        object.__setattr__(self, "config", config)


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15}
GSPO = {"policy_loss": "gspo", "clip_low": 0.1, "clip_high": 0.15}
# TRL multiplies the KL by the ratio unless told not to; that is another estimator.
KL = {"beta": 0.1, "use_bias_correction_kl": False}

PAIRS = (
    Pair("grpo", {"aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
    Pair("dapo", {"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    Pair("bnpo", {}, {"loss_type": "bnpo"}),
    Pair("dr_grpo", {"aggregation": "constant", "loss_constant": MAX_TOKENS}, {"loss_type": "dr_grpo"}),
    Pair("sum of tokens (luspo)", {"aggregation": "seq-mean-token-sum"}, {"loss_type": "luspo"}),
    Pair("gspo", {"aggregation": "seq-mean-token-mean", **GSPO}, {"loss_type": "grpo", **SEQUENCE}),
    Pair("gspo, token-mean", GSPO, {"loss_type": "dapo", **SEQUENCE}),
    # TRL bounds the ratio itself, also for good tokens, whose ratio is clipped below that anyway.
    Pair("dual clip", {"dual_clip": 2.5}, {"loss_type": "dapo", "delta": 2.5}),
    Pair("kl k3", {"kl_coef": 0.1}, {"loss_type": "dapo", **KL}),
    # TRL takes the mean over tokens whatever the loss type, so the two agree for a mean over tokens alone.
    Pair("entropy bonus", {"entropy_coef": 0.1}, {"loss_type": "dapo", "entropy_coef": 0.1}),
    Pair("tis", {"correction": "tis"},
         {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate",
          "vllm_importance_sampling_clip_max": 2.0}, correct=True),
    Pair("icepop", {"correction": "icepop"},
         {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_mask",
          "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0}, correct=True),
    Pair("mis", {"correction": "mis"},
         {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_mask",
          "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0}, correct=True),
    Pair("all at once", {"dual_clip": 2.5, "kl_coef": 0.1, "entropy_coef": 0.1, "correction": "tis"},
         {"loss_type": "dapo", "delta": 2.5, "entropy_coef": 0.1, **KL,
          "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}, correct=True),
)  # fmt: skip
