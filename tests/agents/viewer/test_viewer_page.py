"""Claims about the page that shows a recording, made in a browser: what it draws, where it leads, what never runs."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from agents.play import run as play
from agents.recording import Recorder
from agents.viewer.export import export
from agents.viewer.server import ViewServer
from agents.viewer.source import Source
from envs.safe_text import escape_lines
from tests.agents.viewer.page_runs import (
    HOSTILE,
    PLANTED_TOKEN,
    Words,
    episode,
    manifest,
    write_hostile,
    write_long,
    write_small,
    write_thinking,
)
from tests.browsers import browser as browser  # skips where there is none
from tests.browsers import expect
from tests.windowed import windowed_recording

pytestmark = pytest.mark.alone  # a browser beside other tests is slower than its waits

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

    from agents.rendering.renderer import Renderer

WAIT_MS = 20_000


@dataclass
class Visit:
    """A page that was opened, and what it did that no page may do."""

    page: Page
    address: str
    requests: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def go(self, fragment: str) -> None:
        """Open a fragment as a link from elsewhere does: the page is loaded anew."""
        self.page.goto("about:blank")
        self.page.goto(self.address + fragment)
        self.page.wait_for_selector("html[data-ready]")

    def refuse(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog {dialog.message}")
        dialog.dismiss()

    @property
    def fragment(self) -> str:
        """What the page itself says: its address as the browser reports it comes a moment later."""
        return str(self.page.evaluate("location.hash"))


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported pages, by name."""
    folder = tmp_path_factory.mktemp("pages")
    write_small(folder / "small")
    write_small(folder / "other", groups=range(2, 5), better=0.5)
    write_hostile(folder / "hostile")
    write_long(folder / "long", num_characters=1_000_000, num_tokens=12_000)
    write_thinking(folder / "thinking")
    for name in ("small", "hostile", "long", "thinking"):
        export(folder / f"{name}.html", [Source(folder / name)])
    export(folder / "two.html", [Source(folder / "small"), Source(folder / "other")])
    return {name: folder / f"{name}.html" for name in ("small", "hostile", "long", "thinking", "two")}


@pytest.fixture
def visit(browser: Browser, pages: dict[str, Path]) -> Iterator[Open]:
    """Opens pages; after the test, none of them may have raised, asked for anything outside, or shown a dialog."""
    visits: list[Visit] = []

    def open_page(
        name: str = "small",
        fragment: str = "#/",
        scheme: Literal["dark", "light"] = "light",
        address: str = "",
        width: int = 1400,
    ) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        made = Visit(page, address or f"file://{pages[name]}")
        page.on("request", lambda request: made.requests.append(request.url))
        page.on("pageerror", lambda error: made.faults.append(str(error)))
        page.on("dialog", made.refuse)
        visits.append(made)
        made.go(fragment)
        return made

    expect.set_options(timeout=WAIT_MS)
    yield open_page
    for made in visits:
        hacked = made.page.evaluate("typeof window.__hacked")
        made.page.context.close()
        outside = [url for url in made.requests if not url.startswith((made.address, "data:", "about:"))]
        assert (made.faults, outside, hacked) == ([], [], "undefined")


# The overview ---------------------------------------------------------------------------------------------------------


def test_the_overview_shows_figures_curves_and_distributions(visit: Open) -> None:
    page = visit().page
    figures = page.locator(".key-figures")
    expect(figures).to_contain_text("50.0% → 75.0%")
    expect(figures).to_contain_text("0.10 → 0.30")
    assert page.locator(".chart").evaluate_all("all => all.map(each => each.dataset.metric)") == [
        *("reward", "turns", "rollout_train_kl", "entropy"),
    ]
    expect(page.get_by_role("group", name="rewards").get_by_role("link")).to_have_count(2)
    ends = page.get_by_role("list", name="end reasons").get_by_role("listitem")
    assert [re.sub(r"\s+", " ", text) for text in ends.all_inner_texts()] == ["completed 25", "env error 1"]


def test_a_curve_tells_its_values_and_leads_to_the_episodes_of_a_step(visit: Open) -> None:
    made = visit()
    plot = made.page.locator(".chart[data-metric=reward] .plot")
    box = plot.bounding_box()
    assert box
    made.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(made.page.locator("#tip")).to_contain_text("step 2")
    expect(made.page.locator("#tip")).to_contain_text("0.2")
    made.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(made.page.get_by_text("8 of 26 episodes", exact=True)).to_be_visible()
    assert made.fragment == "#/episodes?phase=train&from=2&to=2"


def test_the_held_out_curve_leads_to_the_episodes_of_its_evaluation(visit: Open, tmp_path: Path) -> None:
    words, folder = write_small(tmp_path / "run"), tmp_path / "run"
    with Recorder(folder / "episodes", manifest(), words.spell) as recorder:
        recorder.write(episode(words, ["\\boxed{1}"], group=1, reward=1.0), 2, "eval-2", "greedy")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [{**row, "eval/with_tool/accuracy": 0.25 * row["step"]} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluated))
    (folder / "summary.json").write_text(json.dumps({"best": {"step": 3, "way": "with_tool", "accuracy": 0.75}}))
    export(tmp_path / "page.html", [Source(folder)])
    made = visit(address=f"file://{tmp_path / 'page.html'}")
    expect(made.page.locator(".key-figures")).to_contain_text("75.0%held out, after step 3")
    plot = made.page.locator(".chart[data-metric='eval/with_tool/accuracy'] .plot")
    box = plot.bounding_box()
    assert box
    made.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(made.page.get_by_text("1 of 27 episodes", exact=True)).to_be_visible()
    assert made.fragment == "#/episodes?phase=eval-2&from=2&to=2"


