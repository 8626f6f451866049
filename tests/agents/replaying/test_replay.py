"""Claims about `python -m agents.replay`: each kind of difference is found, alone, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agents.recording import EpisodeRecord, Manifest, Recording
from agents.recording.selection import SelectionConfig, select_episodes
from agents.recording.stream_schema import ImageRecord
from agents.replay import ReplayConfig, open_all, replay_all, run
from agents.replaying.difference import MAX_KEPT, Difference, differences, is_same, shortened
from agents.replaying.report import kinds
from agents.replaying.runner import MAX_MEMORY, ReplaySummary, play_window, windows
from agents.replaying.stream_replayer import StreamReplayer
from agents.types import EndReason
from envs.config.cli import exit_code
from envs.errors import UserError
from envs.types import Sample
from tests.golden.make import FOLDER
from tests.paths import ROOT

CALCULATOR, ZOOM = str(FOLDER / "calculator"), str(FOLDER / "geo3k_zoom")

PLANTED = '''
import random, time
from PIL import Image
from envs.calculator import CalculatorEnv
from envs.geo3k.zoom import Geo3kZoomEnv
from tests.paths import ROOT

COUNT = [0]


class Planted:
    """Another environment with one thing changed, which `options["plant"]` names."""

    @property
    def plant(self):
        return self.args.options["plant"]

    @property
    def tools(self):
        tools = super().tools
        if self.plant == "tools":
            return [{**tool, "function": {**tool["function"], "description": "Other."}} for tool in tools]
        return tools

    def reset(self):
        observation, info = super().reset()
        return ({"obs_str": "It is noon.", "role": "user"} if self.plant == "first" else observation), info

    def step(self, text):
        COUNT[0] += 1
        if self.plant == "raise":
            raise RuntimeError("no")
        if self.plant == "hang":
            time.sleep(1.0)
        observation, done, info = super().step(text)
        if self.plant == "outcome":
            info["tool_calls"] = [{**call, "outcome": "odd"} for call in info["tool_calls"]]
        if self.plant == "info":
            info["more"] = 1
        return observation, done and self.plant != "done", info

    def format_observation(self, observation):
        if "messages" not in observation:
            return {"role": "user", "content": observation["obs_str"]}
        messages = [dict(message) for message in super().format_observation(observation)]
        for message in messages:
            parts = message["content"]
            if self.plant == "hostile":
                message["content"] = "\\x1b[2J[red]stop[/red]\\u202e\\x07\\nnext"
            if self.plant in (more := {"observation": "!", "random": random.random(), "count": COUNT[0]}):
                message["content"] += str(more[self.plant])
            if self.plant == "image" and isinstance(parts, list):
                for part in parts:
                    if part["type"] == "image":
                        part["image"].putpixel((0, 0), (1, 2, 3))
        return messages

    def reward(self, text):
        return super().reward(text) + (0.5 if self.plant == "reward" else 0.0)

    def close(self):
        if self.plant == "close":
            raise RuntimeError("stuck")


class Calculator(Planted, CalculatorEnv):
    pass


class Zoom(Planted, Geo3kZoomEnv):
    pass
'''


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A registry of environments with a plant each: calculator-reward, zoom-image, ..."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.py").write_text(PLANTED)
    entries = {}
    for name, base in (("calculator", "Calculator"), ("zoom", "Zoom")):
        for plant in (
            "none", "tools", "first", "observation", "image", "outcome", "info", "done", "reward", "raise", "hang",
            "close", "random", "count", "hostile",
        ):  # fmt: skip
            entries[f"{name}-{plant}"] = {
                "entry_point": f"planted:{base}",
                "description": "planted",
                "max_turns": 4,
                "options": {"plant": plant},
                "step_timeout_s": 0.4 if plant == "hang" else 30.0,
            }
    path = folder / "registry.yaml"
    path.write_text(json.dumps(entries))  # JSON is YAML
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield path


def outcome_of(run: str, **settings: object) -> ReplaySummary:
    config = ReplayConfig.model_validate({"run": run, **settings})
    return replay_all(config, open_all(config))


def found_kinds(outcome: ReplaySummary) -> set[str]:
    return set(kinds(outcome.differing))


@pytest.mark.parametrize(
    ("plant", "expected", "with_stream"),
    [
        ("none", set(), set()),
        ("tools", {"tools"}, {"tools", "tokens"}),
        ("first", {"first observation"}, {"first observation", "tokens"}),
        ("observation", {"observation"}, {"observation", "tokens"}),
        ("outcome", {"tool outcome"}, {"tool outcome"}),
        ("info", {"info"}, {"info"}),
        ("reward", {"reward"}, {"reward"}),
        ("done", {"done", "end reason"}, {"done", "end reason"}),
        ("raise", {"end reason"}, {"end reason"}),
        ("hang", {"end reason"}, {"end reason"}),
        ("close", {"error"}, {"error"}),
    ],
)
def test_a_planted_difference_is_found_and_nothing_else(
    plant: str, expected: set[str], with_stream: set[str], registry: Path
) -> None:
    settings = {"env": f"calculator-{plant}", "registry": (registry,), "selection": {"limit": 6}}
    assert found_kinds(outcome_of(CALCULATOR, **settings)) == expected
    assert found_kinds(outcome_of(CALCULATOR, model="recorded", **settings)) == with_stream


def test_one_changed_pixel_of_a_image_that_a_tool_gives_is_found(registry: Path) -> None:
    settings = {"env": "zoom-image", "registry": (registry,)}
    outcome = outcome_of(ZOOM, **settings)
    assert found_kinds(outcome) == {"image"}
    first = outcome.differing[0].differences[0]
    assert first.turn == 1 and first.recorded.startswith("images/") and first.recorded != first.replayed
    # In the stream, what stands there is another image with as many tokens.
    assert found_kinds(outcome_of(ZOOM, model="recorded", **settings)) == {"image", "images of the stream"}


def test_a_difference_says_turn_place_and_both_values(registry: Path) -> None:
    selection = {"id": ("evaluate-scripted-5-*",)}
    outcome = outcome_of(CALCULATOR, env="calculator-outcome", registry=(registry,), selection=selection)
    (found,) = outcome.differing
    each = found.differences[0]
    assert (each.kind, each.turn, each.place, each.recorded, each.replayed) == (
        "tool outcome",
        1,
        "[0].outcome",
        "ok",
        "odd",
    )


# The stream: the record is changed, and the environment is as it was --------------------------------------------------


@dataclass
class Changed:
    """A recording whose episodes are changed as they are read."""

    recording: Recording
    changes: dict[str, object]

    @property
    def manifest(self) -> Manifest:
        return self.recording.manifest

    def episodes(self) -> Iterator[EpisodeRecord]:
        for episode in self.recording.episodes():
            yield episode.model_copy(update=self.changes)

    def sample(self, episode: EpisodeRecord) -> Sample:
        return self.recording.sample(episode)


def stream_difference(run: str, id: str, **changes: object):
    """Return what differs in an episode whose record is changed so."""
    config = ReplayConfig.model_validate({"run": run, "model": "recorded", "selection": {"id": (id,)}})
    opened = open_all(config)
    changed = Changed(Recording.open(run), changes)
    object.__setattr__(opened, "source", changed)
    (found,) = replay_all(config, opened).differing
    (difference,) = found.differences
    return difference


def test_the_first_token_that_differs_is_named_with_its_turn_and_text() -> None:
    episode = next(e for e in Recording.open(CALCULATOR).episodes() if len(e.turns) > 1)
    place = episode.turns[1].start - 1  # the last token that is read before the second turn
    ids = (*episode.ids[:place], 7, *episode.ids[place + 1 :])
    found = stream_difference(CALCULATOR, episode.id, ids=ids)
    assert (found.kind, found.turn, found.place) == ("tokens", 2, f"token {place}")
    assert found.recorded[0][0] == 7 and found.replayed[0] == [episode.ids[place], "\n"]


def test_mask_spans_and_grids_are_compared() -> None:
    episode = next(e for e in Recording.open(ZOOM).episodes() if len(e.images) > 1)
    place = episode.turns[0].start
    mask = (*episode.mask[: place - 1], 1, *episode.mask[place:])
    with_more = {"mask": mask, "logprobs": (-0.0, *episode.logprobs)}
    found = stream_difference(ZOOM, episode.id, **with_more)
    assert (found.kind, found.place, found.recorded, found.replayed) == ("mask", f"token {place - 1}", 1, 0)
    longer = stream_difference(ZOOM, episode.id, prompt_length=episode.prompt_length - 1)
    assert (longer.kind, longer.recorded) == ("place of a turn", episode.prompt_length - 1)
    old = episode.images[1]
    image = ImageRecord(digest=old.digest, grid=(1, 2, 2), num_tokens=old.num_tokens)
    other = stream_difference(ZOOM, episode.id, images=(episode.images[0], image))
    assert (other.kind, other.place) == ("images of the stream", "[1][1][1]")


def test_a_text_that_the_tokens_do_not_spell_is_found() -> None:
    episode = next(iter(Recording.open(CALCULATOR).episodes()))
    turns = (episode.turns[0].model_copy(update={"text": "other"}), *episode.turns[1:])
    assert stream_difference(CALCULATOR, episode.id, turns=turns).kind == "text of a turn"


# What is not steady ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", ["random", "count"])
def test_an_environment_that_is_random_or_counts_is_said_to_be_unsteady(
    plant: str, registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [CALCULATOR, "--env", f"calculator-{plant}", "--registry", str(registry)]
    assert run(argv) == 1
    out = capsys.readouterr().out
    assert "not deterministic: of 16 episodes replayed once more, alone, 13 gave another result" in out
    assert outcome_of(CALCULATOR, env="calculator-observation", registry=(registry,)).unsteady == []


def test_rounding_and_addresses_in_memory_are_no_difference_but_all_else_is() -> None:
    assert is_same(0.1 + 0.2, 0.3) and is_same(1, 1.0) and is_same("<f at 0x7f1234>", "<f at 0x7fabcd>")
    assert not is_same(0.3, 0.3001) and not is_same(1, True) and not is_same("0x7f1234", "0x7fabcd")
    assert not is_same(None, 0) and not is_same(2**60, 2**60 + 1)


# The command ----------------------------------------------------------------------------------------------------------


def test_exit_codes_are_0_without_1_with_differences_and_2_for_what_cannot_be_run(
    registry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([CALCULATOR]) == 0
    assert "23 episodes, 23 replayed, 0 differ" in capsys.readouterr().out
    assert run([CALCULATOR, "--env", "calculator-reward", "--registry", str(registry)]) == 1
    for argv in (
        [str(tmp_path)],
        [CALCULATOR, "--env", "calculater"],
        [CALCULATOR, "--model", str(tmp_path)],
        [CALCULATOR, "--id", "nobody"],
        [CALCULATOR, "--end-reason", "bored"],
    ):
        assert exit_code(lambda argv=argv: run(argv)) == 2, argv
        assert capsys.readouterr().err.startswith("error: ")


BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "tokenizers"}:
            raise ImportError(f"{name} must not be imported")


sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("env_id", ["geo3k_zoom", "frozen_lake"])
def test_the_command_runs_without_torch_and_without_transformers(env_id: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def python(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True)

    assert "must not be imported" in python("-c", "import torch").stderr
    assert "must not be imported" in python("-c", "import transformers").stderr
    done = python("-m", "agents.replay", str(FOLDER / env_id))
    assert done.returncode == 0, done.stderr
    assert " replayed, 0 differ" in done.stdout


def test_what_a_model_or_an_environment_says_is_printed_and_never_obeyed(
    registry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [CALCULATOR, "--env", "calculator-hostile", "--registry", str(registry), "--report", str(tmp_path / "r")]
    assert run(argv) == 1
    out = capsys.readouterr().out
    assert not {"\x1b", "\u202e", "\x07"} & set(out)
    assert "\\x1b[2J[red]stop[/red]\\u202e\\x07\\nnext" in "".join(line.strip() for line in out.splitlines())
    assert "\x1b[2J[red]" in json.loads((tmp_path / "r").read_text())["found"][0]["differences"][0]["replayed"]


def test_the_report_has_every_difference(registry: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run([CALCULATOR, "--env", "calculator-reward", "--registry", str(registry), "--report", str(path), "--show", "1"])
    report = json.loads(path.read_text())
    assert (report["env"], report["episodes"], report["differing"]) == ("calculator-reward", 23, 23)
    assert report["kinds"] == {"reward": 23} and len(report["found"]) == 23
    rewards = {e.id: e.reward for e in Recording.open(CALCULATOR).episodes()}
    for found in report["found"]:
        (each,) = found["differences"]
        assert (each["recorded"], each["replayed"]) == (rewards[found["id"]], rewards[found["id"]] + 0.5)


def test_what_is_not_as_it_was_is_said_and_is_no_difference(
    tmp_path: Path, registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {
        "entry_point": "planted:Calculator", "description": "x", "max_turns": 4, "options": {"plant": "none"},
        "version": "2", "reward_min_val": -1.0,
    }  # fmt: skip
    (tmp_path / "changed.yaml").write_text(json.dumps({"calculator": entry}))
    assert run([CALCULATOR, "--registry", str(tmp_path / "changed.yaml"), "--min-reward", "1"]) == 0
    out = capsys.readouterr().out
    assert "version 2 (recorded: 1)" in out and "reward_min_val -1.0 (recorded: 0.0)" in out
    assert "the code of 'calculator' is not that of the recording" in out
    assert run([CALCULATOR]) == 0
    assert "note" not in capsys.readouterr().out


def test_code_is_taken_from_the_users_own_registries_and_never_from_where_a_recording_points(
    registry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((FOLDER / "calculator" / "recording.json").read_text())
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "episodes.jsonl.gz").write_bytes((FOLDER / "calculator" / "episodes.jsonl.gz").read_bytes())
    (copy / "stranger.py").write_text("raise SystemExit('the code of a stranger runs')")
    manifest["env"] |= {"id": "calculator-none", "entry_point": "stranger:Env"}
    (copy / "registry.yaml").write_text(json.dumps({"calculator-none": {"entry_point": "stranger:Env"}}))
    (copy / "recording.json").write_text(json.dumps(manifest | {"registry": str(copy / "registry.yaml")}))
    monkeypatch.chdir(copy)
    rule = "environment: must be in the registry, got calculator-none; give --registry {} "
    rule = re.escape(rule.format(copy / "registry.yaml"))
    for flags in ((), ("--fork", "1", "--id", "train-0-0")):
        with pytest.raises(UserError, match=rule):
            run([".", *flags])
    (copy / "registry.yaml").unlink()
    with pytest.raises(UserError, match=f"give the file that has it with --registry .*; the run had it in {copy}"):
        run(["."])
    assert run([".", "--registry", str(registry)]) == 0
    assert run([".", "--env", "calculator"]) == 0
    assert "stranger" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plant", "found"),
    [("reward", []), ("done", []), ("info", [("info", 1)]), ("raise", [("end reason", None)])],
)
def test_up_to_a_turn_only_what_came_before_counts(plant: str, found: list[object], registry: Path) -> None:
    episode = next(e for e in Recording.open(CALCULATOR).episodes() if len(e.turns) == 2 and e.turns[1].done)
    config = ReplayConfig(run=CALCULATOR, env=f"calculator-{plant}", registry=(registry,), model="recorded")
    replayer = open_all(config).replayer
    assert isinstance(replayer, StreamReplayer)
    changes = differences(episode, asyncio.run(replayer.play(episode, 1)), 1)
    assert [(each.kind, each.turn) for each in changes] == found
    if plant == "raise":
        assert changes[0].recorded == "continues" and str(changes[0].replayed).startswith("env_error: ")


def test_episodes_are_chosen_by_id_end_reason_reward_way_and_number() -> None:
    episodes = list(Recording.open(CALCULATOR).episodes())

    def ids(**config: object) -> list[str]:
        return [e.id for e in select_episodes(episodes, SelectionConfig.model_validate(config))]

    assert ids() == [e.id for e in episodes]
    assert ids(id=("evaluate-scripted-1-*", "evaluate-short-4-0")) == ["evaluate-scripted-1-0", "evaluate-short-4-0"]
    assert ids(way=("short",)) == [e.id for e in episodes if e.way == "short"]
    truncated = [e.id for e in episodes if e.end_reason in (EndReason.MAX_TURNS, EndReason.TOKEN_BUDGET)]
    assert ids(end_reason=("max_turns", "token_budget")) == truncated
    assert ids(max_reward=0.5, min_reward=0) == [e.id for e in episodes if e.reward == 0.0]
    assert ids(min_reward=0.5) == [e.id for e in episodes if e.reward == 1.0]
    assert ids(limit=2) == [e.id for e in episodes[:2]] and ids(phase=("train",)) == [] == ids(step=(3,))


def test_no_more_is_read_than_the_limit_asks_for() -> None:
    def one_and_a_fault() -> Iterator[EpisodeRecord]:
        yield next(Recording.open(CALCULATOR).episodes())
        raise AssertionError("read on")

    assert len(list(select_episodes(one_and_a_fault(), SelectionConfig(limit=1)))) == 1


@pytest.mark.parametrize(("share", "most"), [(0.001, 20), (0.4, 3), (1.0, 1)])
def test_episodes_are_in_memory_only_as_far_as_there_is_room(share: float, most: int) -> None:
    episode = next(Recording.open(FOLDER / "calculator").episodes())
    episodes = [(place, episode.model_copy()) for place in range(20)]
    for _, each in episodes:
        each._memory = int(share * MAX_MEMORY)
    found = list(windows(iter(episodes), 32))
    assert max(map(len, found)) == most and [place for window in found for place, _ in window] == list(range(20))


def test_so_many_episodes_of_a_window_are_played_at_a_time_as_the_flag_says() -> None:
    episode = next(Recording.open(FOLDER / "calculator").episodes())
    window = [(place, episode) for place in range(20)]
    now, peak, played = 0, 0, set[int]()

    async def play(place: int, episode: EpisodeRecord) -> None:
        nonlocal now, peak
        now, peak = now + 1, max(peak, now + 1)
        await asyncio.sleep(0)
        now -= 1
        played.add(place)

    asyncio.run(play_window(play, window, max_concurrent=8))
    assert (peak, played, window) == (8, set(range(20)), [])


def test_a_kept_difference_shows_where_long_values_differ() -> None:
    old, new = "a" * 10**6 + "b" + "c" * 10**6, "a" * 10**6 + "d" + "c" * 10**6
    kept = shortened(Difference("observation", 1, "[0].content", old, new))
    assert max(len(kept.recorded), len(kept.replayed)) <= MAX_KEPT + 2
    assert "ab" in kept.recorded and "ad" in kept.replayed
    short = Difference("info", 1, "x", {"a": 1}, None)
    assert shortened(short) == short
