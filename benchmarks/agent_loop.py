"""What the agent loop itself costs: `python -m benchmarks.agent_loop`.

Plays episodes of three turns (a tool call, another, the answer) with an engine whose tokens are fixed beforehand; all
it does is to let the other episodes go on before it answers. All else is as in training, through `rollout_groups` with
eight episodes a problem: the prompt is rendered, sampled ids are decoded, calls are parsed and made, answers tokenised,
trajectories built and checked. The limit is a bare Python loop over the same environment with the same texts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agents.engines.scripted import ScriptedEngine
from agents.model import STARTER_PATH
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.garbage_collection import tune_garbage_collection
from agents.rollout.manager import rollout_groups
from agents.types import EndReason, GenerateRequest, SamplingParams
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.env import EnvArgs
from envs.spec import EnvLimits
from envs.tool_env import ToolEnv
from envs.tools import tool
from envs.types import Sample

GROUP_SIZE = 8
CONCURRENCIES = (1, 64, 1024, 8192)
CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "%d"}}</tool_call>'
TEXTS = (CALL % 37, CALL % 68, "The answer is \\boxed{68}.")
ARGS = EnvArgs(max_turns=len(TEXTS))


class ScoreEnv(ToolEnv):
    """A tool that grades with one comparison, so that the environment's own work is little."""

    @tool
    def calc_score(self, answer: str) -> str:
        """Return the score of an answer.

        Args:
            answer: the answer
        """
        return "Score 1.0" if answer == self.sample.label else "Score 0.0"

    def reward(self, final_text: str) -> float:
        """Return 1 where the answer is in the text."""
        return float(f"boxed{{{self.sample.label}}}" in final_text)


def make_samples(count: int) -> list[Sample]:
    """Return problems with different prompts."""
    return [
        Sample(f"{k}", ({"role": "user", "content": f"Find x, given that y is {k}. Write \\boxed{{}}."},), label="68")
        for k in range(count)
    ]


def play_bare(samples: Sequence[Sample]) -> None:
    """Play every problem eight times, without engine, tokens, limits or checks."""
    for sample in samples:
        for _ in range(GROUP_SIZE):
            env = ScoreEnv(sample, ARGS)
            env.reset()
            for text in TEXTS:
                observation, done, _ = env.step(text)
                if done:
                    break
                env.format_observation(observation)
            assert env.reward(TEXTS[-1]) == 1.0
            env.close()


def play(episode: Episode, samples: Sequence[Sample], concurrency: int) -> float:
    """Play every problem eight times, so many episodes at once; return the seconds that the checks took."""
    groups = asyncio.run(
        rollout_groups(episode, samples, ScoreEnv, ARGS, GROUP_SIZE, seed=0, max_concurrent=concurrency)
    )
    played = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in played:
        assert trajectory.end_reason is EndReason.COMPLETED and trajectory.reward == 1.0, trajectory
        assert len(trajectory.turns) == len(TEXTS), trajectory
    return sum(trajectory.timing.check_s for trajectory in played)


def measure(play_all: Callable[[], float], num_episodes: int, repeats: int) -> dict[str, float]:
    """Return the best of a few runs: microseconds of processor and of wall time a turn, and episodes a second."""
    num_turns = num_episodes * len(TEXTS)
    best: dict[str, float] = {}
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        check_s = play_all()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not best or cpu / num_turns * 1e6 < best["cpu_us_per_turn"]:
            best = {
                "cpu_us_per_turn": cpu / num_turns * 1e6,
                "wall_us_per_turn": wall / num_turns * 1e6,
                "check_us_per_turn": check_s / num_turns * 1e6,
                "episodes_per_s": num_episodes / wall,
            }
    return best


class FixedEngine(ScriptedEngine):
    """Writes the ids `turns[k]` as turn k of every session, stop token included, in no time."""

    def __init__(self, turns: Sequence[tuple[int, ...]]) -> None:
        super().__init__(None, lambda turn, request: "")
        self.turns = turns

    def turn(self, number: int, request: GenerateRequest) -> tuple[int, ...]:
        """Return the ids."""
        return self.turns[number]


def build_episode(renderer: Renderer, isolation: str) -> Episode:
    """Return the loop with fixed turns."""
    tokenize = renderer.tokenizer
    turns = [(*tokenize(text, add_special_tokens=False)["input_ids"], renderer.stop_ids[-1]) for text in TEXTS]
    limits = Limits(max_turns=len(TEXTS), max_new_tokens=1024, env=EnvLimits(inline=isolation == "inline"))
    sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)
    return Episode(FixedEngine(turns), renderer, limits, sampling)


def token_counts(episode: Episode) -> dict[str, int]:
    """Return how long the parts of a stream are."""
    (group,) = asyncio.run(rollout_groups(episode, make_samples(1), ScoreEnv, ARGS, 1, seed=0))
    (trajectory,) = group.trajectories
    first, second, last = trajectory.turns
    return {
        "prompt": trajectory.prompt_length,
        "first_turn": first.end - first.start,
        "between": second.start - first.end,
        "last_turn": last.end - last.start,
        "stream": len(trajectory.ids_T),
    }


def measure_all(renderer: Renderer, num_episodes: int, repeats: int) -> list[tuple[str, int, dict[str, float]]]:
    """Return (where, how many at once, figures) of every way to play, the bare loop first."""
    samples = make_samples(num_episodes // GROUP_SIZE)

    def bare() -> float:
        play_bare(samples)
        return 0.0

    def loop(isolation: str, concurrency: int) -> dict[str, float]:
        episode = build_episode(renderer, isolation)
        play(episode, samples[:16], concurrency)  # starts threads
        return measure(lambda: play(episode, samples, concurrency), num_episodes, repeats)

    unsettled = loop("inline", 1024)
    tune_garbage_collection()  # as a run does once all is loaded
    bare()
    rows = [("bare loop", 1, measure(bare, num_episodes, repeats))]
    rows += [(where, n, loop(where, n)) for where in ("inline", "thread") for n in CONCURRENCIES]
    return [*rows, ("inline, heap not settled", 1024, unsettled)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(STARTER_PATH), help="folder with a tokenizer")
    parser.add_argument("--episodes", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "agent_loop.json")
    args = parser.parse_args()
    at = commit()
    renderer = Renderer.from_checkpoint(args.model)
    measured = measure_all(renderer, args.episodes, args.repeats)
    limit = measured[0][2]["cpu_us_per_turn"]
    figures, rows = [], []
    for name, concurrency, best in measured:
        ratio = best["cpu_us_per_turn"] / limit
        figures.append({"where": name, "concurrency": concurrency, **best, "ratio": ratio})
        numbers = (f"{best[key]:.1f}" for key in ("cpu_us_per_turn", "wall_us_per_turn", "check_us_per_turn"))
        rows.append((name, concurrency, *numbers, f"{best['episodes_per_s']:.0f}", f"{ratio:.1f}"))
    columns = ("where", "at once", "CPU µs/turn", "wall µs/turn", "checks µs/turn", "episodes/s", "CPU, of bare loop")
    print(markdown(columns, rows))
    tokens = token_counts(build_episode(renderer, "inline"))
    print(f"tokens: {tokens}")
    command = f"python -m benchmarks.agent_loop --episodes {args.episodes} --repeats {args.repeats}"
    result = {"group_size": GROUP_SIZE, "turns": len(TEXTS), "tokens": tokens, "figures": figures}
    write_result(args.out, command, result, at, ("transformers", "tokenizers", "numpy"))


if __name__ == "__main__":
    main()
