"""Claims about Gymnasium environments in the registry: one line is enough, and no text of a model breaks an episode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs.env import EnvArgs
from envs.errors import UserError
from envs.execution.load import load_env
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.types import Sample, message_images

gymnasium = pytest.importorskip("gymnasium")

from envs.from_gymnasium import FromGymnasium, GymnasiumSamples, name_colours  # noqa: E402

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
PATH = ["down", "down", "right", "right", "down", "right"]


class Echo(gymnasium.Env):
    """Wants "stop", with texts for observations and actions; counts a point a turn and hides its seed in the state."""

    def __init__(self, charset: str = "abcdefghijklmnopqrstuvwxyz ") -> None:
        self.observation_space = gymnasium.spaces.Text(100)
        self.action_space = gymnasium.spaces.Text(8, charset=charset)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"say stop {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "refuse":
            raise gymnasium.error.InvalidAction("not that")
        if action == "raise":
            raise RuntimeError("broken")
        return f"you said {action}", 1.0, action == "stop", False, {}


class Camera(gymnasium.Env):
    """Two actions, 5 and 6; the observation is an image."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (2, 3, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(2, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros((2, 3, 3), np.uint8), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.full((2, 3, 3), action, np.uint8), 0.5, False, False, {}


class Errand(gymnasium.Env):
    """A numbered state with texts beside it, one of which changes after the second move; rendered in both ways."""

    metadata = {"render_modes": ["rgb_array", "ansi"]}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Dict(
            place=gymnasium.spaces.Discrete(9),
            mission=gymnasium.spaces.Text(100),
            hints=gymnasium.spaces.Dict(near=gymnasium.spaces.Text(100), far=gymnasium.spaces.Text(100, min_length=0)),
        )
        self.action_space = gymnasium.spaces.Discrete(2)
        self.place = 0

    def observation(self) -> dict[str, Any]:
        mission = "get the key" if self.place < 2 else "open the door"
        return {"place": self.place, "mission": mission, "hints": {"near": "a wall", "far": ""}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.place = 0
        return self.observation(), {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.place += 1
        return self.observation(), 0.0, False, False, {}

    def render(self) -> Any:
        return f"at {self.place}" if self.render_mode == "ansi" else np.full((2, 3, 3), self.place, np.uint8)


class Steering(Camera):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(gymnasium.registry)
    gymnasium.register("test/Echo-v0", Echo, max_episode_steps=3)
    gymnasium.register("test/Camera-v0", Camera)
    gymnasium.register("test/Errand-v0", Errand)
    gymnasium.register("test/Steering-v0", Steering)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def newest(name: str) -> str:
    """Return the id of an environment's last version, which Gymnasium raises now and then."""
    return max((spec for spec in gymnasium.registry.values() if spec.name == name and not spec.namespace),
               key=lambda spec: spec.version).id  # fmt: skip


def calls(*actions: Any) -> str:
    return "".join(f"<tool_call>{json.dumps({'name': 'act', 'arguments': {'action': a}})}</tool_call>" for a in actions)


def started(options: dict[str, Any], seed: int = 0, **args: Any) -> FromGymnasium:
    sample = Sample(id="s", prompt=(), metadata={"seed": seed})
    env = FromGymnasium(sample, EnvArgs(max_turns=20, options=options, **args))
    env.reset()
    return env


def contents(env: FromGymnasium, observation: dict[str, Any]) -> Sequence[Any]:
    return [message["content"] for message in env.format_observation(observation)]


def test_one_line_of_a_registry_file_is_a_whole_environment(tmp_path: Path) -> None:
    line = "my_lake: {gymnasium: FrozenLake-v1, description: Cross the ice., max_turns: 20}\n"
    (tmp_path / "registry.yaml").write_text(line, encoding="utf-8")
    spec = get_spec("my_lake", tmp_path / "registry.yaml")
    sample = spec.load_dataset("train", size=2, seed=0)[1]
    env = load_env(spec)(sample, spec.args())
    observation, info = env.reset()
    assert observation["obs_str"] == "[red:S]FFF\nFHFH\nFFFH\nHFFG" and info["seed"] == sample.metadata["seed"]
    assert env.format_observation(observation) == [{"role": "user", "content": observation["obs_str"]}]
    assert env.step(calls(1))[0]["obs_str"].startswith("  (Down)\n")
    assert env.solution() == () and env.reward("anything") == 0.0
    env.close()
    assert sample.prompt[0]["content"] == (
        "You are playing FrozenLake-v1. Cross the ice. Every message shows you its state. What is coloured stands in "
        "brackets, as in [red:S]. Act with calls of the tool act. The actions are the numbers from 0 to 3."
    )


def test_a_path_of_calls_crosses_the_lake() -> None:
    env = started(LAKE)
    steps = [env.step(f"I go {name}. {calls(name)}") for name in PATH]
    assert [done for _, done, _ in steps] == [False] * 5 + [True]
    observation, _, info = steps[-1]
    assert observation["obs_str"] == "  (Right)\nSFFF\nFHFH\nFFFH\nHFF[red:G]"
    assert (info["reward"], info["terminated"], info["truncated"]) == (1.0, True, False)
    assert [step_info["reward"] for _, _, step_info in steps] == [0.0] * 5 + [1.0] and env.reward("") == 0.0


def test_the_whole_path_may_stand_in_one_turn_and_ends_where_the_episode_does() -> None:
    env = started(LAKE, reward_max_val=3.0, reward_min_val=-1.0)
    observation, done, info = env.step(calls(*PATH, "left"))
    assert done and len(contents(env, observation)) == len(info["tool_calls"]) == 6
    assert info["reward"] + env.reward("") == 3.0
    assert started(LAKE, reward_max_val=3.0, reward_min_val=-1.0).reward("") == -1.0


def test_a_hole_ends_the_episode_without_reward() -> None:
    env = started(LAKE)
    _, done, info = env.step(calls("down", "right"))
    assert done and info["terminated"] and env.reward("") == 0.0


def test_a_turn_without_a_call_is_asked_for_one() -> None:
    env = started(LAKE)
    observation, done, _ = env.step("I would go down.")
    assert not done and observation["messages"][0]["role"] == "user"
    assert observation["obs_str"].startswith("No action was taken. Call ") and '"act"' in observation["obs_str"]


@pytest.mark.parametrize(
    ("options", "action", "said"),
    [
        (LAKE, "north", "must be 'left', 'down', 'right' or 'up'"),
        (LAKE, 1, "must be 'left', 'down', 'right' or 'up'"),
        ({"id": "FrozenLake-v1"}, 4, "must be less than or equal to 3"),
        ({"id": "FrozenLake-v1"}, -1, "must be greater than or equal to 0"),
        ({"id": "test/Camera-v0"}, 4, "must be greater than or equal to 5"),
        (LAKE, None, "must be"),
    ],
)
def test_an_action_that_there_is_not_is_feedback_and_changes_nothing(options: Any, action: Any, said: str) -> None:
    env = started(options)
    observation, done, info = env.step(calls(action))
    assert not done and said in observation["obs_str"] and "Call " in observation["obs_str"]
    assert info["tool_calls"][0]["outcome"] == "bad_arguments" and "reward" not in info


def test_actions_that_start_at_another_number_keep_their_numbers_or_get_names() -> None:
    assert np.array(image_after(started({"id": "test/Camera-v0"}), 6)).flat[0] == 6
    named = started({"id": "test/Camera-v0", "actions": ["on", "off"]})
    assert np.array(image_after(named, "on")).flat[0] == 5
    assert named.info["reward"] == 0.5


def image_after(env: FromGymnasium, action: Any) -> Image.Image:
    observation, _, _ = env.step(calls(action))
    assert observation["obs_str"] == "<image>"
    (image,) = message_images(env.format_observation(observation))
    assert image.size == (3, 2) and image.mode == "RGB"
    return image


@pytest.mark.parametrize(
    ("name", "shown"),
    [("Taxi", "+---------+\n|"), ("CliffWalking", "o  o  o  o"), ("Blackjack", "["), ("CartPole", "[")],
)
def test_the_small_environments_of_gymnasium_are_shown_as_text(name: str, shown: str) -> None:
    env_id = newest(name)
    sample = GymnasiumSamples("train", 1, 0, id=env_id)[0]
    env = FromGymnasium(sample, EnvArgs(max_turns=20, options={"id": env_id}))
    first = env.reset()[0]["obs_str"]
    assert first.startswith(shown) and "\x1b" not in first and env.reset()[0]["obs_str"] == first
    assert env.step(calls(0))[2]["tool_calls"][0]["outcome"] == "ok"
    env.close()


def test_colours_are_written_out_because_they_are_part_of_the_state() -> None:
    red, nested = "\x1b[41mS\x1b[0mF", "\x1b[35m\x1b[43mY\x1b[0m\x1b[0m|\x1b[34;1mB\x1b[0m"
    assert name_colours(red) == "[red:S]F" and name_colours(nested) == "[magenta:[yellow:Y]]|[blue:B]"
    assert name_colours("\x1b[1mbold\x1b[0m\x1b[m") == "bold"


def test_a_text_environment_takes_the_whole_text_as_the_action() -> None:
    sample = GymnasiumSamples("heldout", 1, 0, id="test/Echo-v0")[0]
    assert sample.prompt[0]["content"].endswith("Answer with your next action and nothing else.")
    env = FromGymnasium(sample, EnvArgs(max_turns=20, options={"id": "test/Echo-v0"}))
    assert env.reset()[0]["obs_str"] == f"say stop {sample.metadata['seed']}" and env.tools == []
    observation, done, info = env.step("  hello \n")
    assert (observation["obs_str"], done, info["reward"]) == ("you said hello", False, 1.0)
    _, done, info = env.step("stop")
    assert done and info["reward"] == 1.0
    observation, _, info = env.step("late")
    assert observation["obs_str"] == "The episode has ended." and "reward" not in info


def test_the_time_limit_of_the_environment_ends_the_episode() -> None:
    env = started({"id": "test/Echo-v0"})
    ends = [(done, info["truncated"]) for _, done, info in (env.step("again") for _ in range(3))]
    assert ends == [(False, False), (False, False), (True, True)]


RULE = "No action was taken: write 1 to 8 characters of ' abcdefghijklmnopqrstuvwxyz'"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, f"{RULE} and nothing else, not {text!r}.") for text in ("Stop", "stop stop", "")),
        ("refuse", "No action was taken: not that"),
    ],
)
def test_a_text_that_is_no_action_is_feedback(text: str, said: str) -> None:
    env = started({"id": "test/Echo-v0"})
    observation, done, info = env.step(text)
    assert (observation["obs_str"], done, info) == (said, False, {"tool_calls": []})


