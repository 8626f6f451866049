"""Recorded episodes from Python: replay, fork and the viewer, of runs, rollouts and folders."""

from __future__ import annotations

import base64
import tempfile
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from agents.recording import Recording
from agents.recording.selection import SelectionConfig
from agents.rendering.tokenizer_files import model_folder
from agents.replay import ReplayConfig, named_model, open_all, replay_all
from agents.replaying.compatibility import find_spec
from agents.replaying.continuation import changes_of, fork_by_model, only_episode, open_fork
from agents.replaying.fork import ForkConfig
from agents.replaying.runner import ReplaySummary
from agents.types import Trajectory
from agents.viewer.export import export
from agents.viewer.source import Source
from envs.errors import UserError
from envs.safe_text import escape_lines
from trueturn.arguments import NOT_GIVEN, public
from trueturn.background import run_blocking
from trueturn.environment import Environment, as_environment
from trueturn.keywords import ForkKeywords, ReplayKeywords, ViewKeywords
from trueturn.settings import HasFolder, config_of, folder_of

#: The most episodes of a page inside a notebook.
MAX_SHOWN = 256


@public(run="recorded", without=ForkConfig.model_fields.keys() - {"max_turns"} | {"show", "report"})
def replay(
    recorded: HasFolder | str | Path,
    *,
    env: Environment | str | Callable[..., Any] = NOT_GIVEN,
    **settings: Unpack[ReplayKeywords],
) -> ReplaySummary:
    """Give the recorded turns to the environment again, and return what differs from the recording.

    Args:
        recorded: a run, a rollout, or the folder of one.
        env: what `tt.env` returns or takes; by default the recorded id.
        settings: the settings of `python -m agents.replay` under the names of its flags: `model="recorded"` compares
            the token streams too, `registry`, `limit`, and so on.

    Raises:
        UserError: there is no recording, or its environment is not known here.

    Example::

        summary = tt.replay(run, model="recorded")
        summary.num_replayed, summary.differing                # (128, [])
    """

    def work() -> ReplaySummary:
        config = config_of(ReplayConfig, None, {"run": folder_of(recorded), **settings})
        return replay_all(config, open_all(config, None if env is NOT_GIVEN else as_environment(env).spec))

    return run_blocking(work)


@public(run="recorded", fork="turn", id="episode", without=("by", "images", "record"))
def fork(
    recorded: HasFolder | str | Path,
    episode: str,
    turn: int,
    model: HasFolder | str | Path,
    *,
    samples: int = 1,
    env: Environment | str | Callable[..., Any] = NOT_GIVEN,
    **settings: Unpack[ForkKeywords],
) -> list[Trajectory]:
    """Continue a recorded episode from one of its turns with a model, and return the episodes.

    Args:
        recorded: a run, a rollout, or the folder of one.
        episode: the id of the episode, such as "train-12-3".
        turn: the turn after which the model writes; 0: from the start.
        model: a model folder, a run, or "recorded": the model that the recording names.
        samples: how often the model continues.
        env: what `tt.env` returns or takes; by default the recorded id.
        settings: `temperature`, `seed`, `device`, `max_turns` and other settings of `python -m agents.replay --fork`.

    Raises:
        UserError: there is no such episode or turn, or the tokenizer is another one.

    Example::

        again = tt.fork(run, "train-0-0", turn=0, model=run, samples=4)
        [t.reward for t in again]                              # [1.0, 0.0, 1.0, 1.0]
    """

    def work() -> list[Trajectory]:
        config = config_of(ForkConfig, None, {"fork": turn, "by": "model", "samples": samples, **settings})
        recording = Recording.open(folder_of(recorded))
        if env is NOT_GIVEN:
            spec = find_spec(recording.manifest, "", ())
        else:
            spec = as_environment(env).spec
        folder = model_folder(named_model(ReplayConfig(run=folder_of(recorded), model=folder_of(model)), recording))
        selected = only_episode(recording, SelectionConfig(id=(episode,)))

        forked = open_fork(recording, selected, spec, folder, config)
        for change in changes_of(forked):
            print(escape_lines(f"not as recorded: {change}"))
        return fork_by_model(forked, folder, config)[1]

    return run_blocking(work)


@dataclass(frozen=True)
class View:
    """The viewer's page with recorded episodes, as one file; a notebook shows it inline.

    Example: `tt.view(run).open()` opens it in a browser.
    """

    path: Path

    def open(self) -> None:
        """Open the page in a browser."""
        webbrowser.open(self.path.as_uri())

    def _repr_html_(self) -> str:
        # Of an address of its own: links of a page in `srcdoc` would lead into the notebook.
        page = base64.b64encode(self.path.read_bytes()).decode()
        style = "width:100%;height:720px;border:1px solid #ccc"
        return f'<iframe src="data:text/html;base64,{page}" style="{style}"></iframe>'


@public(runs="recorded", export="path")
def view(
    *recorded: HasFolder | str | Path,
    path: str | Path | None = None,
    limit: int = MAX_SHOWN,
    **selection: Unpack[ViewKeywords],
) -> View:
    """Return the viewer's page of one or two runs, which a notebook shows inline.

    Args:
        recorded: runs, rollouts, or folders of them; a second one is compared with the first.
        path: the HTML file to write; by default a temporary one.
        limit: the most episodes to show.
        selection: which episodes: `id`, `phase`, `way`, `step`, `end_reason`, `min_reward`, `max_reward`, under the
            names of the flags of `python -m agents.view`.

    Raises:
        UserError: there is no recording, or no such episode.

    Example::

        tt.view(run, max_reward=0)                             # every token of its failures
    """
    if not 1 <= len(recorded) <= 2:
        raise UserError("recorded=", "must be one run, or two to compare", len(recorded), "give a run")
    chosen = config_of(SelectionConfig, None, {"limit": limit, **selection})
    sources = [Source(Path(folder_of(each)), chosen.matches, chosen.limit) for each in recorded]
    for source in sources:
        source.check_has_episodes()
    if path:
        file = Path(path)
    else:
        file = Path(tempfile.mkdtemp(prefix="trueturn-")) / "episodes.html"
    export(file.absolute(), sources)
    return View(file.absolute())
