"""Settings of the documentation's site, which `make docs` builds from the Markdown files.

The README is the first page. Its list of pages is the navigation, in the same order.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "TrueTurn"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "agents/model/starter/README.md"]
exclude_patterns = [".*", "build", "runs", "shared"]
smartquotes = False  # they turn `--` into a dash
myst_heading_anchors = 4  # headings have the anchors that GitHub gives them

README = Path(__file__).parent.parent / "README.md"


def navigation() -> str:
    """Return the pages that the README lists, a section for each line of its list; then those about the project."""
    listed = README.read_text(encoding="utf-8").split("## Documentation")[1].split("\n## ")[0]
    sections = re.findall(r"^- (\w+): (.*)", listed, re.MULTILINE)
    pages = {title: re.findall(r"\(([\w/-]+)\.md", links) for title, links in sections}
    # A page that stands in no section fails the build.
    pages["Project"] = ["CONTRIBUTING", "docs/mutation", "CHANGELOG", "agents/model/starter/README"]
    trees = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", *names, "```"]) for title, names in pages.items()
    ]
    return "\n\n".join(trees)


def add_navigation(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the navigation below the README, where a reader of the repository does not see it."""
    if page == root_doc:
        text[0] += "\n\n" + navigation()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