def test_a_large_alphabet_is_not_listed() -> None:
    options = {"id": "test/Echo-v0", "kwargs": {"charset": "".join(map(chr, range(0x4E00, 0x4F00)))}}
    assert (
        started(options).step("a")[0]["obs_str"]
        == "No action was taken: write 1 to 8 characters and nothing else, not 'a'."
    )


def test_what_the_environment_raises_is_a_fault() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        started({"id": "test/Echo-v0"}).step("raise")


def test_samples_depend_on_seed_split_and_index_and_no_split_shares_a_seed() -> None:
    made = {
        split: [s.metadata["seed"] for s in GymnasiumSamples(split, 200, 0, **LAKE)]
        for split in ("train", "heldout", "demonstrations")
    }
    assert len({seed for seeds in made.values() for seed in seeds}) == 600
    assert [{seed % 3 for seed in seeds} for seeds in made.values()] == [{1}, {2}, {0}]
    again = GymnasiumSamples("train", 50, 0, **LAKE)
    assert [s.metadata["seed"] for s in again] == made["train"][:50] and again[-1] == again[49]
    assert again[1].metadata != GymnasiumSamples("train", 50, 1, **LAKE)[1].metadata
    assert [s.id for s in again[1:3]] == ["FrozenLake-v1-train-0-1", "FrozenLake-v1-train-0-2"]
    with pytest.raises(IndexError):
        again[50]


