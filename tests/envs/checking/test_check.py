"""Claims about `python -m envs.check`: a sound environment passes, a broken one fails the check of its rule alone."""

from __future__ import annotations

import abc
import functools
import itertools
import json
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from pydantic import BaseModel

from envs import Env, Sample, ToolEnv, ToolError, tool
from envs.check import CHECKS, check_env, run
from envs.checking.answers import as_written
from envs.checking.chat_template import ChatTemplate
from envs.checking.error_location import author_location
from envs.checking.hostile import example_value, hostile_scripts, write_call
from envs.checks import Finding
from envs.config.cli import exit_code
from envs.errors import UserError
from envs.registry import get_spec, load_registry
from envs.spec import EnvSpec
from envs.tool_calls import ToolCall, find_tool_calls
from tests.paths import ROOT
from tests.prompts import make_image

if TYPE_CHECKING:
    pass

Step = tuple[dict[str, Any], bool, dict[str, Any]]
PRICES = {"apple": 3, "pear": 4, "plum": 7}
FRUITS = list(PRICES)


class Shop(ToolEnv):
    """The price of the fruit that the sample names."""

    @tool
    def price(self, fruit: str) -> Any:
        """Return a price."""
        if fruit not in PRICES:
            raise ToolError("There is no such fruit.")
        return PRICES[fruit]

    def solution(self) -> Sequence[str]:
        call = {"name": "price", "arguments": {"fruit": self.sample.metadata["fruit"]}}
        return [f"<tool_call>{json.dumps(call)}</tool_call>", f"\\boxed{{{self.sample.label}}}"]


def samples(split: str, size: int, seed: int) -> list[Sample]:
    def make(index: int) -> Sample:
        fruit = FRUITS[(index + seed) % 3]
        prompt = ({"role": "user", "content": f"What does one {fruit} cost?"},)
        return Sample(f"{split}-{index}", prompt, str(PRICES[fruit]), {"fruit": fruit})

    return [make(index) for index in range(size)]


def spec_of(env: type, dataset: str = "samples", **keys: Any) -> EnvSpec:
    entry = {"entry_point": f"{__name__}:{env.__name__}", "dataset": f"{__name__}:{dataset}", "max_turns": 3}
    return EnvSpec(id=env.__name__.lower(), description="a shop", **(entry | keys))


def failed(env: type, dataset: str = "samples", **keys: Any) -> dict[str, str]:
    """Return name and detail of every check that fails."""
    findings = check_env(spec_of(env, dataset, **keys), num_samples=3)
    assert len(findings) == len(CHECKS)
    return {finding.check: finding.detail for finding in findings if finding.passed is False}


def found(findings: Sequence[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)


# Sound environments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isolation", "tool_format"),
    [("inline", "hermes"), ("thread", "hermes"), ("process", "hermes"), ("thread", "qwen_xml")],
)
def test_a_sound_environment_passes_every_check(isolation: str, tool_format: str) -> None:
    env = Shop if tool_format == "hermes" else XmlShop
    findings = check_env(spec_of(env, isolation=isolation, tool_format=tool_format), num_samples=3)
    assert [finding for finding in findings if finding.passed is False] == []
    assert found(findings, "gold answer").detail == "solution() 3/3"
    assert found(findings, "reward source").passed is True
    assert found(findings, "image sizes").passed is None


def test_an_environment_that_no_other_process_can_import_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("notebook_of_a_test")
    vars(notebook).update(Shop=Shop)
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    spec = spec_of(Shop, entry_point=f"{notebook.__name__}:Shop")
    with pytest.raises(UserError, match="No module named 'notebook_of_a_test'"):
        check_env(spec, num_samples=1)


class XmlShop(Shop):
    def solution(self) -> Sequence[str]:
        arguments = {"fruit": self.sample.metadata["fruit"]}
        return [write_call("price", arguments, "qwen_xml"), f"\\boxed{{{self.sample.label}}}"]


class Labelled(Shop):
    def solution(self) -> Sequence[str]:
        return ()


def test_without_a_solution_the_forms_of_the_label_are_tried_and_counted() -> None:
    findings = check_env(spec_of(Labelled), num_samples=3)
    assert found(findings, "gold answer") == Finding(
        "gold answer", "ok", "\\boxed{label} 3/3, Answer: label 3/3, label 0/3"
    )


class Labels(Labelled):
    """Pays for the label's text, as the grader compares it."""


def rounded(split: str, size: int, seed: int) -> list[Sample]:
    labels = ["0.30000000000000004", "18.799999237060547", "0.3333333333333333"]
    return [replace(sample, label=label) for sample, label in zip(samples(split, 3, seed), labels, strict=True)]


