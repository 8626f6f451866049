"""Claims about thinking in an episode: the environment gets what is said, the model learns all that it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agents.engines.scripted import ScriptedEngine
from agents.recording import Recorder, Recording
from agents.recording.manifest import build_manifest
from agents.recording.schema import MANIFEST, TRAIN
from agents.rendering.renderer import Renderer
from agents.replaying.fork import Fork
from agents.replaying.replayer import EnvReplayer, ReplayContext
from agents.replaying.runner import replay
from agents.replaying.stream_replayer import StreamReplayer
from agents.rollout.episode import Episode
from agents.types import EndReason, GenerateRequest, Trajectory
from envs.execution.load import load_env
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.tool_calls.thinking import ThinkingSetting
from tests.agents.rendering.template_cases import renderer_for
from trainer.setup.components import build_episode, sampling_params

SPEC = get_spec("calculator")
SAMPLES = SPEC.load_dataset("train", 1, 0)
SAMPLE = SAMPLES[0]
RIGHT = f"\\boxed{{{SAMPLE.label}}}"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "2 + 3"}}</tool_call>'
OPENED, PLAIN = "chatml_thinking", "starter"


class Letters(ScriptedEngine):
    """Writes each character as tokens of its own, so no tag is one token."""

    def turn(self, number: int, request: GenerateRequest) -> tuple[int, ...]:
        letters = [self.tokenizer(c, add_special_tokens=False)["input_ids"] for c in self.script(number, request)]
        return (*(token for letter in letters for token in letter), request.sampling.stop_ids[-1])


def loop(
    renderer: Renderer,
    texts: Sequence[str],
    thinking: ThinkingSetting = "auto",
    engine: type[ScriptedEngine] = ScriptedEngine,
    max_new_tokens: int = 2048,
) -> Episode:
    spec = EnvSpec.model_validate({**SPEC.model_dump(), "thinking": thinking})
    written = engine(renderer.tokenizer, lambda turn, _: texts[turn])
    return build_episode(written, renderer, spec, len(texts), max_new_tokens, sampling_params(renderer, 1.0))


def played(name: str, *texts: str, thinking: ThinkingSetting = "auto", max_new_tokens: int = 2048) -> Trajectory:
    return play(loop(renderer_for(name), texts, thinking, max_new_tokens=max_new_tokens))


def play(episode: Episode) -> Trajectory:
    build, args = load_env(SPEC), SPEC.args(3)
    return asyncio.run(episode.run(SAMPLE, lambda: build(SAMPLE, args), seed=7))


def outcomes(trajectory: Trajectory) -> list[int]:
    return [len(turn.info.get("tool_calls", ())) for turn in trajectory.turns]


def test_a_call_inside_the_thought_does_not_run_and_one_after_it_does() -> None:
    asked = played(OPENED, f"Shall I {CALL}?</think>{CALL}", f"5.</think>{RIGHT}")
    assert (outcomes(asked), asked.reward, asked.end_reason) == ([1, 0], 1.0, EndReason.COMPLETED)
    kept = played(OPENED, f"Shall I {CALL}?</think>{CALL}", f"5.</think>{RIGHT}", thinking="keep")
    assert outcomes(kept) == [2, 0]


@pytest.mark.parametrize(("thinking", "reward"), [("auto", 0.0), ("keep", 1.0)])
def test_a_box_in_an_unfinished_thought_is_graded_only_if_all_is_kept(thinking: ThinkingSetting, reward: float) -> None:
    ended = played(OPENED, f"It may be {RIGHT}", thinking=thinking)
    assert (ended.reward, ended.end_reason) == (reward, EndReason.COMPLETED)
    cut = played(OPENED, f"It may be {RIGHT}, but let me see once more", thinking=thinking, max_new_tokens=24)
    assert RIGHT in cut.turns[0].text and "</think>" not in cut.turns[0].text
    assert (cut.reward, cut.end_reason) == (reward, EndReason.TOKEN_BUDGET)


def test_a_tag_that_is_split_over_tokens_is_a_tag() -> None:
    renderer = renderer_for(OPENED)
    text = f"Shall I {CALL}?</think>{RIGHT}"
    split, whole = play(loop(renderer, [text], engine=Letters)), played(OPENED, text)
    assert renderer.tokenizer.convert_tokens_to_ids("</think>") in whole.ids_T
    assert renderer.tokenizer.convert_tokens_to_ids("</think>") not in split.ids_T[split.mask_T]
    for trajectory in (split, whole):
        assert (trajectory.turns[0].text, outcomes(trajectory), trajectory.reward) == (text, [0], 1.0)


def test_stream_mask_and_messages_hold_the_thinking_whatever_the_environment_gets() -> None:
    texts = (f"Hm.\n</think>\n\n{CALL}", f"5.\n</think>\n\n{RIGHT}")
    separate, kept = played(OPENED, *texts), played(OPENED, *texts, thinking="keep")
    assert [turn.text for turn in separate.turns] == list(texts)
    assert np.array_equal(separate.ids_T, kept.ids_T) and np.array_equal(separate.mask_T, kept.mask_T)
    assert separate.messages == kept.messages
    written = renderer_for(OPENED).encoder.decode(separate.ids_T[separate.mask_T].tolist())
    assert written == "".join(f"{text}<|im_end|>" for text in texts)


def test_without_a_channel_in_the_template_the_environment_gets_the_turn_as_it_is() -> None:
    text = f"<think>Shall I {CALL}?</think>{CALL}"
    assert outcomes(played(PLAIN, text)) == [2]
    assert outcomes(played(PLAIN, text, thinking="think")) == [1]


def test_a_replay_applies_the_recorded_rule_and_an_old_recording_keeps_all(tmp_path: Path) -> None:
    renderer = renderer_for(OPENED)
    texts = [f"Shall I {CALL}?</think>{CALL}", f"It may be {RIGHT}"]
    for setting in ("auto", "keep"):
        folder, episode = tmp_path / setting, loop(renderer, texts, setting)
        manifest = build_manifest(SPEC, renderer, "m", {TRAIN: episode})
        with Recorder(folder, manifest, renderer.encoder.spell) as recorder:
            recorder.write(play(episode), 1)
        if setting == "keep":  # as recordings were before there was the field
            file = folder / MANIFEST
            assert '"thinking": null' in file.read_text()
            file.write_text(file.read_text().replace(',\n   "thinking": null', ""))
            assert "thinking" not in file.read_text().partition('"ways"')[2]
        recording = Recording.open(folder)
        (recorded,) = recording.episodes()
        assert (recorded.reward, len(recorded.turns[0].info["tool_calls"])) == (
            (0.0, 1) if setting == "auto" else (1.0, 2)
        )
        # The entry of today says otherwise, and has no say.
        other = EnvSpec.model_validate({**SPEC.model_dump(), "thinking": "keep" if setting == "auto" else "think"})
        context = ReplayContext(recording, other)
        for replayer in (EnvReplayer(context), StreamReplayer(context, renderer)):
            summary = asyncio.run(replay(replayer, recording.episodes()))
            assert (summary.num_replayed, summary.differing) == (1, [])
        fork = Fork(recorded, 1, context, renderer, context.way(recorded))
        ends = fork.loop(ScriptedEngine(renderer.tokenizer, lambda turn, _: texts[1]), 1)
        assert [t.reward for t in asyncio.run(fork.play(ends, (7,)))] == [recorded.reward]
