"""Claims about what a command prints of what is logged."""

from __future__ import annotations

import logging

import pytest

from trainer.metrics.console import open_console


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