def test_a_label_that_no_person_would_write_fails_the_gold_answer_and_is_named_with_what_they_write() -> None:
    found = failed(Labels, "rounded")
    assert list(found) == ["gold answer"]
    assert "as a person writes it '18.8'): \\boxed{label} 0, Answer: label 0" in found["gold answer"]
    assert found["gold answer"].count("as a person writes it") == 1  # the grader itself takes 0.3 and 1/3


@pytest.mark.parametrize(
    ("label", "written"),
    [
        ("0.1", "0.1"),
        ("3.141592653589793", "3.141592653589793"),
        ("11.313708498984761", "11.313708498984761"),
        ("100000000000000000", "100000000000000000"),
        ("1234.56005859375", "1234.56"),
        ("267.49999999999994", "267.5"),
        ("3.1415927410125732", "3.1415927410125732"),
        ("a label of 15.000000000000002 words", "a label of 15.000000000000002 words"),
        ("nan", "nan"),
        ("9" * 400 + ".5", "9" * 400 + ".5"),
    ],
)
def test_only_what_rounding_has_made_long_is_written_in_a_shorter_form(label: str, written: str) -> None:
    assert as_written(label) == written


class Game(Labelled):
    """Rewards the state that the tools reach; its label is the fruit to find, which no text could hold."""

    def reward(self, final_text: str) -> float:
        return float(self.info.get("tool_calls", 0) == 99)


def test_where_the_entry_says_that_the_label_is_no_answer_no_gold_answer_is_tried() -> None:
    assert list(failed(Game)) == ["gold answer"]
    findings = check_env(spec_of(Game, grader="none"), num_samples=3)
    assert [finding for finding in findings if finding.passed is False] == []
    detail = "no solution() and no label that is an answer, so the right answer is unknown"
    assert found(findings, "gold answer") == Finding("gold answer", "skipped", detail)


class Wanderer(Env):
    """Nobody knows a right answer: it has neither labels nor a solution."""

    def __init__(self, sample: Sample, args: object) -> None:
        self.sample = sample

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"obs_str": "You stand in a wood.", "role": "user"}, {}

    def step(self, response_text: str) -> Step:
        return {"obs_str": "You walk.", "role": "user"}, False, {}

    def reward(self, final_text: str) -> float:
        return 0.5


def unlabelled(split: str, size: int, seed: int) -> list[Sample]:
    return [Sample(f"{split}-{index}", ()) for index in range(size)]


def test_what_nobody_can_know_does_not_apply() -> None:
    findings = check_env(spec_of(Wanderer, "unlabelled"), num_samples=3)
    assert {finding.check for finding in findings if finding.passed is None} == {
        "tools", "gold answer", "wrong answers", "reward source", "image sizes",
    }  # fmt: skip
    assert [finding for finding in findings if finding.passed is False] == []


class Partial(Shop):
    def reward(self, final_text: str) -> float:
        return 0.25 if "not know" in final_text else super().reward(final_text)


def test_partial_credit_for_wrong_answers_passes() -> None:
    finding = found(check_env(spec_of(Partial), num_samples=1), "wrong answers")
    assert finding == Finding("wrong answers", "ok", "none of 4 texts is a success; 3 score 0")


class Graded(Shop):
    def reward(self, final_text: str) -> float:
        return self.args.reward(float(f"{{{self.sample.label}}}" in final_text))


def test_rewards_are_held_against_the_range_of_the_entry() -> None:
    assert failed(Graded, reward_max_val=2.0, reward_min_val=-1.0) == {}


class ShapedShop(Shop):
    """Wins with 0.88, as a game that counts moves does."""

    def reward(self, final_text: str) -> float:
        return 0.88 * super().reward(final_text)

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        observation, done, info = super().step(response_text)
        return observation, done, {**info, "is_success": done and super().reward(response_text) == 1.0}


@pytest.mark.parametrize("success", [0.88, 0.5, "is_success"])
def test_a_solution_of_a_shaped_reward_passes_where_the_entry_says_what_success_is(success: Any) -> None:
    assert failed(ShapedShop, success=success) == {}


def test_a_solution_that_is_no_success_fails_and_says_what_to_write() -> None:
    assert "solution() 0.88; best is 1; if that is a success, write success: 0.88" in failed(ShapedShop)["gold answer"]
    assert "success is a reward of at least 0.9" in failed(ShapedShop, success=0.9)["gold answer"]
    misspelt = failed(ShapedShop, success="is_sucess")["gold answer"]
    assert "success is a true 'is_sucess' in the episode's info, which has tool_calls; is_success" in misspelt