def test_a_sample_without_a_seed_begins_in_the_same_state_every_time() -> None:
    args = EnvArgs(max_turns=1, options={"id": newest("Taxi")})
    first, second = (FromGymnasium(Sample(id="row-7", prompt=()), args).reset() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("mode", "rendering"), [("ansi", "at {}"), ("rgb_array", "<image>")])
def test_a_rendering_comes_after_the_texts_of_the_observation(mode: str, rendering: str) -> None:
    env = started({"id": "test/Errand-v0", "kwargs": {"render_mode": mode}})
    shown = [env.reset()[0]["obs_str"], env.step(calls(0))[0]["obs_str"], env.step(calls(0))[0]["obs_str"]]
    assert shown == [
        f"mission: get the key\n{rendering.format(0)}",
        f"mission: get the key\n{rendering.format(1)}",
        f"mission: open the door\n{rendering.format(2)}",
    ]


def test_a_text_that_is_the_whole_observation_stands_before_its_rendering() -> None:
    class Described(Errand):
        def observation(self) -> Any:
            return f"you are at {self.place}"

    gymnasium.register("test/Described-v0", Described)
    env = started({"id": "test/Described-v0", "kwargs": {"render_mode": "rgb_array"}})
    assert [env.reset()[0]["obs_str"], env.step(calls(1))[0]["obs_str"]] == [
        "you are at 0\n<image>",
        "you are at 1\n<image>",
    ]


