"""Claims about flags of other trainers: each is answered with the flag of ours that does the same."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from envs.config.cli import parse
from envs.config.settings import leaves
from envs.config.sources import Sources
from envs.errors import UserError
from trainer.config.evaluation import SOURCES as EVALUATE_SOURCES
from trainer.config.evaluation import EvaluateConfig
from trainer.config.other_trainers import no_counterpart, other_names
from trainer.config.run import RunConfig
from trainer.config.sft import SftConfig
from trainer.config.sources import SOURCES
from trainer.sft.__main__ import SOURCES as SFT_SOURCES

PAIRS = [(trainer, name, own) for trainer, names in other_names().items() for name, own in names.items()]


def error_of(*argv: str, model: type[BaseModel] = RunConfig, sources: Sources = SOURCES) -> str:
    with pytest.raises(UserError) as caught:
        parse(model, argv, "prog", "", sources)
    return str(caught.value)


def test_every_name_stands_for_a_setting_of_a_run_and_one_that_is_ours_too_for_itself() -> None:
    fields = {path[-1] for path, _ in leaves(RunConfig)}
    assert {own for _, _, own in PAIRS} <= fields
    assert {(name, own) for _, name, own in PAIRS if name in fields and name != own} == set()


def test_the_names_of_trl_are_names_of_the_installed_trl() -> None:
    files = {"trl": ("trainer/grpo_config.py", "trainer/model_config.py", "scripts/utils.py")}
    files["transformers"] = ("training_args.py",)
    text = ""
    for package, names in files.items():
        if (spec := importlib.util.find_spec(package)) is None or spec.origin is None:
            pytest.skip(f"needs {package}")
        text += "".join((Path(spec.origin).parent / name).read_text(encoding="utf-8") for name in names)
    known = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))
    assert other_names()["TRL"].keys() - known == set()


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (("--beta", "0.04"), "--beta of TRL is --kl-coef here: weight of the KL"),
        (("--num-generations", "8"), "--num-generations of TRL is --group-size here: episodes per problem"),
        (("--learning_rate=1e-6",), "--learning_rate of TRL is --lr here: learning rate"),
        (("--actor-lr", "1e-6"), "--actor-lr of other trainers is --lr here"),
        (("--eps-clip", "0.2"), "--eps-clip of slime and OpenRLHF is --clip-low here"),
        (("--tensor-model-parallel-size=2",), "--tensor-model-parallel-size of slime is --tp here: learner ranks"),
        (("--vllm",), "--vllm of other trainers is --engine here"),
        (("actor_rollout_ref.actor.optim.lr=1e-6",), "actor_rollout_ref.actor.optim.lr of verl is --lr here"),
        (("+trainer.total_training_steps=9",), "+trainer.total_training_steps of verl is --steps here"),
        (("algorithm.group_size=8",), "algorithm.group_size of RLinf is --group-size here"),
    ],
)
def test_a_flag_of_another_trainer_is_answered_with_ours(argv: tuple[str, ...], fix: str) -> None:
    assert f"is no flag of this command, got {argv[0]}; {fix}" in error_of(*argv)


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (("--logging-steps=5",), "--logging-steps has no counterpart here: every step is logged"),
        (("--ref-load=x",), "--ref-load has no counterpart here: the reference of --kl-coef is the --model"),
        (("algorithm.gamma=1",), "algorithm.gamma has no counterpart here: there is no critic"),
        (("--zero-stage=3",), "--zero-stage has no counterpart here: FSDP2 shards all weights over the --num-gpus"),
    ],
)
def test_a_flag_without_a_counterpart_is_answered_with_what_is_so_instead(argv: tuple[str, ...], fix: str) -> None:
    assert fix in error_of(*argv)


def test_no_name_both_has_a_counterpart_and_has_none() -> None:
    assert not no_counterpart().keys() & {name for names in other_names().values() for name in names}


def test_a_variable_named_as_in_another_trainer_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUETURN_LEARNING_RATE", "1e-6")
    assert error_of().endswith("LEARNING_RATE of TRL is --lr here: learning rate")


def test_a_command_names_only_flags_that_it_has() -> None:
    assert "is --lr here" in error_of("--learning-rate", "1", model=SftConfig, sources=SFT_SOURCES)
    assert "is --max-new-tokens here" in error_of(
        "--max-completion-length", "9", model=EvaluateConfig, sources=EVALUATE_SOURCES
    )
    assert "kl-coef" not in error_of("--beta", "1", model=EvaluateConfig, sources=EVALUATE_SOURCES)


def test_an_unknown_flag_gets_no_long_list_and_no_name_that_only_shares_its_dashes() -> None:
    assert error_of("--zzz").endswith("got --zzz; --help lists all flags")
    assert "did you mean" not in error_of("--qq-w")
