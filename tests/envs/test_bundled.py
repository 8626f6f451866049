"""Claims about the bundled environments, beyond those that `envs.check` holds of every one."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from envs.calculator import CalculatorEnv, evaluate
from envs.contract import checked_messages
from envs.env import EnvArgs
from envs.execution.load import load_env
from envs.geo3k.zoom import Geo3kZoomEnv
from envs.guess import HIGHEST
from envs.registry import load_registry
from envs.types import Sample, message_images

ARGS = EnvArgs(max_turns=4)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def quartered() -> Image.Image:
    """Return an image whose four quarters have one colour each."""
    image = Image.new("RGB", (160, 120), "white")
    for box, colour in (((0, 0), "red"), ((80, 0), "lime"), ((0, 60), "blue")):
        image.paste(Image.new("RGB", (80, 60), colour), box)
    return image


def zooming() -> Geo3kZoomEnv:
    message = {"role": "user", "content": [{"type": "image", "image": quartered()}, {"type": "text", "text": "x?"}]}
    return Geo3kZoomEnv(Sample("0", (message,), label="5"), ARGS)


@pytest.mark.parametrize(
    ("box", "colour", "size"),
    [
        ((0, 0, 500, 500), (255, 0, 0), (160, 120)),
        ((500, 0, 1000, 500), (0, 255, 0), (160, 120)),
        ((0, 500, 500, 1000), (0, 0, 255), (160, 120)),
        ((0, 0, 500, 250), (255, 0, 0), (160, 60)),
        ((0, 0, 125, 125), (255, 0, 0), (160, 120)),
        ((0, 0, 50, 100), (255, 0, 0), (64, 96)),  # 8 x 12 pixels, enlarged by no more than 8
    ],
)
def test_zoom_shows_the_part_that_was_asked_for_enlarged(
    box: tuple[int, ...], colour: tuple[int, ...], size: tuple[int, int]
) -> None:
    env = zooming()
    names = ("left", "top", "right", "bottom")
    observation, done, _ = env.step(call("zoom", **dict(zip(names, box, strict=True))))
    (message,) = env.format_observation(observation)
    image = message["content"][0]["image"]
    assert not done
    assert image.size == size
    assert image.getpixel((size[0] // 2, size[1] // 2)) == colour


@pytest.mark.parametrize("box", [(500, 0, 500, 500), (600, 0, 500, 500), (0, 0, 10, 1000)])
def test_a_part_without_pixels_is_explained(box: tuple[int, ...]) -> None:
    names = ("left", "top", "right", "bottom")
    observation, _, info = zooming().step(call("zoom", **dict(zip(names, box, strict=True))))
    assert info["tool_calls"][0]["outcome"] == "bad_arguments"
    assert "at least 8 pixels" in observation["obs_str"]


def test_a_box_outside_of_the_image_is_explained() -> None:
    observation, _, _ = zooming().step(call("zoom", left=-1, top=0, right=2000, bottom=10))
    said = '"left" must be greater than or equal to 0. "right" must be less than or equal to 1000.'
    assert observation["obs_str"].startswith(said)


def test_a_sample_without_a_image_cannot_be_zoomed_into() -> None:
    with pytest.raises(ValueError, match="has no image"):
        Geo3kZoomEnv(Sample("0", ({"role": "user", "content": "x?"},), label="5"), ARGS)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(37 + 12) * 5", 245),
        ("-2 ** 2", -4),
        ("7 / 2", 3.5),
        ("7 // 2 + 7 % 2", 4),
        ("sqrt(16) + abs(-3) + round(2.6)", 10),
        ("max(1, 2) * min(3, 4)", 6),
        ("1e3", 1000),
        ("2 ** 90", 2**90),
        ("0.5 ** 1000", 0.5**1000),
    ],
)
def test_expressions_have_their_value(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 +",
        "x",
        "__import__('os')",
        "(1).real",
        "[1]",
        "'a' * 9",
        "True",
        "1j",
        "lambda: 1",
        "1 if 1 else 2",
        "9 ** 9 ** 9",
        "10 ** 40",
        "1 / 0",
        "sqrt(-1)",
        "(-8) ** 0.5",
        "1e400",
        "round(1, 2, 3)",
        "sqrt(x=4)",
        "open('a')",
        "(" * 150 + "1" + ")" * 150,
        "1" * 201,
        "-" * 199 + "1" + "~1",
    ],
)
def test_everything_else_is_refused_with_a_reason(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        evaluate(expression)
    env = CalculatorEnv(Sample("0", (), label="1"), ARGS)
    observation, done, info = env.step(call("calculate", expression=expression))
    assert not done
    assert info["tool_calls"][0]["outcome"] == "tool_error"
    assert observation["obs_str"].startswith("Cannot be calculated: ")


def test_the_calculator_writes_whole_numbers_without_a_fraction() -> None:
    env = CalculatorEnv(Sample("0", (), label="1"), ARGS)
    shown = [env.step(call("calculate", expression=e))[0]["obs_str"] for e in ("6 / 2", "1 / 3", "2 ** 60")]
    assert shown == ["3", "0.3333333333", "1152921504606846976"]


def test_guessing_halves_the_range_until_it_is_found() -> None:
    spec = load_registry()["guess"]
    for sample in spec.load_dataset("train", size=30, seed=1):  # type: ignore[attr-defined]
        env = load_env(spec)(sample, spec.args())
        env.reset()
        low, high, done, guess = 1, HIGHEST, False, 0
        for _ in range(spec.max_turns):
            guess = (low + high) // 2
            observation, done, _ = env.step(f"I guess {guess}.")
            if done:
                break
            low, high = (guess + 1, high) if observation["obs_str"] == "Higher." else (low, guess - 1)
        assert done and env.reward(str(guess)) == 1.0


@pytest.mark.parametrize("env_id", ["calculator", "guess"])
def test_made_samples_repeat_and_differ_between_splits(env_id: str) -> None:
    spec = load_registry()[env_id]
    train, again, heldout = (
        [(s.prompt, s.label) for s in spec.load_dataset(split, size=20, seed=0)]  # type: ignore[attr-defined]
        for split in ("train", "train", "heldout")
    )
    assert train == again != heldout


def test_a_desktop_shows_a_button_and_its_press_earns_a_share_of_the_turns() -> None:
    spec = load_registry()["desktop"]
    (asked,) = spec.load_dataset("train", 1, 0)
    env = load_env(spec)(asked, spec.args(max_turns=8))
    observation, _ = env.reset()
    solution = env.solution()
    rewards = []
    done = False
    for text in solution:
        (image,) = message_images(checked_messages(env.format_observation(observation)))
        places = [image.getpixel((32 * place + 3, 16)) for place in range(4)]
        assert places.index((0, 0, 0)) == int(text) - 1
        # What follows the first button that the text names is not read.
        observation, done, info = env.step(f"I press {text}, not {5 - int(text)}.")
        rewards.append(info["reward"])
    assert done and sum(rewards) == 1.0 and len(solution) == 8
    env = load_env(spec)(asked, spec.args(max_turns=8))
    env.reset()
    assert env.step("none")[2] == {"pressed": False, "reward": 0.0}