def test_without_a_success_no_answer_is_right_or_wrong() -> None:
    findings = check_env(spec_of(ShapedShop, success="none"), num_samples=2)
    assert [finding for finding in findings if finding.passed is False] == []
    detail = "the entry says success: none; rewards: 0.88"
    assert found(findings, "gold answer") == Finding("gold answer", "skipped", detail)


class Summed(Shop):
    def reward(self, final_text: str) -> float:
        return 20.0 * super().reward(final_text) - 5.0


def test_an_entry_that_says_what_success_is_declares_only_the_bounds_that_it_names() -> None:
    assert failed(Summed, success=15) == {}
    assert "above the reward_max_val 10" in failed(Summed, success=15, reward_max_val=10.0)["wrong answers"]
    assert "below the reward_min_val -1" in failed(Summed, success="none", reward_min_val=-1.0)["wrong answers"]


class Images(Shop):
    @tool
    def price(self, fruit: str) -> Any:
        """Show the price."""
        return ["Here.", make_image(96, 64, seed=len(fruit))]


def test_images_are_measured() -> None:
    finding = found(check_env(spec_of(Images), num_samples=3), "image sizes")
    assert finding == Finding("image sizes", "ok", "images of 96x64 to 96x64")


# Broken environments --------------------------------------------------------------------------------------------------


class Raises(Shop):
    def step(self, response_text: str) -> Step:
        return {"obs_str": self.sample.metadata["colour"]}, False, {}


def test_a_fault_is_reported_with_its_last_line_and_its_place_in_the_environment() -> None:
    line = (
        Path(__file__)
        .read_text()
        .splitlines()
        .index('        return {"obs_str": self.sample.metadata["colour"]}, False, {}')
        + 1
    )
    detail = failed(Raises)
    assert list(detail) == ["contract"]
    assert f"step 1: KeyError: 'colour' (test_check.py:{line})" in detail["contract"]


class Order(BaseModel):
    pieces: int


class Orders(Shop):
    def step(self, response_text: str) -> Step:
        return {"obs_str": str(Order.model_validate({"pieces": "many"}))}, False, {}


def test_a_fault_of_several_lines_is_reported_with_its_first() -> None:
    detail = failed(Orders)["contract"]
    assert "ValidationError: 1 validation error for Order pieces Input should be a valid integer" in detail


class Untyped(Shop):
    @tool
    def add(self, one, other: int) -> int:  # type: ignore[no-untyped-def]
        """Add."""
        return one + other


class Unfinished(Shop, abc.ABC):
    @abc.abstractmethod
    def step(self, response_text: str) -> Step: ...


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (Untyped, "3 samples, building: TypeError: tool add: parameter 'one' needs a type; write one: str"),
        (Unfinished, "3 samples, building: TypeError: Can't instantiate abstract class Unfinished"),
    ],
)
def test_a_fault_that_no_line_of_the_author_raised_shows_no_place(env: type, detail: str) -> None:
    found = failed(env)
    assert list(found) == ["contract"] and found["contract"].startswith(detail)
    assert ".py" not in found["contract"]


class Decoder(Shop):
    def step(self, response_text: str) -> Step:
        return json.loads("{"), False, {}


def test_the_place_of_a_fault_is_the_authors_last_line_below_which_a_library_raised() -> None:
    assert "Expecting property name" in (detail := failed(Decoder)["contract"])
    assert "(test_check.py:" in detail and "decoder.py" not in detail


class Rotten(Sequence[Sample]):
    def __init__(self, split: str, size: int, seed: int) -> None:
        pass

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return json.loads("{")


def test_the_place_of_a_sample_that_cannot_be_made_is_the_authors_line() -> None:
    with pytest.raises(UserError, match=r"sample 0 must be created, got JSONDecodeError: .* \(test_check.py:\d+\)"):
        check_env(spec_of(Shop, "Rotten"))


def test_bundled_environments_are_authors_code_and_what_calls_them_is_not() -> None:
    envs = ROOT / "envs"
    for file in ("geo3k/env.py", "calculator.py", "guess.py", "from_gymnasium.py"):
        assert author_location([(str(envs / file), 3), (abc.__file__, 5)]) == f"{Path(file).name}:3"
    for file in ("check.py", "tools.py", "spec.py", "images.py", "checking/episodes.py", "execution/threads.py"):
        assert author_location([("/home/me/shop.py", 12), (str(envs / file), 3)]) == "shop.py:12"
        assert author_location([(str(envs / file), 3), (pytest.__file__, 5), ("<string>", 1)]) is None
    assert author_location([(str(ROOT / "agents" / "play.py"), 3)]) is None


