"""Claims about the registry: entries are checked when read, code is imported when used, errors name file and entry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from envs.env import Env, EnvArgs
from envs.errors import UserError
from envs.execution.load import load_env
from envs.registry import get_spec, load_registry
from envs.spec import EnvSpec
from envs.types import Sample

MODULE = """
from envs.env import Env
from envs.types import Sample

PROMPT = "Count."
TURNS = 4


class Counter(Env):
    def __init__(self, sample, args):
        self.limit = args.max_turns

    def reset(self):
        return {}, {"limit": self.limit}

    def step(self, response_text):
        return {"obs_str": "1"}, True, {}

    def reward(self, final_text):
        return 1.0


def build_env(sample=None, args=None, **_):
    return Counter(sample, args)


def make_samples(split, size, seed):
    return [Sample(id=f"{split}-{seed}-{i}", prompt=()) for i in range(size)]
"""

ENTRY = """
counter:
  entry_point: {module}
  description: counts
  dataset: {module}:make_samples
  system_prompt: {module}:PROMPT
  max_turns: 2
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)

    return write


def overlay(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def error_of(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_registry(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_entry_loads_its_environment_samples_and_prompt(tmp_path: Path, write_module) -> None:
    write_module("counter_env", MODULE)
    spec = get_spec("counter", overlay(tmp_path, ENTRY.format(module="counter_env")))
    samples = spec.load_dataset("train", size=3, seed=5)
    env = load_env(spec)(samples[0], EnvArgs(spec.max_turns))
    assert isinstance(env, Env)
    assert env.reset()[1] == {"limit": 2}
    assert (len(samples), samples[2].id, spec.load_system_prompt()) == (3, "train-5-2", "Count.")


def test_reading_the_registry_imports_no_environment(tmp_path: Path) -> None:
    file = overlay(tmp_path, ENTRY.format(module="no_such_module"))
    assert get_spec("counter", file).max_turns == 2


def test_a_later_file_replaces_an_entry_and_keeps_the_others(tmp_path: Path) -> None:
    first = overlay(tmp_path, ENTRY.format(module="one"), "one.yaml")
    second = overlay(tmp_path, ENTRY.format(module="two").replace("max_turns: 2", "max_turns: 9"), "two.yaml")
    registry = load_registry(first, second)
    assert (registry["counter"].entry_point, registry["counter"].max_turns) == ("two", 9)
    assert set(load_registry()) | {"counter"} == set(registry)


def test_an_empty_overlay_adds_nothing(tmp_path: Path) -> None:
    assert load_registry(overlay(tmp_path, "# nothing yet\n")) == load_registry()


@pytest.mark.parametrize("env_id", sorted(load_registry()))
def test_every_packaged_entry_imports_and_builds(env_id: str) -> None:
    spec = get_spec(env_id)
    assert spec.description
    sample = Sample(id="0", prompt=(), label="1")
    if spec.dataset is not None:
        samples = spec.load_dataset("train", size=2, seed=0)
        assert len(samples) == 2
        sample = samples[1]
    env = load_env(spec)(sample, spec.args())
    assert isinstance(env, Env)
    env.reset()
    env.close()
    prompt = spec.load_system_prompt()
    assert prompt is None or prompt.strip()


def test_an_unknown_environment_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"environment: must be in the registry or in .*mine.yaml, got countr; did you mean 'counter'\?"
    ):
        get_spec("countr", overlay(tmp_path, ENTRY.format(module="m")))
    with pytest.raises(UserError, match=r"give the file of an entry of your own with --registry; known: calculator, "):
        get_spec("shop")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("max_turns", "max_turn"), "mine.yaml entry 'counter': must have known keys only, got max_turn; did you mean"),
        (("max_turns: 2", "max_turns: '2'"), "entry 'counter' max_turns: must be a valid integer, got the text '2'"),
        (("max_turns: 2", "max_turns: true"), "entry 'counter' max_turns: must be a valid integer, got True"),
        (("max_turns: 2", "max_turns: 0"), "max_turns: must be greater than or equal to 1, got 0"),
        (("  max_turns", "  reward_max_val: .inf\n  max_turns"), "reward_max_val: must be a finite number"),
        (
            ("  max_turns", "  reward_max_val: 1.0e+39\n  max_turns"),
            "reward_max_val: must be less than or equal to 34028",
        ),
        (("  max_turns", "  reward_min_val: -4.0e+38\n  max_turns"), "must be greater than or equal to -34028"),
        (("  max_turns: 2\n", ""), "entry 'counter' max_turns: is required"),
        (("  max_turns", "  id: x\n  max_turns"), "must have known keys only, got id"),
        (("m:PROMPT", "Count the dots."), "write module:ATTRIBUTE"),
        (("entry_point: m", "entry_point: m.py:1"), "write module:ATTRIBUTE"),
        (("description: counts", "description: [a]"), "description: must be a valid string"),
        (("max_turns: 2", "max_turns: 2\n  reward: brevity"), "reward: must be a list, got the text 'brevity'"),
        (("counter:", "7:"), "entry '7': must have a text as its id, got int; write \"7\": in quotes"),
        (("counter:", "counter: [1]\nother:"), "entry 'counter': must be a mapping, got list"),
        (
            ("  max_turns", "  description: twice\n  max_turns"),
            "mine.yaml line 7: must be YAML, got 'description' stands",
        ),
        (("counter:", "counter: {"), "must be YAML"),
    ],
)
def test_a_wrong_entry_is_one_line_that_names_file_and_entry(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    file = overlay(tmp_path, ENTRY.format(module="m").replace(*change, 1))
    error = error_of(file)
    assert error.startswith(str(file))
    assert message in error


def test_a_pipe_or_a_device_is_no_registry_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="must be a readable registry file, got Not a regular file"):
            load_registry(path)


