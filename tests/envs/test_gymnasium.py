"""Claims about the registry in Gymnasium: its checker, wrappers and vector environments take every environment."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs.errors import UserError
from envs.types import Sample
from tests.paths import ROOT

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

from envs.as_gymnasium import AnyText, RGBImage, TrueTurnEnv, register_all  # noqa: E402

GEO3K = "trueturn/geo3k-v0"
WRONG_CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "9"}}</tool_call>'

MODULE = '''
import numpy as np
from PIL import Image
from envs.env import Env
from envs.types import Sample

CLOSED = []


class Script(Env):
    """Says "Go.", answers every text with a grey image and two messages, and ends at "stop"."""

    def __init__(self, sample, args):
        self.sample = sample

    def reset(self):
        if self.sample.label == "broken":
            raise RuntimeError("reset is broken")
        return {"obs_str": "Go.", "role": "user"}, {"start": np.zeros(2)}

    def step(self, response_text):
        if response_text == "raise":
            raise RuntimeError("step is broken")
        score = None if response_text == "none" else {"value": 1}
        return {"text": response_text}, response_text == "stop", {"score": score, "array": np.arange(2)}

    def format_observation(self, observation):
        if "obs_str" in observation:
            return super().format_observation(observation)
        parts = [{"type": "image", "image": Image.new("L", (4, 2), 7)}, {"type": "text", "text": "one"}]
        return [{"role": "tool", "content": parts}, {"role": "user", "content": "two"}]

    def reward(self, final_text):
        return 0.5

    def close(self):
        CLOSED.append(self.sample.id)


def make_samples(split, size, seed):
    return [Sample(id=f"{split}-{i}", prompt=({"role": "user", "content": f"Task {i}."},)) for i in range(size)]
'''


def entry(env_id: str, **keys: Any) -> str:
    keys = {"entry_point": "scripted:Script", "dataset": "scripted:make_samples", "max_turns": 2, **keys}
    return f'"{env_id}": {{description: d, ' + ", ".join(f'{k}: "{v}"' if isinstance(v, str) else f"{k}: {v}"
                                                        for k, v in keys.items() if v is not None) + "}\n"  # fmt: skip


@pytest.fixture(autouse=True)
def same_gymnasium_registry() -> Iterator[None]:
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A registry file with the environment `script`, whose module is importable."""
    (tmp_path / "scripted.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "registry.yaml").write_text(entry("script"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "registry.yaml"
    sys.modules.pop("scripted", None)


def geo3k_sample() -> Sample:
    content = [{"type": "image", "image": Image.new("RGB", (6, 4), "red")}, {"type": "text", "text": "Find x."}]
    return Sample(id="one", label="68", prompt=({"role": "user", "content": content},))


def checked(env: gymnasium.Env) -> list[str]:
    """Run Gymnasium's checker and return its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what earlier tests of this process have left open warns when it is collected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", register_all())
def test_every_bundled_environment_passes_the_checker_without_a_warning(name: str) -> None:
    assert checked(gymnasium.make(name).unwrapped) == []


@pytest.mark.parametrize("max_turns", [1, 2])
def test_the_checker_accepts_single_turns_first_observations_and_infos_of_any_kind(
    overlay: Path, max_turns: int
) -> None:
    overlay.write_text(entry("script", max_turns=max_turns), encoding="utf-8")
    register_all(overlay)
    assert checked(gymnasium.make("trueturn/script-v0").unwrapped) == []


def test_one_line_makes_an_environment_in_a_fresh_process() -> None:
    code = f"import gymnasium; print(gymnasium.make('envs.as_gymnasium:{GEO3K}').spec.max_episode_steps)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


def test_the_registry_does_not_import_gymnasium() -> None:
    code = "import sys, envs.registry, envs.spec; print('gymnasium' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_first_observation_is_the_prompt_with_its_images() -> None:
    observation, info = TrueTurnEnv("geo3k", samples=[geo3k_sample()]).reset(seed=0)
    prompt = "Solve the problem. Check answers with calc_score. Write the final answer as \\boxed{}."
    assert observation["text"] == f"[system]\n{prompt}\n\n[user]\n<image>Find x."
    (image,) = observation["images"]
    assert image.dtype == np.uint8 and image.shape == (4, 6, 3) and image[0, 0].tolist() == [255, 0, 0]
    assert info["sample_id"] == "one" and info["tools"][0]["function"]["name"] == "calc_score"


def test_bundled_samples_come_with_a_image() -> None:
    observation, _ = gymnasium.make(GEO3K).reset(seed=3)
    assert [(image.dtype, image.shape) for image in observation["images"]] == [(np.uint8, (128, 160, 3))]


@pytest.mark.parametrize(("answer", "reward"), [("68", 1.0), ("70", 0.0)])
def test_the_last_text_is_rewarded_when_the_task_ends(answer: str, reward: float) -> None:
    env = TrueTurnEnv("geo3k", samples=[geo3k_sample()])
    env.reset()
    observation, first, *ended, info = env.step(WRONG_CALL)
    assert observation == {"text": "[tool]\nScore 0.0: 9 is wrong. Try another way.", "images": ()}
    assert first == 0.0 and ended == [False, False] and info["step_info"]["tool_score"] == 0.0 and "end" not in info
    *_, last, terminated, truncated, info = env.step(f"\\boxed{{{answer}}}")
    assert (last, terminated, truncated, info["end"]) == (reward, True, False, "completed")


def test_the_turn_limit_truncates_and_rewards_the_last_text() -> None:
    env = TrueTurnEnv("geo3k", samples=[geo3k_sample()], max_turns=2)
    env.reset()
    assert env.step(WRONG_CALL)[1:4] == (0.0, False, False)
    *_, reward, terminated, truncated, info = env.step(f"\\boxed{{68}} {WRONG_CALL}")
    assert (reward, terminated, truncated, info["end"]) == (1.0, False, True, "max_turns")


def test_a_shorter_time_limit_truncates_without_reward() -> None:
    env = gymnasium.make(GEO3K, samples=[geo3k_sample()], max_episode_steps=1)
    env.reset()
    *_, reward, terminated, truncated, info = env.step(f"\\boxed{{68}} {WRONG_CALL}")
    assert (reward, terminated, truncated, "end" in info) == (0.0, False, True, False)


def test_an_episode_of_one_turn_terminates_and_is_never_truncated(overlay: Path) -> None:
    env = TrueTurnEnv("script", registry=overlay, max_turns=1)
    env.reset()
    *_, reward, terminated, truncated, info = env.step("go")
    assert (reward, terminated, truncated, info["end"]) == (0.5, True, False, "max_turns")


def test_the_same_seed_gives_the_same_episodes_and_an_index_names_one() -> None:
    env = TrueTurnEnv("geo3k", split="heldout", size=50)
    ids = [[env.reset(seed=5)[1]["sample_id"], *(env.reset()[1]["sample_id"] for _ in range(4))] for _ in range(2)]
    assert ids[0] == ids[1] and len(set(ids[0])) > 2
    observation, info = env.reset(options={"index": 7})
    assert info["sample_id"] == "geo3k-procedural-heldout-0-7"
    again, _ = env.reset(options={"index": 7})
    assert np.array_equal(observation["images"][0], again["images"][0])


def test_several_messages_and_their_images_are_one_observation(overlay: Path) -> None:
    env = TrueTurnEnv("script", registry=[str(overlay)])
    assert env.reset(options={"index": 0})[0]["text"] == "[user]\nTask 0.\n\n[user]\nGo."
    observation, *_, info = env.step("none")
    assert observation["text"] == "[tool]\n<image>one\n\n[user]\ntwo"
    assert [image.tolist() for image in observation["images"]] == [[[[7, 7, 7]] * 4] * 2]
    assert dict(info["step_info"]) == {"score": None, "array": [0, 1]}


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_vector_environments_run_over_the_ends_of_episodes(kind: Any, mode: AutoresetMode) -> None:
    options = {"shared_memory": False} if kind is AsyncVectorEnv else {}
    envs = kind([lambda: gymnasium.make(f"envs.as_gymnasium:{GEO3K}")] * 3, autoreset_mode=mode, **options)
    actions = ("\\boxed{-1}", WRONG_CALL, '<tool_call>{"name": "other", "arguments": {}}</tool_call>')
    try:
        first, _ = envs.reset(seed=4)
        assert first in envs.observation_space
        assert [[image.shape for image in images] for images in first["images"]] == [[(128, 160, 3)]] * 3
        again, _ = envs.reset(seed=4)
        assert first["text"] == again["text"]
        ended = []
        for _ in range(5):
            observation, rewards, terminated, truncated, infos = envs.step(actions)
            assert observation in envs.observation_space and rewards.tolist() == [0.0, 0.0, 0.0]
            ended.append((terminated.tolist(), truncated.tolist()))
            finals = infos.get("final_info", infos)
            for number, is_over in enumerate(terminated | truncated):
                assert not is_over or finals["end"][number] == ("max_turns" if number else "completed")
    finally:
        envs.close()
    if mode is AutoresetMode.SAME_STEP:  # copy 0 ends at every step, the others at their third turn
        assert ended == [([True, False, False], [False, n == 2, n == 2]) for n in range(5)]
    else:  # the step after an end is the reset
        assert ended == [([n % 2 == 0, False, False], [False, n == 2, n == 2]) for n in range(5)]


def test_infos_of_different_kinds_stay_apart_in_a_vector(overlay: Path) -> None:
    envs = SyncVectorEnv([lambda: TrueTurnEnv("script", registry=overlay)] * 2)
    envs.reset(seed=0)
    *_, infos = envs.step(("none", "some"))
    assert [info["score"] for info in infos["step_info"]] == [None, {"value": 1}]


def test_images_of_any_size_have_no_place_in_shared_memory() -> None:
    with pytest.raises(TypeError, match="disable `shared_memory`"):
        AsyncVectorEnv([lambda: gymnasium.make(GEO3K)])


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's own report of the error
def test_a_wrong_index_is_told_from_another_process() -> None:
    envs = AsyncVectorEnv([lambda: TrueTurnEnv("geo3k", size=2)], shared_memory=False)
    with pytest.raises(ValueError, match="a number from 0 to 1"):
        envs.reset(options={"index": 2})
    envs.close(terminate=True)


def test_a_fault_is_raised_ends_the_episode_and_still_closes_the_environment(overlay: Path) -> None:
    env = TrueTurnEnv("script", registry=overlay)
    closed = sys.modules["scripted"].CLOSED
    env.reset(options={"index": 3})
    with pytest.raises(RuntimeError, match="step is broken"):
        env.step("raise")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("go")
    assert closed == []
    env.reset(options={"index": 4})
    assert closed == ["train-3"]
    env.close()
    env.close()
    assert closed == ["train-3", "train-4"]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("go")


def test_an_environment_that_fails_to_reset_is_closed(overlay: Path) -> None:
    env = TrueTurnEnv("script", registry=overlay, samples=[Sample(id="bad", prompt=(), label="broken")])
    with pytest.raises(RuntimeError, match="reset is broken"):
        env.reset()
    env.close()
    assert sys.modules["scripted"].CLOSED == ["bad"]


def test_wrong_use_says_what_is_wrong(overlay: Path) -> None:
    env = TrueTurnEnv("geo3k", size=3)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("too early")
    with pytest.raises(ValueError, match=r"a number from 0 to 2.*, got .*3"):
        env.reset(options={"index": 3})
    with pytest.raises(ValueError, match=r"reset options: must be .*'indx'"):
        env.reset(options={"indx": 0})
    env.reset()
    with pytest.raises(gymnasium.error.InvalidAction, match="got int"):
        env.step(3)  # type: ignore[arg-type]
    assert env.step("\\boxed{1}")[2]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("after the end")
    for options in ({"env_id": "geo3"}, {"max_turns": 0}, {"samples": []}, {"size": 0}):
        with pytest.raises(UserError):
            TrueTurnEnv(**{"env_id": "geo3k", **options})
    overlay.write_text(entry("script", dataset=None), encoding="utf-8")
    with pytest.raises(UserError, match="must have a built-in data set"):
        TrueTurnEnv("script", registry=overlay)


def test_registering_again_replaces_silently_and_leaves_out_what_has_no_data(overlay: Path) -> None:
    entries = [entry("my env/2:b-v3"), entry("bare", dataset=None), entry("geo3k", max_turns=9)]
    overlay.write_text("".join(entries), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = register_all(overlay)
        assert register_all(overlay) == names
    assert GEO3K in names and names[-1] == "trueturn/my_env_2_b-v3-v0" and "trueturn/bare-v0" not in names
    assert gymnasium.make("trueturn/my_env_2_b-v3-v0").reset(seed=0)[1]["sample_id"].startswith("train-")
    assert gymnasium.spec(GEO3K).max_episode_steps == 9


def test_spaces_hold_what_they_say_and_what_they_draw() -> None:
    text, image = AnyText(max_length=5, seed=1), RGBImage(seed=1)
    assert text.contains("∠x\n") and text.contains("") and not text.contains("123456") and not text.contains(3)
    assert all(text.contains(text.sample()) for _ in range(20)) and text == AnyText(5) != AnyText(6)
    assert all(image.contains(image.sample()) for _ in range(20)) and image == RGBImage()
    assert not image.contains(np.zeros((2, 2, 3))) and not image.contains(np.zeros((2, 2), np.uint8))
