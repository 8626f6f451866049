"""Where the tests find the repository, its documents and what lies beside it; a user's clone has nothing beside it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SHARED = ROOT.parent / "shared"


def published_template(name: str) -> str:
    """Return a chat template as its family publishes it: TRL, which the tests of algorithms need too, carries them."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL, which carries the published chat templates, is not installed")
    return Path(found.origin).with_name("chat_templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8")
