"""Where the tests find the repository, its documents and what lies beside it; a user's clone has nothing beside it."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SHARED = ROOT.parent / "shared"
