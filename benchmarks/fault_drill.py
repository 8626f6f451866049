"""Play the 64 episodes of the fault drill, of which half go wrong: `python -m benchmarks.fault_drill`.

The drill is that of the tests (`tests/agents/rollout/fault_drill.py`). Prints what each kind of fault ended as, and how
long the step took; writes `benchmarks/results/fault_drill.json`.
"""

from __future__ import annotations

import argparse
from collections import Counter

from agents.model import STARTER_PATH
from agents.rendering.renderer import Renderer
from benchmarks.report import RESULTS, commit, markdown, write_result
from tests.agents.rollout.fault_drill import (
    ENDS,
    GROUP_SIZE,
    PROBLEMS,
    STEP_TIMEOUT_S,
    WALL_LIMIT_S,
    by_fault,
    drill,
    said,
)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(STARTER_PATH), help="folder with a tokenizer")
    args = parser.parse_args()
    at = commit()
    groups, seconds = drill(Renderer.from_checkpoint(args.model))
    ends = by_fault(groups)
    rows = [
        (fault, sum(counts.values()), ", ".join(f"{n} {end}" for end, n in counts.items()), said(groups, fault)[:90])
        for fault, counts in ends.items()
    ]
    print(markdown(("episode", "played", "ended as", "recorded"), rows))
    total = sum((counts for counts in ends.values()), Counter[str]())
    figures = {
        "concurrent_episodes": len(PROBLEMS) * GROUP_SIZE,
        "step_timeout_s": STEP_TIMEOUT_S,
        "wall_limit_s": WALL_LIMIT_S,
        "seconds": round(seconds, 2),
        "end_reasons": dict(total),
        "by_fault": {fault: dict(counts) for fault, counts in ends.items()},
        "groups_resampled": sum(bool(group.discarded) for group in groups),
        "groups_dropped": sum(group.is_dropped for group in groups),
    }
    print({key: value for key, value in figures.items() if key != "by_fault"})
    write_result(RESULTS / "fault_drill.json", "python -m benchmarks.fault_drill", figures, at)
    wrong = {fault for fault, counts in ends.items() if set(counts) != {ENDS[fault]}}
    if wrong or seconds > WALL_LIMIT_S:
        raise SystemExit(f"wrong ends: {sorted(wrong)}; {seconds:.1f} s of {WALL_LIMIT_S} s")


if __name__ == "__main__":
    main()
