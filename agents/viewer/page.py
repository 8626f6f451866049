"""Assembles the viewer's page from the files in `page/`.

The page holds one style and one script. Its Content-Security-Policy names both by hash, so a browser runs nothing else,
whatever the data contain. The data are in elements that no browser runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).with_name("page")
#: The scripts, in the order in which they are joined into one.
SCRIPTS: tuple[str, ...] = (
    *(
        "dom.js",
        "number.js",
        "text.js",
        "fragment.js",
        "source.js",
        "run.js",
        "streams.js",
        "stream.js",
        "order.js",
        "table.js",
    ),
    *("head.js", "curves.js", "bars.js", "overview.js", "episodes.js", "conversation.js", "fork.js", "token.js"),
    *("tokens.js", "strip.js", "episode.js", "beside.js", "group.js", "pair.js", "compare.js", "keys.js", "live.js"),
    "main.js",
)
#: Episodes in one block of an export.
BLOCK = 64

Mode = Literal["file", "server"]


@dataclass(frozen=True)
class Page:
    """A page: write `head`, then the elements with data, then `tail`.

    Example: `assemble("file", runs=1).policy` begins "default-src 'none'; script-src 'sha256-".
    """

    head: str
    tail: str
    policy: str


def assemble(mode: Mode, runs: int, live: bool = False, folder: Path = FOLDER, scripts: Sequence[str] = ()) -> Page:
    """Return the page; it reads its data from its own file ("file"), or requests them from its server ("server")."""
    names = scripts or SCRIPTS
    style = _read(folder / "style.css")
    script = "\n".join(_read(folder / name) for name in names)
    # The hash of the policy is that of the whole text, so it must not end early.
    for text, ends in ((style, r"</style"), (script, r"</script|<!--")):
        assert not (found := re.search(ends, text, re.IGNORECASE)), f"the page's own files contain {found}"
    policy = policy_of(mode, script, style)
    settings = json.dumps({"runs": runs, "block": BLOCK, "mode": mode, "live": live})
    text = _read(folder / "page.html")
    for mark, filling in (
        ("<!-- POLICY -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ("<!-- STYLE -->", f"<style>{style}</style>"),
        ("<!-- SCRIPT -->", f"<script>{script}</script>"),
    ):
        assert text.count(mark) == 1, f"page.html has {mark} {text.count(mark)} times"
        text = text.replace(mark, filling)
    head, mark, tail = text.partition("<!-- DATA -->")
    assert mark, "page.html has no <!-- DATA -->"
    return Page(f'{head}<script type="application/json" id="page">{settings}</script>\n', tail, policy)


def policy_of(mode: Mode, script: str, style: str) -> str:
    """Return the Content-Security-Policy of a page with one script and one style."""
    # A file has no origin of its own: everything is inside.
    images, itself = ("data: 'self'", "'self'") if mode == "server" else ("data:", "'none'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            f"img-src {images}",
            f"connect-src {itself}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read(path: Path) -> str:
    """Return a file's text with the line ends of a browser, which computes the hash from them."""
    return path.read_text(encoding="utf-8")