def test_an_installed_package_that_brings_environments_is_authors_code(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path("/venv/lib/site-packages")
    frames = [(str(installed / "shop_envs" / "shop.py"), 12), (str(installed / "pydantic" / "main.py"), 3)]
    assert author_location(frames) is None
    plugins = [("shop", installed / "shop_envs" / "registry.yaml")]
    monkeypatch.setattr("envs.checking.error_location.plugin_files", lambda: plugins)
    assert author_location(frames) == "shop.py:12"


NOT_REACHED = "no episode got as far as this"
OF_STEPS = {
    "deterministic", "gold answer", "wrong answers", "reward source", "malformed calls", "rendering", "control tokens",
    "image sizes",
}  # fmt: skip


class NeverBuilt(Shop):
    def __init__(self, sample: Sample, args: Any) -> None:
        raise ValueError("no colour")


class Unsolved(Shop):
    def solution(self) -> Sequence[str]:
        return [self.sample.metadata["colour"]]


class NeverReset(Shop):
    def reset(self) -> Any:
        raise OSError("no shop")


def unreached(findings: Sequence[Finding]) -> set[str]:
    return {finding.check for finding in findings if finding.detail == NOT_REACHED and finding.passed is None}


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (NeverBuilt, "3 samples, building: ValueError"),
        (NeverReset, "3 samples, reset: OSError: no shop (test_check.py:"),
        (Unsolved, "3 samples, solution: KeyError: 'colour' (test_check.py:"),
    ],
)
def test_what_no_play_reached_does_not_apply_and_equal_faults_are_one(env: type, detail: str) -> None:
    findings = check_env(spec_of(env), num_samples=3)
    contract = found(findings, "contract")
    assert contract.passed is False and contract.detail.startswith(detail) and ";" not in contract.detail
    assert unreached(findings) >= OF_STEPS
    if env is NeverBuilt:
        assert unreached(findings) == OF_STEPS | {"tools", "closing"}


def test_where_every_step_is_a_fault_what_steps_say_does_not_apply() -> None:
    findings = check_env(spec_of(Raises), num_samples=3)
    assert unreached(findings) == OF_STEPS
    assert found(findings, "contract").detail.startswith("3 samples, a plain answer and ")


def test_a_first_observation_that_was_never_seen_is_not_missed_in_the_prompt() -> None:
    finding = found(check_env(spec_of(NeverReset, "unlabelled"), num_samples=3), "prompts")
    assert finding == Finding("prompts", "skipped", NOT_REACHED)


class Garbage(Shop):
    def step(self, response_text: str) -> Any:
        return "You walk."


class NoEnvironment(Shop):
    def __new__(cls, sample: Sample, args: Any) -> Any:
        return object()


class Unmarked(ToolEnv):
    def price(self, fruit: str) -> int:
        """Return a price."""
        return 3


def test_a_tool_that_is_not_marked_is_asked_for() -> None:
    finding = found(check_env(spec_of(Unmarked), num_samples=2), "tools")
    assert finding == Finding("tools", "skipped", "no method of this ToolEnv is marked with @tool")


class Unready(Shop):
    def __init__(self, sample: Sample, args: Any) -> None:
        self.sample = sample


class ListsText(Shop):
    def solution(self) -> Any:
        return "\\boxed{3}"


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (Garbage, "step must return (dict, bool, dict), got 'You walk.'"),
        (NoEnvironment, "building must return an environment with tools, reset, step"),
        (Unready, "3 samples: building must return an environment with tools, reset, step, format_observation, "),
        (ListsText, "solution must return a list of texts"),
    ],
)
def test_what_the_contract_does_not_know_fails_the_contract_alone(env: type, detail: str) -> None:
    found = failed(env)
    assert list(found) == ["contract"] and detail in found["contract"]


class Hangs(Shop):
    def step(self, response_text: str) -> Step:
        time.sleep(3)
        return super().step(response_text)


@pytest.mark.alone
def test_an_environment_that_hangs_is_given_up_after_its_first_time_limit() -> None:
    started = time.perf_counter()
    assert list(failed(Hangs, step_timeout_s=0.5)) == ["contract"]
    assert time.perf_counter() - started < 3


_counter = itertools.count()


class RepaintsLater(Shop):
    @tool
    def price(self, fruit: str) -> Any:
        """Show a price."""
        return make_image(64, 64, seed=next(_counter))


class LateChange(Shop):
    @tool
    def price(self, fruit: str) -> Any:
        """Return a price."""
        return f"{'so ' * 50}{next(_counter)}"


class Restless(Shop):
    @tool
    def price(self, fruit: str) -> Any:
        """Return a price."""
        return f"{next(_counter)} so far"


class Fickle(Shop):
    def reward(self, final_text: str) -> float:
        return super().reward(final_text) or next(_counter) * 1e-9