def test_a_step_of_a_curve_is_chosen_by_keyboard(visit: Open) -> None:
    made = visit()
    page = made.page
    for _ in range(20):  # a tab stop like any other
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.plot')"):
            break
    expect(page.locator(".plot").first).to_be_focused()
    expect(page.locator("#tip")).to_contain_text("step 3")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tip")).to_contain_text("step 2")
    expect(page.get_by_role("slider", name="reward")).to_have_attribute(
        "aria-valuetext", re.compile("step 2.*0.2", re.S)
    )
    page.keyboard.press("Tab")
    expect(page.locator("#tip")).to_be_hidden()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("8 of 26 episodes", exact=True)).to_be_visible()
    assert made.fragment == "#/episodes?phase=train&from=2&to=2"


def test_any_metric_can_be_drawn_and_the_choice_is_in_the_address(visit: Open) -> None:
    made = visit()
    made.page.get_by_label("add a curve").select_option("lr")
    expect(made.page.locator(".chart[data-metric=lr]")).to_be_visible()
    made.go(made.fragment)
    expect(made.page.locator(".chart")).to_have_count(5)


# The table ------------------------------------------------------------------------------------------------------------


ROW = ".table-space .row:not([hidden])"
ROWS = """rows => rows.map(row => [Number(row.ariaRowIndex), row.querySelector('a').textContent])
  .sort((a, b) => a[0] - b[0]).map(row => row[1])"""


def ids(page: Page) -> list[str]:
    """Return the episodes of the rows in order of where they stand."""
    return page.locator(ROW).evaluate_all(ROWS)


@pytest.mark.parametrize(
    ("fragment", "shown"),
    [
        ("?phase=before", 2),
        ("?way=greedy&min=1", 1),
        ("?phase=train&min=1&max=1", 6),
        ("?end=env_error", 1),
        ("?fate=filtered", 4),
        ("?from=2&to=2", 8),
        ("?errors=any", 1),
        ("?q=train-2", 4),
        ("?q=boxed%7B68+problem-3", 1),
        ("?q=nothing+has+this", 0),
    ],
)
def test_filters_stand_in_the_address(fragment: str, shown: int, visit: Open) -> None:
    page = visit("small", f"#/episodes{fragment}").page
    expect(page.get_by_role("status").filter(has_text="episode")).to_have_text(f"{shown} of 26 episodes")
    assert len(ids(page)) == shown


def test_filtering_sorting_and_searching_by_hand_change_rows_and_address(visit: Open) -> None:
    made = visit("small", "#/episodes")
    page = made.page
    page.get_by_label("phase").select_option(label="train (24)")
    page.get_by_role("button", name="tokens").click()
    assert ids(page)[0] == "train-0-0" and made.fragment == "#/episodes?phase=train&sort=-num_tokens"
    page.get_by_role("button", name=re.compile("tokens")).click()
    assert ids(page)[0] == "train-0-3" and made.fragment == "#/episodes?phase=train&sort=num_tokens"
    page.get_by_label("search text").fill("train-4")
    expect(page.get_by_text("4 of 26 episodes", exact=True)).to_be_visible()
    assert ids(page) == ["train-4-3", "train-4-0", "train-4-1", "train-4-2"]
    page.get_by_role("button", name="clear").click()
    expect(page.get_by_text("26 episodes", exact=True)).to_be_visible()


def test_the_table_draws_only_rows_in_sight_and_shows_their_images(visit: Open) -> None:
    page = visit("small", "#/episodes?phase=train").page
    expect(page.locator(".row img").first).to_be_visible()
    page.evaluate(
        """() => {
          const run = app.runs[0], first = run.size, columns = {};
          for (const name of Object.keys(run.columns)) columns[name] = Array(50000).fill(run.columns[name][5]);
          columns.id = columns.id.map((_, k) => `made-${k}`);
          applyOverview(run, {first, columns, manifest: run.manifest, first_metric: run.metrics.length});
          app.view.update();
        }"""
    )
    expect(page.get_by_text("50,024 of 50,026 episodes", exact=True)).to_be_visible()
    assert page.locator(ROW).count() < 60
    page.locator(".table").evaluate("table => { table.scrollTop = table.scrollHeight; }")
    expect(page.get_by_role("link", name="made-49999")).to_be_visible()
    assert page.locator(ROW).count() < 60


def test_a_row_leads_to_its_episode_and_back_to_the_same_place(visit: Open) -> None:
    made = visit("small", "#/episodes?sort=-reward")
    page = made.page
    page.get_by_role("link", name="train-3-3").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("train-3-3")
    expect(page.get_by_text("5 of 26", exact=True)).to_be_visible()
    page.keyboard.press("j")
    expect(page.get_by_role("heading", level=1)).to_have_text("train-4-3")
    page.keyboard.press("Escape")
    expect(page.locator("[aria-selected=true] a")).to_have_text("train-4-3")
    assert made.fragment == "#/episodes?sort=-reward"


@pytest.mark.parametrize(
    ("name", "fragment", "shown"),
    [("small", "#/episodes", ("reward", "end")), ("two", "#/compare", ("small", "other", "change"))],
)
def test_a_phone_shows_what_became_of_each_row(name: str, fragment: str, shown: Sequence[str], visit: Open) -> None:
    page = visit(name, fragment, width=390).page
    for word in shown:
        column = page.get_by_role("columnheader", name=word, exact=True)
        box = column.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") == 390


# An episode -----------------------------------------------------------------------------------------------------------