def test_a_name_with_its_module_is_played_under_its_name_alone() -> None:
    sample = GymnasiumSamples("train", 1, 0, id="tests.envs.test_from_gymnasium:test/Echo-v0", description="Echo.")[0]
    assert sample.prompt[0]["content"].startswith("You are playing test/Echo-v0. Echo. Every message")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"options": 3}, "options: must be a valid dictionary, got 3"),
        ({"options": None}, "options: must be a valid dictionary, got None"),
        ({"description": 3}, "description: must be a valid string, got 3"),
        ({"dataset_options": {"id": "x"}}, "gymnasium must stand in place of entry_point and dataset, got dataset_opt"),
    ],
)
def test_a_broken_entry_is_an_error_that_names_it(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    entry = {"gymnasium": "FrozenLake-v1", "description": "Ice.", "max_turns": 3}
    file = tmp_path / "registry.yaml"
    file.write_text(json.dumps({"broken": {**entry, **keys}, "sound": entry}))
    with pytest.raises(UserError, match="entry 'broken'") as caught:
        get_spec("sound", file)
    assert said in str(caught.value)


def test_a_prompt_of_ones_own_replaces_the_instructions() -> None:
    sample = GymnasiumSamples("train", 1, 0, **LAKE, prompt="Cross the lake.")[0]
    assert sample.prompt == ({"role": "user", "content": "Cross the lake."},)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "FrozenLke-v1"}, "gymnasium: 'FrozenLke-v1' must be created, got NameNotFound"),
        ({"id": "Mine-v0"}, "install what it needs; MODULE:Mine-v0 imports the module that registers it"),
        ({"id": "FrozenLake-v1", "kwargs": {"size": 3}}, "got TypeError"),
        ({"id": "test/Steering-v0"}, "'test/Steering-v0' must have Discrete or Text actions"),
        ({**LAKE, "actions": ["left"]}, "must name each of the 4 actions of 'FrozenLake-v1'"),
        ({**LAKE, "actions": ["a", "a", "b", "c"]}, "gymnasium options actions: must name each of the 4 actions"),
        ({"id": "test/Echo-v0", "actions": ["left"]}, "must name each of the 0 actions"),
        ({"id": "FrozenLake-v1", "action": []}, "got action; did you mean 'actions'?"),
        ({"id": 3}, "gymnasium options id"),
        ({}, "gymnasium options id: field required, got nothing"),
    ],
)
def test_wrong_options_are_errors_before_the_first_step(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        GymnasiumSamples("train", 1, 0, **options)
    assert said in str(caught.value)
    with pytest.raises(UserError):
        FromGymnasium(Sample(id="s", prompt=()), EnvArgs(max_turns=1, options=options))


def test_unknown_splits_and_sizes_are_errors() -> None:
    with pytest.raises(UserError, match="did you mean 'train'"):
        GymnasiumSamples("trian", 1, 0, **LAKE)
    with pytest.raises(UserError, match="size: must be at least 0"):
        GymnasiumSamples("train", -1, 0, **LAKE)


def test_a_key_of_gymnasiums_own_info_can_say_what_a_success_is() -> None:
    class Told(Camera):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return super().step(action)[0], 0.955, True, False, {"is_success": np.True_, "secret": 1}

    gymnasium.register("test/Told-v0", Told)
    entry = {"id": "told", "gymnasium": "test/Told-v0", "description": "x", "max_turns": 2, "success": "is_success"}
    spec = EnvSpec.model_validate(entry)
    env = FromGymnasium(Sample("0", (), metadata={"seed": 7}), spec.args())
    env.reset()
    _, done, info = env.step('<tool_call>{"name": "act", "arguments": {"action": 5}}</tool_call>')
    assert done and info["is_success"] is True and "secret" not in info
    assert spec.success_rule is not None and spec.success_rule.holds(env.reward(""), [info])
