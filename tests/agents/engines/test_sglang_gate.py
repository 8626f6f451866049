"""Claims about where turns wait for others while their server writes for many."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import pytest

from agents.engines.sglang.gate import SHARE, Gate

WAIT_S = 0.4


async def entered(gate: Gate) -> float:
    """Return how long a turn waits."""
    began = time.monotonic()
    await asyncio.wait_for(gate.enter(), 10)
    return time.monotonic() - began


async def gate_with(turns: ExitStack, written: int) -> Gate:
    """Return a gate of a server that has been writing so many turns for long enough to count."""
    gate = Gate(WAIT_S)
    for _ in range(written):
        turns.enter_context(gate.writing())
    await asyncio.sleep(WAIT_S)
    return gate


@pytest.mark.parametrize(("written", "others", "waits"), [(SHARE, 0, False), (64, 0, True), (64, 7, False)])
def test_a_turn_waits_until_an_eighth_of_those_that_are_written_wait(written: int, others: int, waits: bool) -> None:
    async def main() -> None:
        with ExitStack() as turns:
            gate = await gate_with(turns, written)
            waited = await asyncio.gather(*(entered(gate) for _ in range(others + 1)))
            assert all((seconds > WAIT_S / 2) == waits for seconds in waited)
            assert max(waited) < 5

    asyncio.run(main())


def test_many_that_begin_at_once_do_not_wait_and_without_a_limit_none_does() -> None:
    async def main(gate: Gate) -> None:
        async def turn() -> float:
            seconds = await entered(gate)
            with gate.writing():
                await asyncio.sleep(gate.wait_s / 2)
            return seconds

        assert max(await asyncio.gather(*(turn() for _ in range(200)))) < 0.9

    asyncio.run(main(Gate(1.0)))
    asyncio.run(main(Gate(0.0)))


def test_turns_that_end_let_those_go_that_wait() -> None:
    async def main() -> None:
        with ExitStack() as turns:
            gate = await gate_with(turns, 64)
            gate.wait_s = 20.0
            gate._began = dict.fromkeys(gate._began, time.monotonic() - 30)
            waiting = asyncio.create_task(entered(gate))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            turns.close()
            assert await waiting < 5

    asyncio.run(main())


def test_a_turn_that_is_cancelled_counts_no_longer_and_holds_none_back() -> None:
    async def main() -> None:
        with ExitStack() as turns:
            gate = await gate_with(turns, 64)
            gone = [asyncio.create_task(gate.enter()) for _ in range(7)]
            await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            await asyncio.wait(gone)
            assert WAIT_S / 2 < await entered(gate) < 5
            assert not gate._waiting

    asyncio.run(main())
