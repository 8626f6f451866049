"""Environments alone, with scripted replies and no model: `python -m benchmarks.env_throughput`.

Plays whole episodes of `geo3k` (two calls, then the answer) and `guess` (halving the range) through the runner that the
agent loop uses, 1, 64 and 1,024 at once, and in a bare Python loop, which is the limit. A turn is one step, checked and
formatted; building, resetting, the reward and closing are in the episode's time and so in its turns'.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.env import Env
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner
from envs.guess import HIGHEST
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Message, Sample

CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "%s"}}</tool_call>'

#: What a scripted policy writes next, given what it was told last ("" at first).
Policy = Callable[[str], str]


def geo3k_policy(sample: Sample) -> Policy:
    """Return a policy that checks a wrong answer, then the right one, then gives it."""
    texts = iter([CALL % "1/7", CALL % str(sample.label).replace("\\", "\\\\"), f"\\boxed{{{sample.label}}}"])
    return lambda told: next(texts)


def guess_policy(sample: Sample) -> Policy:
    """Return a policy that halves the range."""
    low, high, guess = 1, HIGHEST, 0

    def reply(told: str) -> str:
        nonlocal low, high, guess
        low, high = (guess + 1 if told == "Higher." else low), (guess - 1 if told == "Lower." else high)
        guess = (low + high) // 2
        return str(guess)

    return reply


POLICIES: dict[str, Callable[[Sample], Policy]] = {"geo3k": geo3k_policy, "guess": guess_policy}


def play_bare(spec: EnvSpec, build: Callable[..., Env], samples: Sequence[Sample]) -> int:
    """Play one episode after the other without limits; return the number of turns."""
    turns = 0
    for sample in samples:
        env, policy, told = build(sample, spec.args()), POLICIES[spec.id](sample), ""
        text = ""
        env.reset()
        for _ in range(spec.max_turns):
            text = policy(told)
            observation, done, _ = env.step(text)
            turns += 1
            if done:
                break
            told = _text(env.format_observation(observation))
        assert env.reward(text) == 1.0, "the script solves every problem"
        env.close()
    return turns


async def play_concurrently(
    spec: EnvSpec, build: Callable[..., Env], samples: Sequence[Sample], concurrency: int
) -> int:
    """Play episodes through the runner, so many at once; return the number of turns."""
    waiting: Iterator[Sample] = iter(samples)
    limits = EnvLimits.of(spec)
    turns = 0

    async def one(sample: Sample) -> None:
        nonlocal turns
        runner, policy, told = EnvRunner(lambda: build(sample, spec.args()), limits), POLICIES[spec.id](sample), ""
        text = ""
        await runner.open()
        for _ in range(spec.max_turns):
            text = policy(told)
            result = await runner.step(text)
            turns += 1
            if result.done:
                break
            told = _text(result.messages)
        assert await runner.reward(text) == 1.0, "the script solves every problem"
        await runner.close()

    async def worker() -> None:
        for sample in waiting:
            await one(sample)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return turns


def _text(messages: Any) -> str:
    chosen: Message = messages[0] if isinstance(messages, list | tuple) else messages
    return chosen["content"]


def measure(play: Callable[[], int], episodes: int, repeats: int) -> dict[str, float]:
    """Return the best of a few runs: episodes a second, and microseconds of wall and of processor time a turn."""
    best: dict[str, float] = {}
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        turns = play()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not best or wall < best["seconds"]:
            best = {
                "seconds": wall,
                "episodes_per_s": episodes / wall,
                "wall_us_per_turn": wall / turns * 1e6,
                "cpu_us_per_turn": cpu / turns * 1e6,
            }
    return best


def measure_env(env_id: str, num_episodes: int, repeats: int) -> list[tuple[str, int, dict[str, float]]]:
    """Return (where, how many at once, figures) of every way to run an environment, the bare loop first."""
    base = get_spec(env_id)
    source = base.load_dataset("train", num_episodes, 0)
    samples = [source[index] for index in range(num_episodes)]

    def bare() -> int:
        return play_bare(base, load_env(base), samples)

    def runner(isolation: str, concurrency: int) -> dict[str, float]:
        spec = base.model_copy(update={"isolation": isolation})
        build = load_env(spec)
        # One at a time takes long where each call changes threads or processes.
        chosen = samples if concurrency > 1 else samples[: len(samples) // 4]

        def play(count: int = len(chosen)) -> int:
            return asyncio.run(play_concurrently(spec, build, chosen[:count], concurrency))

        play(2 * concurrency)  # starts threads and workers
        return measure(play, len(chosen), repeats)

    bare()  # fills the caches of the grader
    result = [("bare loop", 1, measure(bare, num_episodes, repeats))]
    for isolation in ("inline", "thread", "process"):
        for concurrency in (1, 64, 1024) if isolation != "process" else (1, 64):
            result.append((isolation, concurrency, runner(isolation, concurrency)))
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "env_throughput.json")
    args = parser.parse_args()
    at, rows, figures = commit(), [], []
    for env_id in POLICIES:
        measured = measure_env(env_id, args.episodes, args.repeats)
        limit = measured[0][2]["wall_us_per_turn"]
        for name, concurrency, best in measured:
            ratio = best["wall_us_per_turn"] / limit
            figures.append({"env": env_id, "isolation": name, "concurrency": concurrency, **best, "ratio": ratio})
            numbers = (f"{best[key]:.0f}" for key in ("episodes_per_s", "wall_us_per_turn", "cpu_us_per_turn"))
            rows.append((env_id, name, concurrency, *numbers, f"{ratio:.1f}"))
    columns = ("environment", "where", "at once", "episodes/s", "wall µs/turn", "CPU µs/turn", "wall, of bare loop")
    print(markdown(columns, rows))
    command = f"python -m benchmarks.env_throughput --episodes {args.episodes} --repeats {args.repeats}"
    write_result(args.out, command, {"figures": figures}, at)


if __name__ == "__main__":
    main()