def test_thinking_is_folded_and_what_is_said_stands_beside_it(visit: Open) -> None:
    page = visit("thinking", "#/episode/train-0-0").page
    first, second = (turn.locator(".message.model") for turn in page.locator(".turn").all())
    expect(first.locator("details summary")).to_have_text("thinking, 19 characters")
    expect(first.locator("details .text")).not_to_be_visible()
    expect(first.locator("> .text")).to_have_text("Try 67.")
    first.locator("summary").click()
    expect(first.locator("details .text")).to_have_text("Is it 67?</think>")
    expect(second.locator("> .text")).to_have_count(0)
    expect(second.get_by_text("nothing said")).to_be_visible()
    second.locator("summary").click()
    expect(second.locator("details .text")).to_have_text("Then <b>68</b>")


def test_an_episode_is_shown_as_turns_with_images_calls_results_and_facts(visit: Open) -> None:
    page = visit("small", "#/episode/train-2-1").page
    first, second = page.locator(".turn").all()
    expect(first.locator(".call")).to_have_text("calc_scoreanswer67ok")
    expect(first.locator(".message.tool .text")).to_have_text("Score 0: 67 is wrong.")
    expect(first.locator(".info")).to_contain_text("tool_score")
    for fact in ("32 tokens", "weights v3", "engine 250 ms", "environment 2.0 ms"):
        expect(first.locator(".turn-facts")).to_contain_text(fact)
    expect(second.locator(".message.model .text")).to_have_text("So \\boxed{1}")
    expect(second.locator(".badge")).to_have_text("done")
    assert page.locator(".verdict").inner_text().split("\n")[:8] == [
        "reward",
        "0.00",
        "advantage",
        "−0.50",
        "end",
        "completed",
        "fate",
        "train",
    ]
    page.get_by_role("button", name="enlarge").click()
    expect(page.locator("#image img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#image")).to_be_hidden()


def test_the_first_observation_is_shown_before_the_first_turn(visit: Open, tmp_path: Path) -> None:
    words = Words()
    with Recorder(tmp_path / "episodes", manifest(), words.spell) as recorder:
        for sample, first in enumerate(("It is noon.", "It is noon.", "It is one.")):
            recorder.write(episode(words, ["x", "y"], ["z"], sample_index=sample, first=first), 1)
    export(tmp_path / "page.html", [Source(tmp_path)])
    made = visit(address=f"file://{tmp_path / 'page.html'}", fragment="#/episode/train-0-0")
    assert made.page.locator(".conversation > *").all_inner_texts()[:2] == ["user\nFind x.", "user\nIt is noon."]
    made.go("#/episodes?q=noon")
    expect(made.page.get_by_text("2 of 3 episodes", exact=True)).to_be_visible()
    for look in ("", "?color=mask"):
        made.go(f"#/group/train/train/0{look}")
        expect(made.page.locator(".problem")).to_have_text(re.compile(r"Find x\.$"))
        said = made.page.locator(".beside-body > .beside-said")
        expect(said).to_have_text(["It is noon.", "It is noon.", "It is one."])
        assert said.evaluate_all("all => all.map(each => each.matches('.is-same'))") == [False, True, False]


def test_streams_stand_as_a_tree_with_what_left_the_history_and_their_own_tokens(
    visit: Open, tmp_path: Path, renderer: Renderer, checkpoint: Path
) -> None:
    # The test's thread has the event loop of the browser.
    with ThreadPoolExecutor() as pool:
        pool.submit(windowed_recording, tmp_path / "episodes", renderer, str(checkpoint)).result()
    export(tmp_path / "page.html", [Source(tmp_path)])
    made = visit(address=f"file://{tmp_path / 'page.html'}", fragment="#/episode/train-0-0")
    page = made.page
    tree = page.locator(".stream-tree li")
    left = "without 1 message and 1 image of it"
    expect(tree).to_have_text(
        [
            "stream 1turns 1 to 2",
            f"stream 2turn 3from stream 1, {left}",
            f"stream 3turn 4from stream 2, {left}",
        ]
    )
    assert tree.evaluate_all("all => all.map(each => each.style.marginLeft)") == ["0px", "12px", "24px"]
    # Turns stay in the order of play; each branch stands before the turn that it begins with.
    order = page.locator(".conversation > *").evaluate_all("all => all.map(each => each.className)")
    assert order == ["message user", "turn", "turn", "branch", "turn", "branch", "turn"]
    branch = page.locator(".branch").first
    expect(branch).to_contain_text(f"Stream 2 from stream 1, {left}")
    branch.locator("summary").click()
    expect(branch.locator(".message img")).to_have_count(1)
    # The tokens of a later stream are its own: its model tokens are those of its turn.
    branch.get_by_role("link", name="Stream 2").click()
    expect(page.locator(".segment.is-model .segment-label span").first).to_have_text("turn 3")
    expect(page.locator(".segment.is-model")).to_have_count(1)
    expect(page.locator(".tokens .fold img")).to_have_count(2)
    assert made.fragment == "#/episode/train-0-0?color=mask&stream=2"
    page.locator(".stream-tree").get_by_role("button", name="stream 3").click()
    expect(page.locator(".segment.is-model .segment-label span").first).to_have_text("turn 4")
    page.keyboard.press("3")
    expect(page.locator(".gap-value").first).to_have_text("0.125")
    page.keyboard.press("[")
    assert made.fragment == "#/episode/train-0-0?turn=1&color=gap"
    expect(page.locator(".stream-tree [aria-pressed=true]")).to_have_text("stream 1")
    made.go("#/episodes")
    expect(page.locator(".table-head")).to_contain_text("streams")


