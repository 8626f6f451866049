"""Claims about modules written for slime: they run unmodified, with their own messages, graded by our rules."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from envs.contract import EnvFault
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner
from envs.registry import get_spec
from envs.spec import EnvLimits
from envs.types import Sample
from tests.paths import ROOT

#: Written here in the manner of slime's examples: its imports, its names, its return values.
MODULE = """
from __future__ import annotations

import json
import re
from typing import Any

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from slime.rollout.rm_hub import grade_answer_verl
from slime.rollout.rm_hub.math_utils import extract_answer
from slime.utils.types import Sample
from tests.paths import ROOT


class ScoringEnv(BaseInteractionEnv):
    def __init__(self, *, ground_truth, max_turns, image):
        self.ground_truth, self.max_turns, self.image = ground_truth, max_turns, image
        self.turn = 0

    def reset(self):
        self.turn = 0
        return {}, {"ground_truth_available": self.ground_truth is not None}

    def step(self, response_text: str):
        self.turn += 1
        is_final_turn = self.turn >= self.max_turns
        found = re.findall(r"<tool_call>\\\\s*(\\\\{.*?\\\\})\\\\s*</tool_call>", response_text, re.DOTALL)
        if not found:
            return {"obs_str": "No tool call detected; ending the episode.", "role": "tool"}, True, {}
        answer = json.loads(found[-1])["arguments"]["answer"]
        score = 1.0 if grade_answer_verl(f"\\\\\\\\boxed{{{answer}}}", self.ground_truth) else 0.0
        observation = {"obs_str": f"calc_score result: {score}", "role": "tool", "tool_score": score}
        if self.image is not None:
            observation["multi_modal_data"] = {"image": [self.image]}
        return observation, is_final_turn, {"tool_score": score, "boxed": extract_answer(response_text)}


def build_env(sample: Sample | None = None, args: Any | None = None, **_: Any) -> ScoringEnv:
    sample.metadata["seen"] = sample.metadata.get("seen", 0) + 1
    assert sample.prompt[0]["role"] == "user" and sample.metadata["seen"] == 1
    image = sample.metadata.get(args.image_key)
    return ScoringEnv(ground_truth=sample.label, max_turns=args.max_turns, image=image)
""".replace("\\\\", "\\")

ENTRY = """
scoring:
  entry_point: slime_scoring_env
  description: Written for slime.
  max_turns: 3
  compat: slime
  options: {image_key: hint}
"""

IMAGE = Image.new("RGB", (40, 30))
CALL = '<tool_call>{"name": "calc_score", "arguments": {"answer": "%s"}}</tool_call>'


@pytest.fixture
def open_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "slime_scoring_env.py").write_text(MODULE)
    (tmp_path / "registry.yaml").write_text(ENTRY)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("slime_scoring_env", None)

    def make(entry: str = ENTRY, **metadata: Any) -> EnvRunner:
        (tmp_path / "registry.yaml").write_text(entry)
        spec = get_spec("scoring", tmp_path / "registry.yaml")
        prompt = ({"role": "user", "content": "Find x."},)
        sample = Sample("0", prompt, label="2\\sqrt{3}", metadata=metadata)
        build = load_env(spec)
        return EnvRunner(lambda: build(sample, spec.args()), EnvLimits())

    return make


def play(runner: EnvRunner, *texts: str) -> tuple[list, float]:
    async def story() -> tuple[list, float]:
        await runner.open()
        results = [await runner.step(text) for text in texts]
        reward = await runner.reward(texts[-1])
        await runner.close()
        return results, reward

    return asyncio.run(story())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_slime_module_runs_unmodified(open_env: Any, isolation: str) -> None:
    entry = f"{ENTRY}  isolation: {isolation}\n"
    results, reward = play(open_env(entry), CALL % "5", CALL % "\\\\sqrt{12}", "So \\boxed{2\\sqrt{3}}.")
    assert [r.info.get("tool_score") for r in results] == [0.0, 1.0, None]
    assert [r.done for r in results] == [False, False, True]
    # As under slime, whose base class shows everything as the user's, whatever role the observation names.
    assert results[0].messages == ({"role": "user", "content": "calc_score result: 0.0"},)
    assert reward == 1.0


def test_images_of_its_observations_go_before_the_text(open_env: Any) -> None:
    results, _ = play(open_env(hint=IMAGE), CALL % "5")
    (message,) = results[0].messages
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][0]["image"].size == (40, 30)


def test_the_final_text_is_graded_by_the_entrys_grader(open_env: Any) -> None:
    assert play(open_env(), "\\boxed{5\\sqrt{3}}")[1] == 0.0
    assert play(open_env(ENTRY + "  reward_min_val: -1\n"), "no answer")[1] == -1.0


TOOLS = [{"type": "function", "function": {"name": "calc_score", "parameters": {"properties": {"answer": {}}}}}]


def test_tools_come_from_the_rows_metadata_as_a_list_or_its_json(open_env: Any) -> None:
    for given in (TOOLS, json.dumps(TOOLS)):
        runner = open_env(tools=given)
        asyncio.run(runner.open())
        assert [*runner.tools] == TOOLS
    with pytest.raises(EnvFault, match=r"sample 0 metadata\.tools: must be a list of tool schemas, or its JSON"):
        asyncio.run(open_env(tools=["calc_score"]).open())


def test_a_function_of_the_module_may_format_observations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "older_env.py").write_text(
        "class Older:\n"
        "    def reset(self): return {}, {}\n"
        "    def step(self, text): return {'obs_str': 'again'}, False, {}\n"
        "def build_env(sample=None, args=None, **_): return Older()\n"
        "def format_observation(observation): return {'role': 'tool', 'content': observation['obs_str'] + '!'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def older(entry: str) -> EnvRunner:
        keys = f"entry_point: older_env, description: d, max_turns: 2{entry}"
        (tmp_path / "registry.yaml").write_text(f"older: {{{keys}}}")
        spec = get_spec("older", tmp_path / "registry.yaml")
        return EnvRunner(lambda: load_env(spec)(Sample("0", (), label="1"), spec.args()), EnvLimits())

    results, reward = play(older(", compat: slime"), "one", "\\boxed{1}")
    assert (results[0].messages, reward) == (({"role": "tool", "content": "again!"},), 1.0)
    with pytest.raises(EnvFault, match="an environment written for slime: add `compat: slime` to its entry"):
        asyncio.run(older("").open())


def test_an_entry_without_the_compat_key_is_told_of_it_where_slime_is_missing(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("from slime.utils.types import Sample\n")
    (tmp_path / "registry.yaml").write_text("theirs: {entry_point: theirs, description: d, max_turns: 2}")
    command = [sys.executable, "-m", "envs.check", "theirs", "--registry", str(tmp_path / "registry.yaml")]
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2
    assert "add `compat: slime` to the entry, or install 'slime'" in done.stderr


def test_a_real_slime_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "slime" / "utils"
    folder.mkdir(parents=True)
    (tmp_path / "slime" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "types.py").write_text("class Sample: real = True\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from envs.slime import install_stand_ins; install_stand_ins()\n"
        "from slime.utils.types import Sample; assert Sample.real\n"
        "from slime.rollout.rm_hub import grade_answer_verl\n"
        "print(grade_answer_verl('\\\\boxed{1/2}', '0.5'), grade_answer_verl('0.5', '0.5'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True False\n", done.stderr