def changing(split: str, size: int, seed: int) -> list[Sample]:
    return samples(split, size, next(_counter))


@pytest.mark.parametrize(
    ("env", "dataset", "detail"),
    [
        (Restless, "samples", "the answer of step 1 differs: '"),
        (RepaintsLater, "samples", "the answer of step 1 differs: the texts are the same, the images differ"),
        (LateChange, "samples", "so so so 0' and '"),
        (Fickle, "samples", "a plain answer: the rewards are"),
        (Shop, "changing", "sample train-0: differs when it is read again"),
    ],
)
def test_what_differs_from_one_time_to_the_next_is_not_deterministic(env: type, dataset: str, detail: str) -> None:
    found = failed(env, dataset)
    assert list(found) == ["deterministic"] and detail in found["deterministic"]


class Miser(Shop):
    def reward(self, final_text: str) -> float:
        return 0.0


class Rambling(Shop):
    def solution(self) -> Sequence[str]:
        return [*super().solution()[:1]] * 3 + [*super().solution()[1:]]


@pytest.mark.parametrize(
    ("env", "detail"),
    [(Miser, "sample train-0 (label '3'): solution() 0; best is 1"), (Rambling, "takes 4 turns, max_turns is 3")],
)
def test_a_right_answer_that_is_not_rewarded_fails_the_gold_answer_alone(env: type, detail: str) -> None:
    found = failed(env)
    assert list(found) == ["gold answer"] and detail in found["gold answer"]


class Generous(Shop):
    def reward(self, final_text: str) -> float:
        return float("boxed" in final_text)


class Harsh(Shop):
    def reward(self, final_text: str) -> float:
        return super().reward(final_text) or -1.0


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (Generous, "a wrong answer: '\\\\boxed{4}' scores 1"),
        (Harsh, "scores -1, below the reward_min_val 0 of the entry"),
    ],
)
def test_a_wrong_answer_that_scores_outside_its_range_fails_wrong_answers_alone(env: type, detail: str) -> None:
    found = failed(env)
    assert list(found) == ["wrong answers"] and detail in found["wrong answers"]


class ReadsItself(Shop):
    def step(self, response_text: str) -> Step:
        observation, done, info = super().step(response_text)
        self.seen = getattr(self, "seen", "") + observation.get("obs_str", "")
        return observation, done, info

    def reward(self, final_text: str) -> float:
        return max(super().reward(final_text), float(str(self.sample.label) in getattr(self, "seen", "")))


def test_a_reward_for_what_the_environment_said_fails_the_reward_source_alone() -> None:
    found = failed(ReadsItself)
    assert list(found) == ["reward source"]
    assert "solution() without its answer: shown '3', the model's 'That is all.' scores 1" in found["reward source"]


class Submit(ToolEnv):
    """The answer is what a tool is given, not the last text."""

    answer = ""

    @tool
    def submit(self, answer: str) -> str:
        """Submit the answer."""
        self.answer = answer
        return f"You said {answer}." if answer.isdigit() else "Write a number."

    def solution(self) -> Sequence[str]:
        return [write_call("submit", {"answer": self.sample.label}, "hermes")]

    def reward(self, final_text: str) -> float:
        return float(self.answer == self.sample.label)


def test_an_answer_given_to_a_tool_may_be_rewarded_whatever_is_written_last() -> None:
    assert failed(Submit) == {}


class Naive(Shop):
    def step(self, response_text: str) -> Step:
        if "<tool_call>" in response_text:
            body = response_text.split("<tool_call>")[1].split("</tool_call>")[0]
            json.loads(body)["arguments"]["fruit"].lower()
        return super().step(response_text)


class Deaf(Shop):
    def step(self, response_text: str) -> Step:
        observation, done, info = super().step(response_text)
        is_made = all(call["outcome"] in ("ok", "tool_error") for call in info["tool_calls"])
        return (observation, done, info) if is_made else ({}, True, {})


class Quadratic(Shop):
    def step(self, response_text: str) -> Step:
        time.sleep(1.5 if len(response_text) > 50_000 else 0)
        return super().step(response_text)


@pytest.mark.parametrize(
    ("env", "isolation", "detail"),
    [
        (Naive, "thread", "broken JSON, step 1: json.decoder.JSONDecodeError"),
        (Deaf, "thread", "broken JSON: the call cannot be made, and the model is not told (ends the episode)"),
        pytest.param(Quadratic, "inline", "100 kB of prose: a step took 1", marks=pytest.mark.alone),
        pytest.param(Quadratic, "thread", "step took longer than 1 s", marks=pytest.mark.alone),
    ],
)
def test_a_broken_call_that_breaks_the_environment_fails_malformed_calls_alone(
    env: type, isolation: str, detail: str
) -> None:
    found = failed(env, isolation=isolation, step_timeout_s=1.0)
    assert list(found) == ["malformed calls"] and detail in found["malformed calls"]