def test_the_verdict_of_a_judge_is_shown_with_its_number(visit: Open, tmp_path: Path) -> None:
    words = Words()
    said = "<b>Clear.</b>\nScore: 8"
    judged = replace(episode(words, ["x"], []), rewards={"answer": 1.0, "judge": 0.8}, verdicts={"judge": said})
    with Recorder(tmp_path / "episodes", manifest(), words.spell) as recorder:
        recorder.write(judged, 1)
    export(tmp_path / "page.html", [Source(tmp_path)])
    side = visit(address=f"file://{tmp_path / 'page.html'}", fragment="#/episode/train-0-0").page.locator(".side")
    expect(side).to_contain_text("judge0.80")
    expect(side).to_contain_text("Verdict of judge")
    expect(side.locator(".text")).to_have_text(said)


def test_what_is_known_of_the_reward_is_beside_each_turn(visit: Open, tmp_path: Path) -> None:
    page = visit("small", "#/episode/train-2-3").page
    expect(page.locator(".turn-facts")).to_contain_text("episode's reward 1.00")
    words = Words()
    played = episode(words, ["x", "y"], ["z"], reward=1.5)
    earned = [replace(turn, info={"reward": worth}) for turn, worth in zip(played.turns, (0.5, 1.0), strict=True)]
    counted = [replace(turn, reward=turn.info["reward"]) for turn in earned]
    with Recorder(tmp_path / "episodes", manifest(), words.spell) as recorder:
        recorder.write(replace(played, turns=tuple(earned)), 1)  # as recordings had them before turns had rewards
        recorder.write(replace(played, turns=tuple(counted), group=1), 1)
    export(tmp_path / "page.html", [Source(tmp_path)])
    for name, last in (
        ("train-0-0", ["episode's reward 1.50"]),
        ("train-1-0", ["so far 1.50", "episode's reward 1.50"]),
    ):
        page = visit(address=f"file://{tmp_path / 'page.html'}", fragment=f"#/episode/{name}").page
        facts = [text.split("\n") for text in page.locator(".turn-facts").all_inner_texts()]
        assert [facts[0][:2], facts[1][: 1 + len(last)]] == [["reward 0.50", "2 tokens"], ["reward 1.00", *last]]


