"""Claims about entries that mix environments."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from envs.errors import UserError
from envs.execution.load import load_env
from envs.mixture import places
from envs.problems import ProblemsConfig, open_problems
from envs.registry import get_mixture, get_spec

ENTRY = "easy: {mixture: {calculator: 3, guess: 1}}\n"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    file = tmp_path / "registry.yaml"
    file.write_text(ENTRY)
    return file


def test_every_stretch_has_each_environment_by_its_share_to_within_one() -> None:
    shares = {"a": 0.7, "b": 0.2, "c": 0.1}
    found = places(shares, 200)
    for stop in range(1, 201):
        counts = Counter(env_id for env_id, _ in found[:stop])
        assert all(abs(counts[env_id] - share * stop) <= 1 for env_id, share in shares.items())
    for env_id in shares:
        assert [place for name, place in found if name == env_id] == list(
            range(sum(name == env_id for name, _ in found))
        )


def test_an_entry_of_a_file_mixes_the_environments_of_all_files(registry: Path) -> None:
    spec = get_spec("easy", registry)
    assert (spec.max_turns, list(spec.parts), spec.mixture) == (
        6,
        ["calculator", "guess"],
        {"calculator": 3, "guess": 1},
    )
    samples = open_problems(spec, ProblemsConfig(), 8)
    assert Counter(sample.metadata["env"] for sample in samples) == {"calculator": 6, "guess": 2}
    build_env = load_env(spec)
    for sample in samples:
        env = build_env(sample, spec.args())
        assert type(env).__name__ == {"calculator": "CalculatorEnv", "guess": "GuessEnv"}[sample.metadata["env"]]
        assert env.args.max_turns == spec.parts[sample.metadata["env"]].max_turns
    has_system_prompt = {s.metadata["env"]: s.prompt and s.prompt[0]["role"] == "system" for s in samples}
    assert has_system_prompt["calculator"] and not has_system_prompt["guess"]


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("{mixture: {calculator: 1, nothing: 1}}", "must be in the registry, got nothing"),
        ("{mixture: {easy: 1, guess: 1}}", "must be in the registry, got easy"),
        ("{mixture: {calculator: 1, guess: 1}, max_turns: 4}", "max_turns: cannot stand beside mixture, got 4"),
        ("{mixture: [calculator, guess]}", "mixture: must give each environment a share"),
        ("{mixture: {calculator: 0, guess: 1}}", "mixture: must give each environment a share above 0"),
    ],
)
def test_a_wrong_entry_is_named_with_its_rule(registry: Path, entry: str, error: str) -> None:
    registry.write_text(f"{ENTRY}wrong: {entry}\n")
    with pytest.raises(UserError, match=error):
        get_spec("wrong", registry)


def test_one_environment_with_a_share_is_that_environment() -> None:
    assert get_mixture(["geo3k:0.4"]) == get_spec("geo3k")


def test_environments_that_read_texts_differently_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "registry.yaml"
    file.write_text("own: {entry_point: envs.guess:GuessEnv, description: x, max_turns: 2, thinking: keep}")
    with pytest.raises(UserError, match="must mix environments with the same thinking, got auto and keep"):
        get_mixture(["guess", "own"], file)
