"""Claims about the viewer's page inside a notebook: its links stay in its frame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import trueturn as tt
from tests.browsers import browser as browser  # skips where there is none

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.alone


def test_a_link_of_the_page_inside_a_notebook_opens_in_its_own_frame(browser: Browser, tmp_path: Path) -> None:
    view = tt.view(tt.rollout("geo3k", num_problems=2, out=tmp_path))
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><body>{view._repr_html_()}</body>", encoding="utf-8")
    page = browser.new_page()
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.get_by_role("link", name="Episodes").first.click()
    frame.get_by_text("2 episodes").first.wait_for()
    assert page.url == notebook.as_uri() and page.frames[1].url.endswith("#/episodes")