def test_the_command_of_a_turn_plays_on_from_it_when_it_is_pasted(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, registry = tmp_path / "it's $HOME `here`", tmp_path / "my own.yaml"
    keys = "entry_point: 'envs.guess:GuessEnv', dataset: 'envs.guess:samples', max_turns: 6, description: A game."
    registry.write_text(f"mine: {{{keys}}}\n")
    guesses = "".join(f"{guess}\n.\n" for guess in range(1, 7))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(guesses.encode())))
    with ThreadPoolExecutor() as pool:  # the loop of the browser runs on this thread
        argv = ["--env", "mine", "--registry", str(registry), "--record", str(run), "--images", str(tmp_path)]
        assert pool.submit(play, argv).result() == 0
    with ViewServer([Source(run)]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = visit(address=server.url, fragment="#/episode/play-0-0").page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        turn = page.locator(".turn").nth(1)
        turn.get_by_text("play from here").click()
        turn.get_by_role("button", name="copy").click()
        expect(turn.get_by_role("button", name="copied")).to_be_visible()
        command = page.evaluate("navigator.clipboard.readText()")
        expect(turn.locator("code")).to_have_text(command)
        server.shutdown()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pasted = subprocess.run(
        ["bash", "-c", command],
        input=":quit\n",
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "--- the environment answers turn 1" in pasted.stdout and "--- turn 2," in pasted.stdout


def test_a_command_is_quoted_for_the_shell_and_there_is_none_where_a_paste_could_act_by_itself(visit: Open) -> None:
    page = visit().page
    make = "([folder, id]) => forkCommand({folder, manifest: {model: 'm'}}, {id}, 3)"
    for folder, name in (
        ("/runs/x", "train-0-0"),
        ("/a b/$(touch x)", "'; touch x; '"),
        ("/ü", "a*[b]?"),
        ("/!!", "\\"),
    ):
        pattern = re.sub(r"[*?[]", r"[\g<0>]", name)
        words = ["python", "-m", "agents.replay", folder, f"--id={pattern}", "--fork", "2", "--model", "recorded"]
        command = page.evaluate(make, [folder, name])
        assert shlex.split(command) == words and fnmatchcase(name, pattern)
    for character in "\x03\n\t\r\x1b\x7f\u009b\u202e":
        assert page.evaluate(make, [f"/runs/{character}", "x"]) is page.evaluate(make, ["/x", character]) is None


def test_a_broken_episode_shows_its_error(visit: Open) -> None:
    page = visit("small", "#/episode/train-1-0").page
    expect(page.locator(".message.error .text")).to_have_text("Traceback\nValueError: no score")


OPACITIES = r"""all => all.map(each => {
  const color = getComputedStyle(each).backgroundColor;
  return /rgba|\//.test(color) ? Number(color.match(/[\d.]+(?=\))/)[0]) : 1;
})"""


def strength(page: Page, selector: str) -> list[float]:
    """Return how opaque the background of each token is."""
    return page.locator(selector).evaluate_all(OPACITIES)


def test_the_token_with_the_planted_gap_is_listed_first_and_coloured_most(visit: Open) -> None:
    made = visit("small", "#/episode/train-2-1?color=gap")
    page = made.page
    listed = page.get_by_role("button", name="go to token").first
    expect(listed).to_contain_text(PLANTED_TOKEN)
    expect(listed).to_contain_text("1.5")
    listed.click()
    picked = page.locator(".tokens .t.is-picked")
    expect(picked).to_have_text(PLANTED_TOKEN)
    everywhere = strength(page, ".tokens .t")
    (planted,) = strength(page, ".tokens .t.is-picked")
    assert (
        made.fragment == f"#/episode/train-2-1?color=gap&token={page.locator('.t.is-picked').get_attribute('data-t')}"
    )
    assert planted > 0.6 and sum(value >= planted for value in everywhere) == 1 and sorted(everywhere)[-2] == 0
    picked.hover()
    for text in ("rollout log-prob", "trainer log-prob", "gap1.5 nats", "weightsv3", "turn2"):
        expect(page.locator("#tip")).to_contain_text(text)
    made.go(made.fragment)
    expect(page.locator(".side-token")).to_contain_text("1.5 nats")
    expect(page.locator(".tokens .t.is-picked")).to_have_text(PLANTED_TOKEN)


def test_gaps_are_coloured_against_the_largest_where_that_is_asked(visit: Open) -> None:
    made = visit("small", "#/episode/train-4-1?color=gap")
    assert max(strength(made.page, ".tokens .t")) == 0
    made.page.get_by_role("button", name="relative").click()
    assert max(strength(made.page, ".tokens .t")) > 0.6 and made.fragment.endswith("?color=gap&scale=relative")
    made.go(made.fragment)
    assert max(strength(made.page, ".tokens .t")) > 0.6


def test_keys_and_buttons_switch_the_colours(visit: Open) -> None:
    made = visit("small", "#/episode/train-2-1")
    page = made.page
    for key, color in (("1", "mask"), ("2", "probability"), ("3", "gap")):
        page.keyboard.press(key)
        expect(page.locator(f".tokens[data-color={color}]")).to_be_visible()
        assert made.fragment == f"#/episode/train-2-1?color={color}"
    page.get_by_role("button", name="mask").click()
    model, environment = strength(page, ".t.is-mine"), strength(page, ".segment.is-env .t")
    assert min(model) > max(environment)
    page.keyboard.press("v")
    expect(page.locator(".conversation")).to_be_visible()


def test_images_are_folded_and_spaces_line_ends_and_split_characters_drawn(visit: Open) -> None:
    made = visit("small", "#/episode/train-2-1?color=mask")
    expect(made.page.locator(".fold")).to_have_text("image, 6 tokens")
    expect(made.page.locator(".fold img")).to_be_visible()
    prompt = made.page.locator(".segment.is-prompt .flow")
    expect(prompt).to_have_text("<|im_start|>user⏎image, 6 tokensFind·x.<|im_end|>⏎")
    made = visit("hostile", "#/episode/train-20-0?color=mask")
    expect(made.page.locator(".segment.is-model .t").first).to_have_text("‹d9›")
    expect(made.page.locator(".segment.is-model .t").nth(1)).to_have_text("م")


def test_a_link_opens_an_episode_at_a_turn(visit: Open) -> None:
    made = visit("small", "#/episode/train-4-2?turn=2")
    expect(made.page.locator(".turn.is-current")).to_have_attribute("data-turn", "2")
    made.page.keyboard.press("[")
    expect(made.page.locator(".turn.is-current")).to_have_attribute("data-turn", "1")
    assert made.fragment == "#/episode/train-4-2?turn=1"
    made.page.get_by_role("link", name="Turn 2").click()
    expect(made.page.locator(".turn.is-current")).to_have_attribute("data-turn", "2")
    made.go("#/episode/no-such-episode")
    expect(made.page.get_by_text("holds no episode no-such-episode")).to_be_visible()


def test_arrows_lead_past_a_image(visit: Open) -> None:
    made = visit("small", "#/episode/train-2-1?color=mask")
    fold = made.page.locator(".fold")
    start = int(fold.get_attribute("data-t") or 0)
    fold.get_by_text("image, 6 tokens").click()
    made.page.keyboard.press("ArrowRight")
    assert made.fragment.endswith(f"&token={start + 6}")
    made.page.keyboard.press("ArrowLeft")
    assert made.fragment.endswith(f"&token={start}")


def test_a_link_to_a_token_behind_the_last_one_shows_the_last_one(visit: Open) -> None:
    page = visit("small", "#/episode/train-2-1?color=gap&token=99999").page
    expect(page.locator(".tokens .t.is-picked")).to_have_text("<|im_end|>")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_log_probs_of_other_tokens_colour_none_and_equal_ones_are_no_missing_score(visit: Open, tmp_path: Path) -> None:
    words = Words()
    with Recorder(tmp_path / "episodes", manifest(), words.spell) as recorder:
        one, same = episode(words, ["So \\boxed{1}"]), episode(words, ["So \\boxed{2}"], sample_index=1)
        other = episode(words, ["So \\boxed{1} or so"])
        for played in (one, same):
            recorder.write(played, 1)
        recorder.write_scores(other, 1, other.logprobs_T[other.mask_T] - 1)
        recorder.write_scores(same, 1, same.logprobs_T[same.mask_T])
    export(tmp_path / "page.html", [Source(tmp_path)])
    made = visit(address=f"file://{tmp_path}/page.html", fragment="#/episode/train-0-0?color=gap")
    expect(made.page.locator(".side-list")).to_contain_text("scored other tokens under this id")
    expect(made.page.locator(".side-facts")).to_contain_text("log-probs of other tokens")
    assert max(strength(made.page, ".tokens .t")) == 0
    made.go("#/episode/train-0-1?color=gap")
    expect(made.page.locator(".side-list")).to_contain_text("No token has a gap.")


def test_times_and_addresses_at_the_edge_are_right(visit: Open) -> None:
    made = visit()
    assert made.page.evaluate("[59, 119.7, 3599.8, 7199].map(seconds)") == [
        "59.0 s",
        "2 min 0 s",
        "1 h 0 min",
        "2 h 0 min",
    ]
    for name in ("constructor", "__proto__"):
        made.go(f"#/{name}")
        expect(made.page.get_by_text("There is no such view.")).to_be_visible()


# Side by side ---------------------------------------------------------------------------------------------------------


def test_a_group_stands_side_by_side_with_rewards_and_what_is_the_same_dimmed(visit: Open) -> None:
    made = visit("small", "#/group/train/train/2")
    page = made.page
    expect(page.locator(".beside-column")).to_have_count(4)
    assert page.locator(".reward-chip").all_inner_texts() == ["0.00", "0.00", "0.00", "1.00"]
    last = page.locator(".beside-column").nth(2).locator(".beside-turn").nth(1)
    expect(last.locator(".is-same")).to_have_text("So \\boxed{")
    page.keyboard.press("1")
    expect(page.locator(".beside-column").nth(2).locator(".is-fork")).to_have_text("2")
    page.get_by_role("button", name="by reward").click()
    expect(page.locator(".beside-column").first.locator(".reward-chip")).to_have_text("1.00")
    assert made.fragment == "#/group/train/train/2?color=mask&order=reward"
    page.keyboard.press("j")
    expect(page.get_by_role("heading", level=1)).to_have_text("Group 3")


def test_two_runs_are_compared_curve_by_curve_problem_by_problem_and_episode_by_episode(visit: Open) -> None:
    made = visit("two", "#/compare")
    page = made.page
    assert page.locator(".chart[data-metric=reward] path.line").count() == 2
    expect(page.get_by_role("status").filter(has_text="problem")).to_have_text("8 of 8 problems")
    page.get_by_role("button", name="better in the second").click()
    expect(page.get_by_role("status").filter(has_text="problem")).to_have_text("3 of 8 problems")
    row = page.locator(".table-space .row", has_text="problem-3")
    assert row.locator(".cell.figure").all_inner_texts() == ["0.25 (4)", "0.38 (4)", "+0.13"]
    row.get_by_role("link").click()
    expect(page.locator(".beside-column")).to_have_count(8)
    assert page.locator(".beside-run").all_inner_texts()[:2] == ["small · step 2", "other · step 2"]
    expect(page.locator(".beside-column").nth(5).locator(".reward-chip")).to_have_text("0.50")
    page.get_by_role("link", name="sample 2").nth(1).click()
    expect(page.locator(".verdict")).to_contain_text("0.50")
    assert made.fragment == "#/episode/train-3-2?run=1"


# Keys and themes ------------------------------------------------------------------------------------------------------


def test_the_keyboard_leads_everywhere(visit: Open) -> None:
    made = visit("small", "#/")
    page = made.page
    heading = page.get_by_role("heading", level=1)
    page.keyboard.press("e")
    expect(page.locator(".table")).to_be_visible()
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(heading).to_have_text("before-greedy-1-0")
    page.keyboard.press("j")
    expect(heading).to_have_text("train-0-0")
    page.keyboard.press("]")
    expect(page.locator(".turn.is-current")).to_have_attribute("data-turn", "1")
    page.keyboard.press("g")
    expect(heading).to_have_text("Group 0")
    page.keyboard.press("/")
    expect(page.get_by_label("search text")).to_be_focused()
    page.keyboard.type("oj?")
    expect(page.get_by_label("search text")).to_have_value("oj?")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text(
        "next, previous turn".replace("next, previous", "previous, next")
    )
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    expect(page.locator(".key-figures")).to_be_visible()


def test_a_filter_typed_just_before_another_view_was_opened_does_not_lead_back(visit: Open) -> None:
    made = visit("small", "#/episodes")
    page = made.page
    for _ in range(3):
        page.keyboard.press("/")
        page.keyboard.type("train")
        page.keyboard.press("Escape")
        page.keyboard.press("o")
        assert made.fragment == "#/"
        page.wait_for_timeout(200)  # longer than a filter waits for the next letter
        assert made.fragment == "#/"
        expect(page.locator(".key-figures")).to_be_visible()


@pytest.mark.parametrize(("keys", "turn"), [("]", "1"), ("]]", "2"), ("]]]]", "2"), ("]][", "1")])
def test_a_turn_that_is_asked_for_before_the_episode_is_read_is_shown_once_it_is(
    visit: Open, keys: str, turn: str
) -> None:
    made = visit("small", "#/")
    made.page.evaluate(
        """(keys) => {
            for (const key of ["e", "j", "j", "Enter", "j", ...keys])
                document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        }""",
        keys,
    )
    expect(made.page.locator(".turn.is-current")).to_have_attribute("data-turn", turn)
    assert made.fragment.endswith(f"?turn={turn}")


def test_keys_that_follow_each_other_at_once_are_heard_by_the_view_that_each_one_opens(visit: Open) -> None:
    page = visit("small", "#/").page
    shown = page.evaluate(
        """() => ["e", "j", "Enter", "j", "g", "o", "/"].map((key) => {
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
            return [location.hash, document.querySelector("h1").textContent];
        })"""
    )
    assert shown == [
        ["#/episodes", "Episodes"],
        ["#/episodes", "Episodes"],
        ["#/episode/before-greedy-0-0", "before-greedy-0-0"],
        ["#/episode/before-greedy-1-0", "before-greedy-1-0"],
        ["#/group/before/greedy/1", "Group 1"],
        ["#/", shown[5][1]],
        ["#/episodes", "Episodes"],
    ]
    expect(page.get_by_label("search text")).to_be_focused()
    page.go_back()
    expect(page.locator(".key-figures")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Group 1")


def background(page: Page) -> int:
    """Return how bright the page is, 0 to 255."""
    return page.evaluate("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")


def test_the_theme_is_the_systems_until_one_is_chosen(visit: Open) -> None:
    assert background(visit(scheme="dark").page) < 40
    made = visit(scheme="light")
    assert background(made.page) > 230
    made.page.keyboard.press("t")
    assert background(made.page) < 40
    made.go("#/episodes")
    assert background(made.page) < 40
    made.page.get_by_role("button", name="theme").click()
    assert background(made.page) > 230


# What others say ------------------------------------------------------------------------------------------------------


CONTRAST = Path(__file__).with_name("contrast.js").read_text()
EVERY_PAGE = {
    "small": (
        *("#/", "#/episodes", "#/episode/train-2-1", "#/episode/train-1-0", "#/episode/train-2-1?color=mask&token=30"),
        *("#/episode/train-2-1?color=gap", "#/episode/train-2-1?color=probability", "#/nothing"),
        *("#/group/train/train/2", "#/group/train/train/2?color=mask", "#/group/train/train/2?color=gap"),
    ),
    "two": ("#/", "#/compare", "#/compare/train/train/problem-2", "#/compare/train/train/problem-2?color=probability"),
    "thinking": ("#/episode/train-0-0",),
    "hostile": ("#/episode/train-21-0", "#/episode/train-22-0"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", EVERY_PAGE)
def test_every_text_stands_out_from_what_is_behind_it(name: str, scheme: Literal["light", "dark"], visit: Open) -> None:
    made = visit(name, scheme=scheme)
    for fragment in EVERY_PAGE[name]:
        made.go(fragment)
        made.page.wait_for_load_state("networkidle")
        made.page.keyboard.press("j" if fragment == "#/episodes" else "Shift")  # a row that is chosen
        made.page.evaluate(
            "document.querySelectorAll('details').forEach((each) => (each.open = true));"
            "document.querySelectorAll('.t.is-mine').forEach((each, k) => each.classList.add(`g${k % 9}`, `p${k % 9}`))"
        )
        assert made.page.evaluate(CONTRAST) == [], fragment
    made.page.keyboard.press("?")
    assert made.page.evaluate(CONTRAST) == []


def test_a_page_asks_its_server_for_nothing_that_is_not_there(browser: Browser, pages: dict[str, Path]) -> None:
    told: list[str] = []
    with ViewServer([Source(pages["small"].with_name("small"))]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.goto(server.url)
        page.wait_for_selector("html[data-ready]")
        page.wait_for_load_state("networkidle")
        page.close()
        server.shutdown()
    assert told == []


@pytest.mark.parametrize("k", range(len(HOSTILE)))
def test_texts_that_try_to_run_are_shown_to_the_letter(k: int, visit: Open) -> None:
    made = visit("hostile", f"#/episode/train-{k}-0")
    page, text = made.page, HOSTILE[k]
    for place in (".message.user .text", ".turn .message.model .text", ".message.tool .text", ".message.error .text"):
        assert page.locator(place).first.text_content() == text
    for place in (".call-name", ".call dt", ".call dd", ".call .badge"):
        assert page.locator(place).first.text_content() == text
    page.keyboard.press("1")
    shown = page.locator(".segment.is-model .flow").first.text_content() or ""
    assert shown.replace("·", " ") == f"{text}<|im_end|>"
    page.locator(".segment.is-model .t").first.hover()
    page.keyboard.press("g")
    assert page.locator(".beside-turn .text").first.text_content() == text
    assert page.locator("main iframe, main script, main style, main svg").count() == 0
    assert page.locator("a[href]").evaluate_all("all => all.every(a => a.getAttribute('href').startsWith('#'))")


def test_the_policy_lets_no_other_script_run_and_nothing_be_fetched(visit: Open) -> None:
    page = visit("hostile").page
    page.evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.__hacked = 1";
          const button = document.createElement("button");
          button.setAttribute("onclick", "window.__hacked = 1");
          document.body.append(script, button);
          button.click();
        }"""
    )
    assert page.evaluate("fetch('https://example.org/').then(() => 'fetched', () => 'refused')") == "refused"


def test_hostile_ids_phases_and_labels_are_only_text(visit: Open) -> None:
    made = visit("hostile", "#/episodes")
    page = made.page
    expect(page.locator(".row", has_text=HOSTILE[1]).first).to_be_visible()
    page.get_by_label("way").select_option(index=2)
    expect(page.get_by_text("1 of 11 episodes", exact=True)).to_be_visible()
    page.locator(".row-link").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text('</script>-"><img src=x onerror=alert(1)>-23-0')
    expect(page.locator(".call")).to_contain_text('"a": null')
    page.keyboard.press("o")
    expect(page.get_by_role("button", name="</script>")).to_be_visible()


def test_what_would_not_show_is_named_and_text_from_right_to_left_stays_by_itself(visit: Open) -> None:
    page = visit("hostile", "#/episode/train-21-0").page
    assert page.locator(".message.model .hidden-char").all_inner_texts() == ["RLO", "LRI", "NUL ESC"]
    expect(page.locator(".message.model .text")).to_contain_text("gnp.exe")
    odd = [text for code in range(sys.maxunicode + 1) if escape_lines(text := chr(code)) != text]
    odd += ["a\u200db", "a\ufe0f\ufe0f"]
    shown = page.evaluate(
        "codes => codes.map(each => visible(String.fromCodePoint(...each)))", [[*map(ord, t)] for t in odd]
    )
    assert [text for text, name in zip(odd, shown, strict=True) if text == name] == []
    assert (
        page.evaluate("visible('\u2764\ufe0f \U0001f468\u200d\U0001f469 \u0646\u200c\u0647\t\\n')").count("\u27e8") == 0
    )
    page = visit("hostile", "#/episode/train-20-0").page
    text = page.locator(".message.model .text")
    assert text.evaluate("node => [node.dir, getComputedStyle(node).unicodeBidi]") == ["auto", "plaintext"]
    assert text.evaluate("node => getComputedStyle(node).direction") == "rtl"


def test_letters_without_a_look_are_named(visit: Open) -> None:
    page = visit().page
    texts = ["a\\u{e0041}\\u{e0042}b", "a\\u{e0101}b", "a\\u00ad\\u061cb", "\\u{1f600}\\ufe0f"]
    named = page.evaluate(f"[{', '.join(f'visible(`{text}`)' for text in texts)}]")
    assert named == ["a⟨U+E0041 U+E0042⟩b", "a⟨U+E0101⟩b", "a⟨SHY ALM⟩b", "\U0001f600\ufe0f"]


def test_a_broken_image_leaves_a_word(visit: Open) -> None:
    page = visit("hostile", "#/episode/train-22-0").page
    expect(page.locator(".message.user .no-image")).to_have_text("no image")


def test_a_turn_of_a_million_characters_is_drawn_in_pieces(visit: Open) -> None:
    page = visit("long", "#/episode/train-0-0").page
    text = page.locator(".message.model .text")
    assert len(text.text_content() or "") == 20_000
    page.get_by_role("button", name="show all 1,000,000 characters").click()
    expect(text).to_contain_text("word end.")
    assert len(text.text_content() or "") == 1_000_000


def test_a_long_stream_is_drawn_as_far_as_one_looks(visit: Open) -> None:
    page = visit("long", "#/episode/train-1-0?color=mask").page
    expect(page.locator(".tokens .t").first).to_be_visible()
    assert page.locator(".tokens .t").count() < 9_000
    # At once: what scrolls to the button draws more, and moves it on.
    page.get_by_role("button", name="show all").evaluate("button => button.click()")
    expect(page.locator(".tokens .t")).to_have_count(12_010)
    expect(page.get_by_role("button", name="show all")).to_have_count(0)


# A run that goes on ---------------------------------------------------------------------------------------------------


def test_a_live_page_takes_in_what_is_new_and_keeps_its_place(visit: Open, tmp_path: Path) -> None:
    words = write_small(tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "config.yaml").touch()
    with (
        ViewServer([Source(tmp_path)]) as server,
        Recorder(tmp_path / "episodes", manifest(), words.spell) as recorder,
    ):
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        page = visit(address=server.url, fragment="#/episodes?phase=train&sort=-step").page
        expect(page.locator("#live")).to_have_text("live")
        page.locator(".table").evaluate("table => { table.scrollTop = 300; }")
        expect(page.locator(".row img").first).to_be_visible()
        upper = page.evaluate("app.view && document.elementFromPoint(300, 300).closest('.row').textContent")
        played = episode(words, ["brand new \\boxed{68}"], group=9, reward=1.0)
        recorder.write(played, 4)
        expect(page.get_by_text("25 of 27 episodes", exact=True)).to_be_visible()
        assert page.evaluate("document.elementFromPoint(300, 300).closest('.row').textContent") == upper
        page.get_by_label("search text").fill("brand new")
        expect(page.locator(f"{ROW} .cell.figure").nth(2)).to_have_text("–")
        recorder.write_outcome(played, 4, "train", 2.5)
        expect(page.locator(ROW)).to_contain_text("+2.50")
        (tmp_path / "metrics.jsonl").open("a").write('{"step": 4, "reward": 0.9}\n')
        page.keyboard.press("Escape")
        page.keyboard.press("o")
        expect(page.locator(".chart[data-metric=reward] .chart-value")).to_have_text("0.9")
        page.context.set_offline(True)
        expect(page.locator("#live")).to_have_text("connection lost")
        server.shutdown()


def test_a_group_on_screen_takes_in_what_becomes_known_of_its_samples(visit: Open, tmp_path: Path) -> None:
    words = Words()
    (tmp_path / "config.yaml").touch()
    with (
        Recorder(tmp_path / "episodes", manifest(), words.spell) as recorder,
        ViewServer([Source(tmp_path)]) as server,
    ):
        played = [episode(words, [f"So \\boxed{{{k}}}"], sample_index=k, reward=float(k)) for k in range(2)]
        recorder.write(played[0], 1)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = visit(address=server.url, fragment="#/group/train/train/0").page
        expect(page.locator(".beside-column")).to_have_count(1)
        recorder.write(played[1], 1)
        expect(page.locator(".beside-column")).to_have_count(2)
        expect(page.locator(".verdict")).to_contain_text("0.50")
        recorder.write_outcome(played[1], 1, "train", 2.5)
        expect(page.locator(".beside-column").nth(1)).to_contain_text("+2.50")
        server.shutdown()


def test_words_of_tests_are_bytes_again() -> None:
    words = Words()
    assert b"".join(words.spell(token) for token in words.ids("So \\boxed{é}\n")) == "So \\boxed{é}\n".encode()