class FewPrices(ToolEnv):
    @tool
    def price(self, fruit: str) -> int:
        """Return a price."""
        return PRICES[fruit]  # fails

    def solution(self) -> Sequence[str]:
        return Shop.solution(self)  # type: ignore[arg-type]


def test_a_tool_that_fails_is_named_with_its_line_whatever_this_is_worth_in_training() -> None:
    found = failed(FewPrices, on_tool_fault="reward_min")
    (line,) = (n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# fails"))
    assert f"a call of price, step 1: KeyError: '...' (test_check.py:{line})" in found["contract"]
    assert "malformed calls" in found


def test_an_entry_that_asks_to_observe_the_faults_of_a_step_without_tools_fails_the_contract() -> None:
    rule = "environment 'guess' on_tool_fault: needs a ToolEnv, because no other step can go on after a fault, got"
    spec = get_spec("guess").model_copy(update={"on_tool_fault": "observe"})
    assert found(check_env(spec, num_samples=1), "contract").detail.startswith(f"{rule} observe; write reward_min")
    for fine in (get_spec("guess"), spec.model_copy(update={"on_tool_fault": "reward_min"})):
        assert found(check_env(fine, num_samples=1), "contract").passed


class NoSuchProperty(Shop):
    @property
    def tools(self) -> Any:
        schema = json.loads(json.dumps(super().tools[0]))
        schema["function"]["parameters"]["required"] = ["colour"]
        return [schema]


class Unwritable(Shop):
    @property
    def tools(self) -> Any:
        return [{**super().tools[0], "example": {1, 2}}]


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (NoSuchProperty, "price: required names 'colour', which is no property"),
        (Unwritable, "cannot be written as JSON: Object of type set"),
    ],
)
def test_a_schema_that_no_template_can_show_fails_the_tools(env: type, detail: str) -> None:
    assert detail in failed(env)["tools"]


class Silent(Labelled):
    price = None  # type: ignore[assignment]

    @tool
    def add(self, one: int, other: int) -> Any:
        one + other  # type: ignore[reportUnusedExpression]


class SilentShop(Shop):
    @tool
    def price(self, fruit: str) -> Any:
        """Return a price."""


@pytest.mark.parametrize(("env", "name"), [(Silent, "add"), (SilentShop, "price")])
def test_a_tool_that_never_answers_fails_the_tools(env: type, name: str) -> None:
    assert f"{name} answered nothing in every call; does it return?" in failed(env)["tools"]


class Searches(Labelled):
    @tool
    def price(self, fruit: str) -> Any:
        """Return a price, or nothing where there is none."""
        return "3" if fruit == "fig" else None


def test_a_tool_that_has_no_answer_to_made_up_arguments_passes() -> None:
    assert found(check_env(spec_of(Searches), num_samples=1), "tools") == Finding("tools", "ok", "price")


class Ends(Labelled):
    @tool
    def price(self, fruit: str) -> Any:
        """End the episode."""
        self.done = True


def test_a_tool_that_ends_the_episode_may_answer_nothing() -> None:
    assert found(check_env(spec_of(Ends), num_samples=1), "tools") == Finding("tools", "ok", "price")


class Mute(Labelled):
    @tool
    def cost(self, fruit: str) -> Any:
        return PRICES.get(fruit, 0)


def test_a_tool_without_a_description_passes_with_a_remark() -> None:
    finding = found(check_env(spec_of(Mute), num_samples=1), "tools")
    assert finding.passed and "cost has no description" in finding.detail


def raising(split: str, size: int, seed: int) -> list[Sample]:
    raise KeyError("colour")


def rows(split: str, size: int, seed: int) -> list[Any]:
    return [{"problem": "?", "answer": "3"}]


@pytest.mark.parametrize(
    ("dataset", "error"),
    [
        ("raising", "samples, got KeyError: 'colour' (test_check.py:"),
        ("rows", "sample 0 must be an envs.Sample, got dict"),
        ("Sequence", "samples, got TypeError: Sequence() takes no arguments; "),
        ("untold", "the prompt of sample 0 must be a tuple of chat messages, got str 'What is it?'; write prompt="),
        ("numbered", "the label of sample 0 must be a text or None, got int"),
        ("nothing", "must have more than 0 samples, got 0"),
    ],
)
def test_a_data_set_that_gives_no_samples_is_a_users_error(dataset: str, error: str) -> None:
    with pytest.raises(UserError) as caught:
        check_env(spec_of(Shop, dataset))
    assert error in str(caught.value)


