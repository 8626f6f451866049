"""Claims about the configuration of a run: every field reads from every layer, a kept one is read back, and the ready
configurations are what they say and train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic.fields import FieldInfo

from envs.config.cli import parse
from envs.config.files import text_of
from envs.config.settings import FieldPath, changed, flag_of, has_flag, is_tuple, leaves, takes_code, words_of
from envs.config.sources import PREFIX
from envs.errors import UserError
from tests.paths import ROOT
from tests.recordings import lines_of
from trainer.config.inputs import EnvConfig
from trainer.config.learner import LearnerConfig
from trainer.config.run import LogConfig, RunConfig
from trainer.config.sources import FIXED, RESUME, SOURCES, check_resumable, read_config, write_config
from trainer.run import run

READY = sorted(file.stem for file in SOURCES.ready.glob("*.yaml"))
FIELDS = dict(leaves(RunConfig))
MEGATRON = {("cluster", "backend"): "megatron"}
TOP_K = {("rollout", "top_k"): 20}
#: What else a field needs that no value of its own can have alone, and values that a rule over several fields allows.
NEEDED = {
    "ray_address": {("cluster", "num_learners"): 2},
    **dict.fromkeys(("tp", "pp", "ep", "etp", "cp"), MEGATRON),
    "sp": MEGATRON | {("cluster", "tp"): 2},
    "lora_alpha": {("learner", "lora_rank"): 4},
    "lora_targets": {("learner", "lora_rank"): 4},
    "loss_constant": {("algorithm", "aggregation"): "constant"},
    "best_by": {("evaluation", "eval_every"): 2},
    "stop_at_accuracy": {("evaluation", "eval_every"): 2},
    "patience": {("evaluation", "eval_every"): 2},
    "keep_kv_cache": {("rollout", "max_staleness"): 1},
    "discount": {("algorithm", "advantage"): "turn"},
    "top_p": TOP_K,
    "min_p": TOP_K,
}
VALUES = {
    "curriculum_shares": (0.2, 0.6, 0.2),
    "curriculum_bounds": (0.25, 0.75),
    "dual_clip": 3.0,
    "oversample": 1.5,
    "max_oversample": 4.0,
}


def value_of(path: FieldPath, field: FieldInfo) -> Any:
    """Return a value of a field that is not its default."""
    default, words = field.get_default(), words_of(field.annotation)
    if path[-1] in VALUES:
        return VALUES[path[-1]]
    if takes_code(field):
        return ("my_module:first", "my_module:second") if is_tuple(field) else "my_module:first"
    if words:
        word = next(word for word in reversed(words) if word != default and (word,) != default)
        return (word,) if is_tuple(field) else word
    if is_tuple(field):
        item = get_args(field.annotation)[0]
        return (item("a, b"), item("http://c:1"))
    if isinstance(default, bool):
        return not default
    kinds = get_args(field.annotation) or (field.annotation,)
    if int in kinds:
        return (default or 2) + 1
    if float in kinds:
        return 0.75 * default if default else 0.25
    return Path("some/folder") if Path in kinds else "some: text"


def given(path: FieldPath) -> dict[FieldPath, Any]:
    """Return values of a field and of what it needs."""
    return {**NEEDED.get(path[-1], {}), path: value_of(path, FIELDS[path])}


def nested(settings: dict[FieldPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        section = tree.setdefault(path[0], {}) if len(path) == 2 else tree
        section[path[-1]] = value
    return tree


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def parsed(*argv: str) -> RunConfig:
    return parse(RunConfig, argv, "python -m trainer.run", "Train.", SOURCES)


@pytest.mark.parametrize("path", sorted(FIELDS.keys() - {RESUME}), ids=".".join)
def test_every_field_reads_its_value_from_every_layer(
    path: FieldPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = given(path)
    config = RunConfig.model_validate(nested(settings))
    assert changed(config, RunConfig()).keys() == settings.keys()

    argv: list[str] = []
    extra = tmp_path / "without_flags.yaml"
    without = {place: value for place, value in settings.items() if not has_flag(FIELDS[place])}
    extra.write_text(json.dumps(nested(without), default=str))
    for place, value in settings.items():
        flag = flag_of(place[-1], FIELDS[place])
        if not has_flag(FIELDS[place]):
            argv += ["--config", str(extra)]
        elif isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        else:
            argv += [f"{flag}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    assert parsed(*argv) == config

    file, tree = tmp_path / "config.yaml", json.loads(json.dumps(nested(settings), default=str))
    file.write_text(yaml.safe_dump(tree))
    assert parsed("--config", str(file)) == config
    file.write_text(json.dumps(tree))  # which is YAML too
    assert parsed("--config", str(file)) == config
    assert parsed("--resume", str(tmp_path)) == config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"resume": tmp_path})}
    )

    for place, value in settings.items():
        text = text_of(value) if isinstance(value, tuple) else str(value)
        monkeypatch.setenv(f"TRUETURN_{place[-1].upper()}", text)
    assert parsed() == config


def test_no_two_fields_share_a_flag_and_all_have_a_description() -> None:
    assert len({path[-1] for path in FIELDS}) == len(FIELDS)
    assert all(field.description for field in FIELDS.values())
    assert not {path[-1] for path in FIELDS} & {"config", "print_config"}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_kept_configuration_that_was_cut_is_refused_and_not_filled_with_defaults(
    share: float, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    write_config(RunConfig(seed=7), path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[: int(share * len(lines))]), encoding="utf-8")
    with pytest.raises(UserError, match=r"config.yaml: must be whole, to log.record, got an earlier end"):
        read_config(path)


def test_a_kept_configuration_is_the_printed_one_without_what_it_was_resumed_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(
        env=EnvConfig(registry=(Path("a b.yaml"),), max_turns=2),
        learner=LearnerConfig(lora_rank=4, lora_targets=("q_proj", "0")),
        checkpoint=RunConfig().checkpoint.model_copy(update={"resume": tmp_path}),
    )
    write_config(config, tmp_path / "config.yaml")
    kept = read_config(tmp_path / "config.yaml")
    assert changed(kept, config) == {RESUME: (tmp_path, None)}
    assert parsed("--resume", str(tmp_path)) == config
    with pytest.raises(SystemExit):
        parsed("--resume", str(tmp_path), "--print-config")
    printed = [line.partition("; from")[0] for line in capsys.readouterr().out.splitlines()]
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert [line for line in printed if line not in lines] == [
        f"  # {FIELDS[RESUME].description}",
        f"  resume: {text_of(tmp_path)}  # default: null",
    ]
    assert [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_a_resumed_run_stays_the_run_that_it_was(path: FieldPath) -> None:
    other = RunConfig.model_validate(nested(given(path)))
    needed = NEEDED.get(path[-1], {})
    base = RunConfig.model_validate(nested({place: needed[place] for place in needed.keys() & (MEGATRON | TOP_K)}))
    adapters = {"lora_rank", "lora_alpha", "lora_targets"}
    fixed = {"tools", "seed", "problems_per_step", "group_size", "top_k", "freeze_vision", "out", "name", "backend"}
    fixed |= adapters
    if path[0] in ("env", "data", "model") or path[-1] in fixed:
        with pytest.raises(UserError, match="must stay as in the run, which has"):
            check_resumable(other, base)
    else:
        check_resumable(other, base)


def test_what_must_not_change_is_named_with_both_values_and_where_it_may_stand() -> None:
    with pytest.raises(UserError) as caught:
        check_resumable(RunConfig(steps=80, seed=1), RunConfig())
    assert str(caught.value) == (
        "--seed: must stay as in the run, which has 0, got 1; "
        "leave it out of flags, files and TRUETURN_SEED, or begin a new run"
    )
    with pytest.raises(UserError, match="--max-turns: must stay as in the run, which has nothing, got 2"):
        check_resumable(RunConfig(env=EnvConfig(max_turns=2)), RunConfig())
    assert all(any(path[: len(fixed)] == fixed for path in FIELDS) for fixed in FIXED)


def test_adapter_settings_without_adapters_are_refused_unless_they_are_the_defaults() -> None:
    assert LearnerConfig(lora_alpha=32.0, lora_targets=()) == LearnerConfig()
    with pytest.raises(ValueError, match="needs --lora-rank"):
        LearnerConfig(lora_alpha=8.0)


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(UserError, match="--tracker: must be 'tensorboard' or 'wandb', or module:NAME or"):
        parsed("--tracker", "wanb")
    assert parsed("--tracker", "").log == LogConfig(tracker=())


@pytest.mark.parametrize("name", READY)
def test_a_ready_configuration_prints_and_is_read_back_as_it_was(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["--config", name, "--print-config"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert f"; from {name}\n" in printed
    (tmp_path / "printed.yaml").write_text(printed)
    config = parsed("--config", name)
    assert parsed("--config", str(tmp_path / "printed.yaml")) == config
    assert yaml.safe_load(printed)["optim"]["lr"] == config.optim.lr  # as other readers of YAML see it


@pytest.mark.parametrize("name", [name for name in READY if not name.startswith("megatron-")])  # layers over others
def test_a_ready_configuration_trains_scaled_down(name: str, checkpoint: Path, tmp_path: Path) -> None:
    small = {
        "model": checkpoint, "device": "cpu", "dtype": "float32", "engine": "hf", "num_gpus": 0, "data": "", "steps": 2,
        "train_size": 4, "eval_size": 0, "problems_per_step": 2, "group_size": 2, "max_new_tokens": 24,
        "max_prompt_tokens": 1000, "context_length": 2000, "save_every": 0, "tracker": "", "out": tmp_path,
        "name": "run",
    }  # fmt: skip
    flags = [f"--{field.replace('_', '-')}={value}" for field, value in small.items()]
    assert run(["--config", name, *flags]) == 0
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rollout_train_kl"] < 1e-6 for row in rows)


def test_printing_a_configuration_loads_no_torch() -> None:
    code = (
        "import sys; from trainer.run import run\n"
        "try: run(['--config', 'qwen3-vl-8b-lora', '--print-config'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nFalse\n")


def test_the_starter_configuration_is_what_a_run_does_without_flags() -> None:
    config = parsed("--config", "starter-geo3k")
    assert changed(config, RunConfig()) == {("env", "max_turns"): (None, 3), ("engine", "engine"): ("auto", "hf")}
    assert RunConfig().env.resolve().max_turns == 3


def test_recipes_of_others_have_the_settings_of_their_sources() -> None:
    names = ("slime-geo3k-multi-turn", "slime-geo3k", "rlinf-qwen3-vl-2b-geo3k")
    multi, single, rlinf = (parsed("--config", name) for name in names)
    for config in (multi, single, rlinf):
        assert (config.rollout.problems_per_step, config.rollout.group_size) == (64, 8)
        optim = config.optim
        assert (optim.lr, optim.beta1, optim.beta2, optim.weight_decay) == (1e-6, 0.9, 0.98, 0.1)
        assert (optim.warmup_steps, optim.minibatches, optim.epochs, optim.max_grad_norm) == (0, 1, 1, 1.0)
        assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
        assert config.algorithm.aggregation == "seq-mean-token-mean"
        assert config.env.max_new_tokens == 4096
    assert (multi.env.env, multi.env.max_turns, multi.rollout.temperature) == (("geo3k",), 3, 1.0)
    assert (single.env.env, single.rollout.temperature) == (("geo3k_single",), 0.8)
    assert (rlinf.env.env, rlinf.rollout.temperature) == (("geo3k_single",), 1.0)
    assert [c.algorithm.correction for c in (multi, single, rlinf)] == ["none", "none", "tis"]
    assert rlinf.algorithm.correction_cap == 2.0


def test_the_ready_configurations_are_in_the_package() -> None:
    assert SOURCES.ready.is_relative_to(ROOT / "trainer")
    assert len(READY) == 10


PAGE = (ROOT / "docs" / "configuration.md").read_text()


def test_the_page_on_configuration_names_what_there_is() -> None:
    flags = {flag_of(path[-1], field) for path, field in FIELDS.items()} | {
        "--config",
        "--print-config",
        "--help",
        "--help-all",
    }
    others = {"--beta", "--split", "--logdir"}  # of TRL and of trackers
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= flags | others
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE.split("| name | what")[1], re.MULTILINE)[:6] == [
        "starter-geo3k", "slime-geo3k-multi-turn", "slime-geo3k", "rlinf-qwen3-vl-2b-geo3k", "qwen3-vl-8b-lora",
        "megatron-qwen3-vl-8b",
    ]  # fmt: skip
    variables = set(re.findall(r"TRUETURN_([A-Z_]+)", PAGE)) - {"LRR"}
    assert variables <= {path[-1].upper() for path in FIELDS} and len(variables) > 4


def test_the_example_of_the_page_prints_and_fails_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example, command = re.findall(r"```(?:yaml|console)\n(.*?)```", PAGE, re.DOTALL)[:2]
    Path("mine.yaml").write_text(example)
    line, _, shown = command.partition("\n")
    with pytest.raises(SystemExit):
        run(line.removeprefix("$ python -m trainer.run ").split())
    assert shown.strip(".\n") in capsys.readouterr().out
    for error in re.findall(r"^error: (.*)$", PAGE, re.MULTILINE)[:3]:
        wrong = {"optim.lr:": "optim: {lr: -1}", "lr:": "lr: 1", "optim.lrr:": "optim: {lrr: 1}"}
        Path("mine.yaml").write_text(wrong[error.split()[1]])
        with pytest.raises(UserError) as caught:
            parsed("--config", "mine.yaml")
        assert str(caught.value) == error