def test_a_value_that_yaml_cannot_hold_is_a_user_error(tmp_path: Path) -> None:
    for number, value in enumerate(("1" * 5000, "2026-13-01")):
        (tmp_path / f"{number}.yaml").write_text(f"x: {value}")
        with pytest.raises(UserError, match=r"must be YAML, got ValueError: .*; put the value into quotes"):
            load_registry(tmp_path / f"{number}.yaml")


def test_aliases_that_stand_for_endless_values_are_refused_before_anything_is_built_or_shown(tmp_path: Path) -> None:
    entry = "entry_point: 'a:b', description: d, max_turns: 1"
    ten = ", ".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 10)}]" for i in range(1, 10))
    merged = ", ".join(f"c{i}: &c{i} {{<<: [{', '.join([f'*c{i - 1}'] * 10)}]}}" for i in range(1, 10))
    texts = (
        f"x: {{b0: &b0 [1], {ten}}}",
        f"x: {{c0: &c0 {{d: 1}}, {merged}}}",
        f"x: {{grader: {{b0: &b0 [1], {ten}}}, {entry}}}",
        "x: &x {options: *x}",
    )
    for text in texts:
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(UserError, match=r"mine.yaml line 1: must be YAML, got aliases stand for more than"):
            load_registry(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text(f"x: &x {{{entry}}}\ny: {{<<: *x, max_turns: 7}}")
    assert load_registry(tmp_path / "mine.yaml")["y"].max_turns == 7


def test_a_registry_that_takes_minutes_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("#" * 2**20 + "\n")
    assert "must have at most 1048576 bytes" in error_of(tmp_path / "mine.yaml")


def test_a_missing_overlay_is_a_user_error(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "gone.yaml")


def test_an_overlay_that_is_a_list_is_a_user_error(tmp_path: Path) -> None:
    assert "must map environment ids to entries, got list" in error_of(overlay(tmp_path, "- a\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package\n", "install 'no_such_package', which the module imports"),
        (
            "x = 1\nraise RuntimeError('first\\nsecond')\n",
            "RuntimeError: first second (broken_env.py:2); fix the module",
        ),
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0 (broken_env.py:2); fix the module"),
        ("def build_en(): ...\n", "got build_env; did you mean 'build_en'?"),
        ("build_env = 3\n", "'broken_env:build_env' must be callable, got int"),
    ],
)
def test_an_import_problem_names_module_and_cause(text: str, message: str, write_module) -> None:
    write_module("broken_env", text)
    spec = EnvSpec(id="mine", entry_point="broken_env", description="", max_turns=1)
    with pytest.raises(UserError) as caught:
        load_env(spec)
    error = str(caught.value)
    assert error.startswith("environment 'mine' entry_point: 'broken_env")
    assert message in error
    assert "\n" not in error


def test_a_module_that_is_not_there_is_told_from_one_that_it_imports() -> None:
    spec = EnvSpec(id="mine", entry_point="no_such_module.env", description="", max_turns=1)
    with pytest.raises(UserError, match=r"'no_such_module\.env' must import, .* put its folder on PYTHONPATH"):
        load_env(spec)
    spec = EnvSpec(id="mine", entry_point="envs.guess.GuessEnv", description="", max_turns=1)
    with pytest.raises(UserError, match=r"write a colon before the name: envs\.guess:GuessEnv"):
        load_env(spec)


def test_an_entry_without_a_data_set_says_so() -> None:
    spec = EnvSpec(id="mine", entry_point="m", description="", max_turns=1)
    assert spec.load_system_prompt() is None
    with pytest.raises(UserError, match="environment 'mine': must have a built-in data set"):
        spec.load_dataset("train", 1, 0)


def test_a_system_prompt_that_is_no_string_is_refused(write_module) -> None:
    write_module("typed_env", MODULE)
    spec = EnvSpec(id="mine", entry_point="m", description="", system_prompt="typed_env:TURNS", max_turns=1)
    with pytest.raises(UserError, match="'typed_env:TURNS' must be a string, got int"):
        spec.load_system_prompt()


def test_specs_are_frozen() -> None:
    with pytest.raises(ValidationError):
        get_spec("geo3k").max_turns = 5


