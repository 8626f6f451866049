"""Our algorithms and TRL's agree on random numbers, in loss and in gradient, wherever both define the same thing.

TRL's own `_compute_loss` and `_generate_and_score_completions` run; see `trl_peer`. All numbers are float64.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.paths import DOCS
from tests.trainer.algorithms import test_policy_loss as test_loss
from tests.trainer.algorithms.trl_peer import (
    PAIRS,
    Pair,
    Streams,
    TrlPeer,
    gradients,
    model_tokens,
    our_outcome,
    random_streams,
)
from trainer.algorithms import policy_loss as loss
from trainer.algorithms.advantages import EPS, step_advantages
from trainer.algorithms.importance_sampling import CORRECTIONS
from trainer.algorithms.objective import objective
from trainer.config.algorithm import AlgorithmConfig

pytest.importorskip("trl", minversion="1.16")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's and Transformers' own

#: What TRL adds to a standard deviation.
TRL_EPS = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_loss_and_gradient_are_those_of_trl(pair: Pair, folder: Path) -> None:
    peer = TrlPeer(folder, "GRPO", pair.correct, **pair.theirs)
    for seed in range(10):
        streams = random_streams(seed)
        ours, theirs = our_outcome(streams, pair.config), peer.outcome(streams)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(ours.gradient_N, theirs.gradient_N, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(ours.entropy_gradient_N, theirs.entropy_gradient_N, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("pair", PAIRS[1:], ids=lambda pair: pair.name)
def test_the_comparison_notices_another_algorithm(pair: Pair, folder: Path) -> None:
    """Every pair but the first differs from GRPO, so comparing with that must fail."""
    streams = random_streams(0)
    plain = our_outcome(streams, PAIRS[0].config)
    theirs = TrlPeer(folder, "GRPO", pair.correct, **pair.theirs).outcome(streams)
    assert plain.loss != pytest.approx(theirs.loss, rel=1e-6)


def test_the_example_of_the_page_on_algorithms_is_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own test passes, and with its loss the objective is TRL's CISPO, whose `epsilon_high` is the cap itself."""
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    names: dict[str, Any] = vars(loss) | vars(test_loss)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(textwrap.dedent(block), names)
    names["test_cispo_caps_the_ratio_and_keeps_the_gradient"]()
    monkeypatch.setitem(loss.POLICY_LOSSES, "cispo", names["cispo"])  # type: ignore[arg-type]
    config = AlgorithmConfig(correction="none").model_copy(update={"policy_loss": "cispo"})
    streams = random_streams(0)
    ours = our_outcome(streams, config)
    theirs = TrlPeer(folder, "GRPO", loss_type="cispo", epsilon_high=1.28).outcome(streams)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)
    torch.testing.assert_close(ours.gradient_N, theirs.gradient_N, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_on_the_first_update_rloo_has_the_gradient_of_trls_sequence_loss(seed: int, folder: Path) -> None:
    """TRL's RLOO clips the ratio of the whole sequence, ours that of each token: all are 1 on the first update.

    The losses differ (minus the mean advantage there, times the number of tokens here); their gradients must not.
    It knows no tools, so every token is the model's.
    """
    streams = random_streams(seed)
    streams = replace(streams, mask_BT=streams.inside_BT, old_logprobs_BT=streams.logprobs_BT)
    config = AlgorithmConfig(advantage="rloo", correction="none", aggregation="seq-mean-token-sum")
    theirs = TrlPeer(folder, "RLOO", beta=0.0).outcome(streams)
    torch.testing.assert_close(our_outcome(streams, config).gradient_N, theirs.gradient_N, rtol=1e-10, atol=1e-14)


def our_advantages(streams: Streams, config: AlgorithmConfig) -> torch.Tensor:
    rewards = streams.rewards_B.view(-1, streams.group_size).tolist()
    return torch.cat([torch.from_numpy(group) for group in step_advantages(rewards, config)])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [True, False])
def test_grpo_advantages_are_those_of_trl_with_its_epsilon(seed: int, scale: bool, folder: Path) -> None:
    """Both divide by the sample standard deviation; TRL adds 1e-4 to it, we 1e-6. TRL computes in float32."""
    streams = random_streams(seed)
    ours = our_advantages(streams, AlgorithmConfig(scale_by_std=scale))
    if scale:
        std_B = streams.rewards_B.view(-1, 4).std(dim=1).repeat_interleave(4)
        ours = ours * (std_B + EPS) / (std_B + TRL_EPS)
    theirs = TrlPeer(folder, "GRPO", scale_rewards="group" if scale else "none").score(streams)["advantages"]
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_rloo_advantages_are_those_of_trl(seed: int, folder: Path) -> None:
    streams = random_streams(seed)
    theirs = TrlPeer(folder, "RLOO", beta=0.0).score(streams)["advantages"]
    ours = our_advantages(streams, AlgorithmConfig(advantage="rloo"))
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_reinforce_plus_plus_is_trls_rloo_normalised_over_the_step(seed: int, folder: Path) -> None:
    """Leave-one-out is the group's mean times G / (G - 1), which dividing by the standard deviation undoes.

    What remains is TRL's 1e-4 next to a deviation 4 / 3 as large as ours with its 1e-6. TRL's `scale_rewards="batch"`
    is something else: it divides by the deviation of the rewards themselves, the groups' means included.
    """
    streams = random_streams(seed)
    theirs = TrlPeer(folder, "RLOO", beta=0.0, normalize_advantages=True).score(streams)["advantages"]
    ours = our_advantages(streams, AlgorithmConfig(advantage="reinforce++"))
    centred = our_advantages(streams, AlgorithmConfig(scale_by_std=False))
    expected = ours * (centred.std() + EPS) * (4 / 3) / (4 / 3 * centred.std() + TRL_EPS)
    torch.testing.assert_close(expected, theirs.double(), rtol=1e-5, atol=1e-6)


def test_a_token_that_the_engine_could_not_score_teaches_nothing_here_and_counts_fully_in_trl(folder: Path) -> None:
    """A difference by choice: nothing is known of its ratio. TRL takes it to be 1."""
    streams = random_streams(0)
    streams.rollout_logprobs_BT[0, 0] = torch.nan
    pair = next(pair for pair in PAIRS if pair.name == "tis")
    theirs = TrlPeer(folder, "GRPO", correct=True, **pair.theirs).score(streams)["importance_sampling_ratio"]
    tokens = model_tokens(streams, pair.config)
    ours, _ = CORRECTIONS["tis"](tokens, pair.config)
    assert theirs[0, 0].item() == 1.0 and ours[0].item() == 0.0
    total = objective(tokens, pair.config).loss
    (gradient_N,) = gradients(total, tokens.logprobs_N)
    assert total.isfinite() and gradient_N[0] == 0 and gradient_N.isfinite().all()