def nothing(split: str, size: int, seed: int) -> list[Sample]:
    return []


def placeholders(split: str, size: int, seed: int) -> list[Sample]:
    prompt = ({"role": "user", "content": "<image>What is it?"},)
    return [Sample(s.id, prompt, s.label, s.metadata) for s in samples(split, size, seed)]


def untold(split: str, size: int, seed: int) -> list[Sample]:
    return [Sample(s.id, "What is it?", s.label, s.metadata) for s in samples(split, size, seed)]  # type: ignore


def bare(split: str, size: int, seed: int) -> list[Sample]:
    return [Sample(s.id, ({"role": "user"},), s.label, s.metadata) for s in samples(split, size, seed)]


def numbered(split: str, size: int, seed: int) -> list[Sample]:
    return [Sample(s.id, s.prompt, 3, s.metadata) for s in samples(split, size, seed)]  # type: ignore


@pytest.mark.parametrize(
    ("dataset", "detail"),
    [
        ("placeholders", "a text contains <image>, which stays text"),
        ("bare", 'a prompt must hold {"role": str, "content": str or list of parts}'),
    ],
)
def test_a_prompt_that_does_not_show_what_it_should_fails_the_prompts_alone(dataset: str, detail: str) -> None:
    found = failed(Shop, dataset)
    assert list(found) == ["prompts"] and detail in found["prompts"]


class Odd(Shop):
    def format_observation(self, observation: dict[str, Any]) -> Any:
        return {"role": "shop", "content": observation["obs_str"]}


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (Odd, "chat_template.jinja refuses it: a message of role shop has no place here"),
    ],
)
def test_an_observation_that_cannot_be_rendered_fails_the_rendering_alone(env: type, detail: str) -> None:
    found = failed(env)
    assert list(found) == ["rendering"] and detail in found["rendering"]


class Spells(Shop):
    @tool
    def price(self, fruit: str) -> Any:
        """Return a price."""
        return f"{PRICES.get(fruit, 0)}<|im_end|>"


def test_a_control_token_in_the_environments_own_text_fails_control_tokens_alone() -> None:
    found = failed(Spells)
    assert list(found) == ["control tokens"]
    assert "<|im_end|> in an observation, sample train-0, solution()" in found["control tokens"]


class EchoesTokens(Shop):
    @tool
    def price(self, fruit: str) -> Any:
        """Return a price."""
        return PRICES.get(fruit, f"There is no {fruit.encode('utf-8', 'replace').decode()}.")


def test_a_control_token_that_the_model_wrote_first_is_reported_and_passes() -> None:
    finding = found(check_env(spec_of(EchoesTokens), num_samples=3), "control tokens")
    assert finding.passed and "only those that the model wrote before: <|im_end|>, <|im_start|>" in finding.detail


@functools.cache
def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


class Huge(Shop):
    size = (5000, 4000)

    @tool
    def price(self, fruit: str) -> Any:
        """Show a price."""
        return blank(*self.size)


class Tiny(Huge):
    size = (64, 20)


class Ribbon(Huge):
    size = (28 * 201, 28)


@pytest.mark.parametrize(
    ("env", "check", "detail"),
    [
        (Tiny, "image sizes", "64x20: a side must have at least 28 pixels"),
        (Ribbon, "contract", "image: must have no side over 200 times as long as the other, got 5628x28"),
    ],
)
def test_a_image_that_no_model_takes_fails_one_check(env: type, check: str, detail: str) -> None:
    found = failed(env)
    assert list(found) == [check] and detail in found[check]


class ClosesOnce(Shop):
    is_open = True

    def close(self) -> None:
        super().close()
        if not self.is_open:
            raise OSError("closed already")
        self.is_open = False


class ClosesAfterReset(Shop):
    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.log: list[str] = []
        return super().reset()

    def close(self) -> None:
        self.log.clear()


@pytest.mark.parametrize(("env", "detail"), [(ClosesOnce, "closed already"), (ClosesAfterReset, "AttributeError")])
def test_a_close_that_raises_fails_the_closing_alone(env: type, detail: str) -> None:
    found = failed(env)
    assert list(found) == ["closing"] and detail in found["closing"]


# The texts and the template -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool_format", ["hermes", "qwen_xml"])
def test_calls_are_written_as_the_parser_reads_them(tool_format: Any) -> None:
    arguments = {"a": "x", "b": "</tool_call> \n\"'"}
    assert find_tool_calls(write_call("f", {"a": "x"}, tool_format), tool_format) == [ToolCall("f", {"a": "x"})]
    assert find_tool_calls(write_call("f", arguments, "hermes")) == [ToolCall("f", arguments)]


