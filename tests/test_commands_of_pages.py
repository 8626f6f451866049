"""Every command line of the README and the pages is one that the program takes."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from tests.paths import DOCS, ROOT
from trainer.config.learner import ClusterConfig
from trainer.config.run import RunConfig
from trainer.config.sources import write_config

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
#: Whose commands are read.
PACKAGES = ("agents", "envs", "starter", "trainer")
#: What ends a command in a shell.
ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "2>"}


class Parsed(Exception):
    """The flags were read and checked; nothing is to be run."""


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield module and arguments of each `python -m` line in a page's blocks that show a shell, and in its text."""
    text = page.read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    starts = re.finditer(
        r"^(?:\w*\$ )?(?:[A-Z_]+=\S+ )*python -m ([\w.]+)(.*(?:\n(?!\w*\$ ).*)*)", blocks, re.MULTILINE
    )
    inline = re.finditer(r"`python -m ([\w.]+)([^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    named = (found for found in inline if found[2].strip() not in ("", "..."))  # a command, not only its name
    for module, rest in (found.groups() for found in (*starts, *named)):
        if module.partition(".")[0] in PACKAGES:
            yield module, words_of(rest)


def words_of(rest: str) -> list[str]:
    """Return the arguments of a command at the beginning of a text, which goes on behind an unclosed quote."""
    for line in accumulate(rest.split("\n"), "{}\n{}".format):
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        with contextlib.suppress(ValueError):  # no closing quotation
            return list(takewhile(lambda word: word not in ENDS, words))
    raise ValueError(f"a quote is not closed: {rest}")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to the folder of a reader, who has a run under each name and what the pages say of variables."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_takes_every_command_line_of_a_page(
    page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        (reader / name).write_text(text)
    refused = []
    for module, argv in commands(page):
        for flag, word in pairwise(argv):
            if flag == "--resume":
                (reader / word).mkdir(parents=True, exist_ok=True)
                backend = "megatron" if "--pp" in argv else "fsdp"
                write_config(RunConfig(cluster=ClusterConfig(backend=backend)), reader / word / "config.yaml")
        try:
            with monkeypatch.context() as patched:
                parse_only(module, argv, patched)
        except UserError as error:
            refused.append(f"{module} {shlex.join(argv)}: {error}")
    assert not refused, "\n".join(refused)


def parse_only(name: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the arguments of a command as it does."""
    package = (ROOT / name.replace(".", "/")).is_dir()
    module: Any = importlib.import_module(f"{name}.__main__" if package else name)
    parse: Callable[..., Any] = module.parse

    def parse_and_stop(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(module, "parse", parse_and_stop)
    with pytest.raises((Parsed, SystemExit)):  # --help and --print-config exit
        module.run(argv)


def test_the_pages_show_many_commands() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 80
