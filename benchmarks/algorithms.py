"""How far the algorithms are from values worked out by hand, and from TRL: `python -m benchmarks.algorithms`.

Loss and gradient by log-probs and entropies: ours in float64 and, in brackets, in float32, against the hand-worked
cases of the tests and against TRL's own code in float64 on random batches. Differences are relative to the largest
value of a batch; the table shows the largest of them. Prints tables and writes `benchmarks/results/algorithms.json`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import RESULTS, commit, markdown, write_result
from tests.trainer.algorithms.algorithm_cases import CASES, Case, hand_tokens
from tests.trainer.algorithms.trl_peer import PAIRS, Pair, TrlPeer, gradients, our_outcome, random_streams
from trainer.algorithms.objective import objective

DTYPES = (torch.float64, torch.float32)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over the largest value of theirs."""
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()


def against_hand(case: Case) -> dict[str, Any]:
    """Return the differences of one case."""
    row: dict[str, Any] = {"algorithm": case.name}
    for dtype in DTYPES:
        tokens = hand_tokens(case.config, dtype)
        loss = objective(tokens, case.config).loss
        (gradient_N,) = gradients(loss, tokens.logprobs_N)
        name = str(dtype).removeprefix("torch.")
        row[f"loss_{name}"] = abs(loss.item() / case.loss - 1)
        row[f"gradient_{name}"] = difference(gradient_N, torch.tensor(case.gradient, dtype=torch.float64))
    return row


def against_trl(pair: Pair, folder: Path, num_batches: int) -> dict[str, Any]:
    """Return the largest differences of one algorithm over random batches."""
    peer = TrlPeer(folder, "GRPO", pair.correct, **pair.theirs)
    row: dict[str, Any] = {"algorithm": pair.name}
    for seed in range(num_batches):
        streams = random_streams(seed)
        theirs = peer.outcome(streams)
        gradient = torch.cat([theirs.gradient_N, theirs.entropy_gradient_N])
        for dtype in DTYPES:
            ours = our_outcome(streams, pair.config, dtype)
            name = str(dtype).removeprefix("torch.")
            # A batch's loss may be near 0 where its tokens' losses are not: those are as large as its gradient.
            loss = abs(ours.loss - theirs.loss) / max(abs(theirs.loss), gradient.abs().max().item())
            here = difference(torch.cat([ours.gradient_N, ours.entropy_gradient_N]), gradient)
            row[f"loss_{name}"] = max(loss, row.get(f"loss_{name}", 0.0))
            row[f"gradient_{name}"] = max(here, row.get(f"gradient_{name}", 0.0))
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the differences as a table, float32 in brackets."""
    kinds = ("loss", "gradient")
    cells = [[f"{row[f'{kind}_float64']:.0e} ({row[f'{kind}_float32']:.0e})" for kind in kinds] for row in rows]
    return markdown(("algorithm", *kinds), [(row["algorithm"], *cell) for row, cell in zip(rows, cells, strict=True)])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, default=200, help="random batches of each algorithm")
    parser.add_argument("--out", type=Path, default=RESULTS / "algorithms.json")
    args = parser.parse_args()
    at = commit()
    hand = [against_hand(case) for case in CASES]
    print(f"Against values worked out by hand\n\n{table(hand)}\n")
    with tempfile.TemporaryDirectory() as folder:
        trl = [against_trl(pair, Path(folder), args.batches) for pair in PAIRS]
    print(f"Against TRL, {args.batches} random batches of 8 sequences\n\n{table(trl)}")
    figures = {"num_batches": args.batches, "seeds": [0, args.batches - 1], "by_hand": hand, "trl": trl}
    command = f"python -m benchmarks.algorithms --batches {args.batches}"
    write_result(args.out, command, figures, at, ("torch", "transformers", "trl"))


if __name__ == "__main__":
    main()
