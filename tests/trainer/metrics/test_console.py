"""Claims about what a command prints of what is logged."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from agents.types import EndReason
from tests.builders import trajectory
from trainer.metrics.console import Display, open_console


def test_a_message_is_printed_on_one_line_and_its_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    open_console()
    message = f"the checkpoint in {'/a/long/path' * 20} [bold] is damaged"
    logging.getLogger("trainer.checkpoint").warning(message)
    assert capsys.readouterr().out == f"{message}\n"


def test_a_second_command_in_one_process_prints_a_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    open_console()
    open_console()
    logging.getLogger("agents.engines").info("server 0 is back")
    assert capsys.readouterr().out == "server 0 is back\n"


def test_what_broke_an_episode_or_a_tool_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    console, seen = open_console(), set[str]()
    for end, error in (
        ("tool_fault", "KeyError: 'fig'"),
        ("env_error", "ValueError: 3"),
        ("completed", "closed twice"),
    ):
        for _ in range(2):
            episode = trajectory(end_reason=EndReason(end))
            Display(console).fault(replace(episode, error=f"Traceback\n{error}"), seen)
    assert capsys.readouterr().out == "tool_fault in sample: KeyError: 'fig'\nenv_error in sample: ValueError: 3\n"


def test_a_bar_shown_aside_gives_way_to_the_one_before() -> None:
    display = Display()

    def shown() -> list[tuple[str, float, float | None]]:
        return [(t.description.strip(), t.completed, t.total) for t in display._progress.tasks if t.visible]

    display.begin("train", 5)
    display.advance()
    with display.aside("evaluate step 1", 3):
        display.advance()
        assert shown() == [("evaluate step 1", 1, 3)]
    display.advance()
    assert shown() == [("train", 2, 5)]