def test_importing_the_data_modules_loads_no_heavy_library() -> None:
    code = (
        "import sys, envs, envs.datasets.samples, envs.images, envs.registry; envs.registry.load_registry();"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def install(folder: Path, name: str, registry: str | None, value: str | None = None) -> None:
    """Lay out what installing a package of that name leaves: its code, and metadata with the entry point."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if registry is not None:
        (folder / name / "registry.yaml").write_text(registry)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[trueturn.envs]\n{name} = {value or name}\n")


THEIR_ENTRY = "{entry_point: math:sqrt, description: d, max_turns: 4}"


def test_an_installed_package_brings_environments_and_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "their_envs", f"theirs: {THEIR_ENTRY}\nguess: {THEIR_ENTRY}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    specs = load_registry()
    assert specs["theirs"].max_turns == 4
    assert specs["guess"].entry_point == "math:sqrt"  # it replaces a packaged entry
    assert specs["theirs"].origin == str(tmp_path / "their_envs" / "registry.yaml")
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(f"theirs: {THEIR_ENTRY.replace('4', '9')}")
    assert load_registry(overlay)["theirs"].max_turns == 9


@pytest.mark.parametrize(
    ("registry", "value", "said"),
    [
        ("theirs: {", None, "left out the environments of the installed package 'their_envs'"),
        (None, None, "left out the environments of the installed package 'their_envs'"),
        ("", "no_such_package", "names no package: no_such_package"),
        ("", "their_envs:build_env", "names no package: their_envs:build_env"),
    ],
)
def test_a_broken_package_is_left_out_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    registry: str | None,
    value: str | None,
    said: str,
) -> None:
    install(tmp_path, "their_envs", registry, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "geo3k" in load_registry() and "theirs" not in load_registry()
    assert said in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "gymnasium: A-v0, entry_point: a",
            "gymnasium must stand in place of entry_point and dataset, got entry_point too",
        ),
        (
            "entry_point: a, reward_max_val: 0, reward_min_val: 1",
            "reward_max_val must be over reward_min_val, got 0 and 1",
        ),
        ("entry_point: a, memory_limit_gib: 1", "memory_limit_gib needs isolation: process, got thread"),
        (
            "entry_point: a, isolation: proces",
            "isolation: must be one of inline, thread, process, got proces; did you mean 'process'?",
        ),
        (
            "entry_point: a, tool_format: xml",
            "tool_format: must be one of hermes, qwen_xml, auto, got xml; known: auto, hermes, qwen_xml",
        ),
        ("entry_point: a, grader: maths", "got maths; did you mean 'math'?"),
        (
            "entry_point: a, system_prompt: You are good.",
            "system_prompt: must name something in a module, got You are good.; write module:ATTRIBUTE",
        ),
        ("entry_point: a, step_timeout_s: 0", "step_timeout_s: must be greater than 0, got 0; fix the value"),
    ],
)
def test_a_wrong_word_is_told_from_the_right_ones(keys: str, message: str, tmp_path: Path) -> None:
    error = error_of(overlay(tmp_path, f"mine: {{description: d, max_turns: 1, {keys}}}\n"))
    assert "entry 'mine'" in error and message in error


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def samples(split, size, seed): pass", "got NoneType; return a list of samples"),
        ("def samples(split, size, seed): yield 1", "got generator; return a list of samples"),
        (
            "def samples(split): return []",
            "samples(split='train', size=2, seed=0, n=5) must return samples, got TypeError",
        ),
    ],
)
def test_a_data_set_that_gives_no_samples_is_told_how_it_is_called(code: str, message: str, write_module) -> None:
    options = {"n": 5} if "TypeError" in message else {}
    write_module("setless_env", code)
    spec = EnvSpec(
        id="mine",
        entry_point="m",
        description="",
        max_turns=1,
        dataset="setless_env:samples",
        dataset_options=options,
    )
    with pytest.raises(UserError) as caught:
        spec.load_dataset("train", size=2, seed=0)
    assert str(caught.value).startswith("environment 'mine' dataset: samples(split='train', size=2, seed=0")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "missing"), [("pass", "reset, step"), ("def step(self, text): pass", "reset, format")]
)
def test_an_entry_point_that_is_a_class_without_episodes_is_told_what_it_lacks(
    body: str, missing: str, write_module
) -> None:
    write_module("no_env", f"class StepEnv:\n    {body}\n")
    spec = EnvSpec(id="mine", entry_point="no_env:StepEnv", description="", max_turns=1)
    with pytest.raises(UserError) as caught:
        load_env(spec)
    assert "environment 'mine' entry_point: 'no_env:StepEnv' must be an environment with reset" in str(caught.value)
    assert f"got a class without {missing}" in str(caught.value)


def test_a_class_whose_objects_make_up_their_methods_may_be_an_entry_point(write_module) -> None:
    methods = ["def __init__(self, sample, args): ...", "def __getattr__(self, name): return None"]
    write_module("wrapping_env", "\n    ".join(["class Wrapping:", *methods]))
    spec = EnvSpec(id="mine", entry_point="wrapping_env:Wrapping", description="", max_turns=1)
    assert load_env(spec).__name__ == "Wrapping"  # type: ignore[attr-defined]