def test_hostile_texts_are_many_different_and_the_broken_calls_among_them_are_marked() -> None:
    for tool_format in ("hermes", "qwen_xml"):
        scripts = hostile_scripts([Shop(samples("train", 1, 0)[0]).tools[0]], tool_format)
        assert len(scripts) >= 25 and len({script.name for script in scripts}) == len(scripts)
        assert max(len(script.texts[0]) for script in scripts) >= 100_000
        for script in (script for script in scripts if script.needs_answer):
            (call, *_) = find_tool_calls(script.texts[0], tool_format)
            is_call = isinstance(call, ToolCall)
            assert not is_call or script.name in (
                "unknown tool", "extra argument", "no arguments", "arguments of wrong types",
            ), script.name  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "..."),
        ({"type": "integer"}, 1),
        ({"type": "integer", "minimum": 5}, 5),
        ({"type": "number", "minimum": 0, "maximum": 1}, 0.5),
        ({"enum": ["left", "right"]}, "left"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 1]),
        ({"type": "object"}, {}),
        ({}, "..."),
    ],
)
def test_example_values_have_the_type_of_their_parameter(schema: dict[str, Any], value: Any) -> None:
    assert example_value(schema) == value


def test_a_template_that_drops_a_message_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    findings = check_env(spec_of(Shop), num_samples=1, template=ChatTemplate.open(str(tmp_path / "t.jinja")))
    assert "the template leaves out or changes '3'" in found(findings, "rendering").detail


def test_a_template_that_does_not_end_fails_the_check_of_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.checking.chat_template.RENDER_S", 0.2)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    findings = check_env(spec_of(Shop), num_samples=1, template=ChatTemplate(loops, "t.jinja"))
    assert "the chat template t.jinja took longer than 0.2 s" in found(findings, "rendering").detail


def test_the_tag_that_marks_what_a_model_writes_is_rendered_as_its_body() -> None:
    template = ChatTemplate("a{% generation %}b{{ messages|length }}{% endgeneration %}c", "t.jinja")
    assert template.render([]) == "ab0c"


def test_a_template_that_shows_no_images_is_found_out() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content if m.content is string }}{% endfor %}", "t.jinja")
    findings = check_env(spec_of(Images), num_samples=1, template=template)
    assert "the template shows no images" in found(findings, "rendering").detail


# The command ----------------------------------------------------------------------------------------------------------

ENTRY = f"""
shop:
  entry_point: {__name__}:Shop
  description: a shop
  max_turns: 3
stingy:
  entry_point: {__name__}:Miser
  description: a shop
  dataset: {__name__}:samples
  max_turns: 3
lost:
  entry_point: no_such_module
  description: a shop
  dataset: {__name__}:samples
  max_turns: 3
"""


@pytest.fixture
def registry(tmp_path: Path) -> str:
    (tmp_path / "registry.yaml").write_text(ENTRY)
    return str(tmp_path / "registry.yaml")


def test_the_command_prints_a_table_and_returns_0_where_nothing_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calculator", "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("gold answer", "solution() 2/2", "0 failed"))


def test_the_command_returns_1_where_a_check_failed(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stingy", "--registry", registry, "--samples", "2"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["lost"], "environment 'lost' entry_point: 'no_such_module' must import"),
        (["shop"], "environment 'shop': must have a built-in data set to run without one"),
        (["geo4k"], "did you mean 'geo3k'?"),
        (["calculator", "--chat-template", "none.jinja"], "--chat-template: must be a readable file, got none.jinja"),
        (["calculator", "--samples", "0"], "--samples"),
        ([], "ID: field required"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(
    registry: str, argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda: run([*argv, "--registry", registry])) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and error in shown and shown.count("\n") == 1


def test_a_template_that_is_no_jinja_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="must be a chat template"):
        ChatTemplate.open(str(tmp_path / "t.jinja"))


def test_problems_may_come_from_a_file(registry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "What does one pear cost?", "price": 4, "fruit": "pear"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["--data", str(tmp_path / "rows.jsonl"), "--prompt-key", "question", "--answer-key", "price"]
    assert run(["shop", "--registry", registry, *keys]) == 0
    assert "solution() 2/2" in capsys.readouterr().out


def test_the_command_runs_as_a_module_and_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from envs.check import run; code = run(['geo3k', '--samples', '1']);"
        "print(code, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    done = subprocess.run([sys.executable, "-m", "envs.check", "nope"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("env_id", load_registry())
def test_every_bundled_environment_passes(env_id: str) -> None:
    findings = check_env(get_spec(env_id), num_samples=3)
    assert [finding for finding in findings if finding.passed is False] == []
    assert {finding.check for finding in findings if finding.passed} >= {"contract", "deterministic", "malformed calls"}
