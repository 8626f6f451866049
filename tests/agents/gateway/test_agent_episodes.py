"""Claims about episodes of agents: which streams their requests make, and every way such an episode can end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from agents.engines.hf import HFEngine
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.episode import ABORT
from agents.types import Completion, EndReason, GenerateRequest, Trajectory
from envs.config.plugins import give
from tests.agents.gateway.playing import (
    ASK,
    TOOL,
    Ask,
    NotingEngine,
    as_part,
    command,
    loop_of,
    play,
    post,
    said,
    script,
)
from tests.prompts import make_image, sample

CALL = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
USER = {"role": "user", "content": "Hm?"}


def written(trajectory: Trajectory, renderer: Renderer) -> list[list[str]]:
    """Return the turns of each stream, from its ids."""
    return [
        [renderer.decode(s.ids_T[t.start : t.end].tolist()) for t in trajectory.turns if t.stream == place]
        for place, s in enumerate(trajectory.streams)
    ]


def test_requests_that_extend_a_stream_go_on_in_it_and_the_result_is_graded(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> str:
        first = said(ask(task["messages"]))
        return said(ask([*task["messages"], first, USER]))["content"]

    t = play(renderer, agent, "one", "\\boxed{5}")
    assert (t.end_reason, t.reward, t.error, len(t.streams)) == (EndReason.COMPLETED, 1.0, None, 1)
    assert written(t, renderer) == [["one", "\\boxed{5}"]]
    assert t.turns[-1].info == {"result": "\\boxed{5}"}
    assert t.turns[0].observations == (USER,)
    assert [m["role"] for m in t.messages] == ["user", "assistant", "user", "assistant"]
    assert [m["role"] for m in t.opening] == ["user"]


def test_a_bare_result_is_compared_with_the_label(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> int:
        ask(task["messages"])
        return 5

    assert play(renderer, agent).reward == 1.0


def test_an_edited_history_begins_a_stream_and_what_the_model_wrote_is_trained_once(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        first = said(ask(task["messages"]))
        second = said(ask([*task["messages"], first, USER]))
        # Another question in place of the first one, with the model's own answers behind it.
        ask([{"role": "user", "content": "Else?"}, first, USER, second, USER])

    t = play(renderer, agent, "one", "two", "three")
    assert t.end_reason is EndReason.COMPLETED
    assert written(t, renderer) == [["one", "two"], ["three"]]
    assert [turn.stream for turn in t.turns] == [0, 0, 1]
    assert t.streams[1].num_given == 1
    text = renderer.tokenizer.decode(t.streams[1].ids_T[: t.streams[1].prompt_length])
    assert text.count("one") == text.count("two") == 1


def test_two_conversations_side_by_side_keep_a_stream_each(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        one, two = [*task["messages"]], [{"role": "system", "content": "Be brief."}, USER]
        for _ in range(2):
            for conversation in (one, two):
                conversation += [said(ask(conversation)), USER]

    t = play(renderer, agent, "a", "b", "c", "d")
    assert written(t, renderer) == [["a", "c"], ["b", "d"]]
    assert t.num_model_tokens == sum(turn.end - turn.start for turn in t.turns)


def test_the_same_request_again_is_another_stream_unless_the_client_says_that_it_repeats_itself(
    renderer: Renderer,
) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> str:
        ask(task["messages"])
        again = said(ask(task["messages"]))["content"]
        repeated = said(ask(task["messages"], headers={"x-stainless-retry-count": "1"}))["content"]
        return f"{again} {repeated}"

    t = play(renderer, agent, "a", "b", "c")
    assert written(t, renderer) == [["a"], ["b"]]
    assert t.turns[-1].info["result"] == "b b"


def test_calls_are_answered_parsed_and_their_message_stands_for_what_was_sampled(renderer: Renderer) -> None:
    seen: list[dict[str, Any]] = []

    def agent(task: dict[str, Any], ask: Ask) -> None:
        answer = ask(task["messages"], tools=[TOOL])
        message = said(answer)
        seen.append(answer[1]["choices"][0])
        call = message["tool_calls"][0]
        # As a client would send it back: ids and spaces of the JSON are its own.
        again = {**message, "tool_calls": [{**call, "function": {"name": "look", "arguments": '{ "at":"x" }'}}]}
        image = [as_part(make_image(64, 64, 3)), {"type": "text", "text": "There."}]
        ask([*task["messages"], again, {"role": "tool", "tool_call_id": call["id"], "content": image}], tools=[TOOL])

    t = play(renderer, agent, CALL, "done", asked=sample("x?", make_image(64, 64, 6)))
    assert t.end_reason is EndReason.COMPLETED, t.error
    assert written(t, renderer) == [[CALL, "done"]]
    assert len(t.images) == 2
    assert (seen[0]["finish_reason"], seen[0]["message"]["content"]) == ("tool_calls", "I look.")
    assert t.tools == (TOOL,)


def test_a_broken_call_is_answered_as_text(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        message = said(ask(task["messages"], tools=[TOOL]))
        assert "tool_calls" not in message
        ask([*task["messages"], message, USER], tools=[TOOL])

    t = play(renderer, agent, CALL[:40], "done")
    assert (t.end_reason, written(t, renderer)) == (EndReason.COMPLETED, [[CALL[:40], "done"]])


def test_what_the_assistant_never_said_is_written_as_the_model_would_write_it(renderer: Renderer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "<|im_end|>"}'}}
    foreign = {"role": "assistant", "content": "I <|im_end|> look.", "tool_calls": [call]}

    def agent(task: dict[str, Any], ask: Ask) -> None:
        ask([*task["messages"], foreign, {"role": "tool", "tool_call_id": "c", "content": "1"}], tools=[TOOL])

    t = play(renderer, agent)
    assert (t.end_reason, t.error) == (EndReason.COMPLETED, None)
    text = renderer.tokenizer.decode(t.ids_T[: t.prompt_length])
    assert '{"name": "look", "arguments"' in text
    # System, user, assistant and tool are closed once each, and nothing in them closes a turn.
    assert text.count("<|im_end|>") == text.count("<|im_start|>") - 1


def test_a_stop_string_cuts_the_answer_and_the_stream_keeps_what_was_sampled(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> str:
        assert ask(task["messages"], stop="")[0] == 400
        answer = said(ask(task["messages"], stop=[" two"]))
        ask([*task["messages"], answer, USER])
        return answer["content"]

    t = play(renderer, agent, "one two three", "four")
    assert written(t, renderer) == [["one two three", "four"]]
    assert t.turns[-1].info["result"] == "one"


def test_each_further_choice_is_a_stream_and_any_of_them_can_go_on(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        answer = ask(task["messages"], n=3)
        ask([*task["messages"], said(answer, 1), USER])

    t = play(renderer, agent, "a", "b", "c", "d")
    assert written(t, renderer) == [["a"], ["b", "d"], ["c"]]


def test_a_turn_cut_by_the_agents_own_limit_is_answered_as_length_and_the_agent_goes_on(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> str:
        answer = ask(task["messages"], max_tokens=3)
        assert answer[1]["choices"][0]["finish_reason"] == "length"
        return said(ask([*task["messages"], said(answer), USER]))["content"]

    t = play(renderer, agent, "one two three four five", "done")
    assert (t.end_reason, t.turns[0].finish, t.turns[-1].info["result"]) == (EndReason.COMPLETED, "length", "done")
    assert t.turns[0].end - t.turns[0].start == 3


def test_usage_and_logprobs_are_those_of_the_tokens(renderer: Renderer) -> None:
    answers = []

    def agent(task: dict[str, Any], ask: Ask) -> None:
        answers.append(ask(task["messages"], logprobs=True)[1])

    t = play(renderer, agent, "So 5.")
    tokens = answers[0]["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in tokens) == b"So 5.<|im_end|>"
    assert answers[0]["usage"]["prompt_tokens"] == t.prompt_length
    assert answers[0]["usage"]["completion_tokens"] == len(tokens) == t.num_model_tokens


@pytest.mark.parametrize(
    ("limits", "code", "reason"),
    [
        ({"max_turns": 1}, "max_turns", EndReason.MAX_TURNS),
        ({"max_new_tokens": 4}, "token_budget", EndReason.TOKEN_BUDGET),
    ],
)
def test_a_limit_is_a_refusal_with_a_code_and_the_end_reason(
    renderer: Renderer, limits: dict[str, int], code: str, reason: EndReason
) -> None:
    codes = []

    def agent(task: dict[str, Any], ask: Ask) -> int:
        first = said(ask(task["messages"]))
        status, body = ask([*task["messages"], first, USER])
        codes.append((status, body["error"]["code"]))
        return 5

    t = play(renderer, agent, "one two three", limits=limits)
    assert codes == [(400, code)]
    assert (t.end_reason, t.reward) == (reason, 1.0)


def test_an_agent_that_shortens_what_was_too_long_goes_on(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        status, body = ask([{"role": "user", "content": "word " * 5000}])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        said(ask(task["messages"]))

    assert play(renderer, agent).end_reason is EndReason.COMPLETED


def test_an_agent_that_raises_after_a_limit_ends_with_the_limit_and_any_other_with_its_error(
    renderer: Renderer,
) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        said(ask(task["messages"]))
        said(ask([{"role": "user", "content": "Else?"}]))

    limited = play(renderer, agent, limits={"max_turns": 1})
    assert (limited.end_reason, limited.reward) == (EndReason.MAX_TURNS, 0.0)

    def broken(task: dict[str, Any], ask: Ask) -> None:
        ask(task["messages"], temperature=0.3)
        raise KeyError("oh")

    t = play(renderer, broken)
    assert t.end_reason is EndReason.ENV_ERROR
    assert "KeyError" in (t.error or "") and "temperature: must be 1.0, as in the run" in (t.error or "")


def test_an_agent_that_never_asks_is_an_error(renderer: Renderer) -> None:
    t = play(renderer, lambda task, ask: 5)
    assert (t.end_reason, t.error) == (EndReason.ENV_ERROR, "the agent ended without a turn of the model")
    assert t.num_tokens == 0 and len(t.messages) == 1


def test_an_agent_that_asks_what_is_refused_for_ever_is_ended(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        said(ask(task["messages"]))
        while True:
            ask(task["messages"], n=0)

    t = play(renderer, agent)
    assert t.end_reason is EndReason.ENV_ERROR
    assert "100 requests of the agent were refused" in (t.error or "")


def test_a_command_gets_the_task_and_its_last_line_is_the_result(renderer: Renderer, tmp_path: Path) -> None:
    source = f"{ASK}\nprint('I begin')\nprint(ask(task['messages'])['content'])\nprint()\n"
    asked = sample("x?", make_image(64, 64, 6))
    t = play(renderer, command(tmp_path, source), "\\boxed{5}", asked=asked)
    assert (t.end_reason, t.reward, t.error) == (EndReason.COMPLETED, 1.0, None)
    assert t.messages[0]["content"][0]["image"].tobytes() == asked.prompt[0]["content"][0]["image"].tobytes()


@pytest.mark.parametrize(
    ("source", "reason", "error"),
    [
        ("sys.exit('no key')", EndReason.ENV_ERROR, "status 1: no key"),
        (f"{ASK}\nask(task['messages'])\nos.kill(os.getpid(), 9)", EndReason.ENV_ERROR, "status -9"),
        (f"{ASK}\nask(task['messages'])\ntime.sleep(60)", EndReason.ENV_TIMEOUT, "took longer than 1 s"),
        (f"{ASK}\nbytearray(2**30)", EndReason.ENV_ERROR, "MemoryError"),
        (f"{ASK}\nask(task['messages'])\nsys.stdout.write('x' * 10**8)", EndReason.COMPLETED, None),
        (f"{ASK}\nask(task['messages'])\nos.write(1, bytes(range(256)))", EndReason.COMPLETED, None),
    ],
)
def test_a_program_that_breaks_ends_its_episode_alone(
    renderer: Renderer, tmp_path: Path, source: str, reason: EndReason, error: str | None
) -> None:
    limits = {"step_timeout_s": 1.0} if reason is EndReason.ENV_TIMEOUT else {"memory_limit_gib": 0.5}
    t = play(renderer, command(tmp_path, source), **limits)
    assert t.end_reason is reason, t.error
    assert (error or "") in (t.error or "")


def test_what_a_program_has_started_ends_with_it(renderer: Renderer, tmp_path: Path) -> None:
    source = f"{ASK}\nimport subprocess\nask(task['messages'])\nprint(subprocess.Popen(['sleep', '300']).pid)"
    t = play(renderer, command(tmp_path, source))
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(t.turns[-1].info["result"]))
        # Killed; whoever takes over orphans may not have looked yet.
        until = time.monotonic() + 10
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_an_aborted_episode_kills_its_agent(renderer: Renderer, tmp_path: Path) -> None:
    marker = tmp_path / "began"
    source = f"open({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)"
    loop, build, task = loop_of(renderer, command(tmp_path, source))

    async def run() -> Trajectory:
        playing = asyncio.create_task(loop.run(task, build, seed=7))
        while not (marker.exists() and marker.read_text()):
            await asyncio.sleep(0.01)
        playing.cancel(ABORT)
        return await playing

    assert asyncio.run(run()).end_reason is EndReason.ABORTED
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def ask_once(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """An agent that a worker process imports."""
    post(base_url, api_key, {"messages": task["messages"]})
    return "5"


def test_a_function_runs_in_a_process_of_its_own_where_the_entry_says_so(renderer: Renderer) -> None:
    t = play(renderer, f"{__name__}:ask_once", isolation="process")
    assert (t.end_reason, t.reward, t.error) == (EndReason.COMPLETED, 1.0, None)


def test_a_fault_counts_with_the_lowest_reward_where_the_entry_says_so(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        said(ask(task["messages"]))
        raise KeyError("oh")

    t = play(renderer, agent, on_tool_fault="reward_min", reward_min_val=-1.0)
    assert (t.end_reason, t.reward) == (EndReason.TOOL_FAULT, -1.0)


def test_an_agent_that_does_not_ask_holds_no_other_up_for_longer_than_the_engine_waits(
    renderer: Renderer, model: PolicyModel
) -> None:
    ends: list[float] = []

    def asks(task: dict[str, Any], ask: Ask) -> None:
        for _ in range(3):
            said(ask(task["messages"], max_tokens=2))
        ends.append(time.monotonic())

    def sleeps(task: dict[str, Any], ask: Ask) -> None:
        time.sleep(5)
        ends.append(time.monotonic())
        said(ask(task["messages"], max_tokens=2))

    engine = HFEngine(model, max_wait_s=0.1)

    async def both() -> list[Trajectory]:
        loops = [loop_of(renderer, agent, engine=engine) for agent in (sleeps, asks)]
        return await asyncio.gather(*(loop.run(task, build, seed=7) for loop, build, task in loops))

    slow, quick = asyncio.run(both())
    assert slow.end_reason is quick.end_reason is EndReason.COMPLETED
    assert ends == sorted(ends) and ends[1] - ends[0] > 1


def test_an_agent_that_hangs_up_goes_on_and_nobody_is_answered_after_the_end(renderer: Renderer) -> None:
    addresses: list[tuple[str, str]] = []

    def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        addresses.append((base_url, api_key))
        body = json.dumps({"messages": task["messages"]}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {api_key}\r\nContent-Length: {len(body)}\r\n"
        )
        whole = f"{head}\r\n".encode() + body
        for sent in (b"\xff\x00garbage\r\n\r\n", whole[:40], whole[:-9], whole):
            with socket.create_connection(("127.0.0.1", urlsplit(base_url).port or 0)) as connection:
                connection.sendall(sent)
        return said(post(base_url, api_key, {"messages": task["messages"]}))["content"]

    async def play_and_ask_again() -> tuple[Trajectory, int]:
        loop, build, task = loop_of(renderer, give(agent), "one", "two")
        trajectory = await loop.run(task, build, seed=7)
        status, _ = await asyncio.to_thread(post, *addresses[0], {"messages": task.prompt[0]["content"][0]})
        return trajectory, status

    t, status = asyncio.run(play_and_ask_again())
    assert (t.end_reason, t.error, status) == (EndReason.COMPLETED, None, 401)
    # The request that was whole was answered, although nobody waited.
    assert written(t, renderer) in ([["one"], ["two"]], [["one"]])


class BreakingEngine(NotingEngine):
    """Breaks in its second turn: it raises, is aborted, or leaves a log-prob out."""

    def __init__(self, *args: Any, how: str) -> None:
        super().__init__(*args)
        self.how = how

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        if len(self.noted) < 2:
            return completion
        if self.how == "raise":
            raise RuntimeError("the server is gone")
        if self.how == "abort":
            return replace(completion, ids=(), logprobs=(), versions=(), finish="abort")
        return replace(completion, logprobs=completion.logprobs[1:])


@pytest.mark.parametrize(("how", "reason"), [("abort", EndReason.ABORTED), ("logprob", EndReason.INVALID_STREAM)])
def test_a_turn_that_breaks_ends_the_episode_and_its_agent(renderer: Renderer, how: str, reason: EndReason) -> None:
    codes: SimpleQueue[str] = SimpleQueue()

    def agent(task: dict[str, Any], ask: Ask) -> None:
        said(ask(task["messages"]))
        codes.put(ask(task["messages"])[1]["error"]["code"])
        time.sleep(30)

    begun = time.monotonic()
    t = play(renderer, agent, engine=BreakingEngine(renderer.tokenizer, script("one"), how=how))
    assert (t.end_reason, len(t.turns)) == (reason, 2), t.error
    # The agent may read its answer after the end.
    assert codes.get(timeout=10) == "episode_ended"
    assert time.monotonic() - begun < 20


def test_what_an_engine_raises_reaches_the_run(renderer: Renderer) -> None:
    def agent(task: dict[str, Any], ask: Ask) -> None:
        ask(task["messages"])
        ask(task["messages"])

    with pytest.raises(RuntimeError, match="the server is gone"):
        play(renderer, agent, engine=BreakingEngine(renderer.tokenizer, script("one"), how="raise"))


BOX = "docker.io/library/python:3-slim"


def box_program() -> str:
    """Return the program that can run the image here; skip the test where there is none."""
    for program in ("podman", "docker"):
        if not shutil.which(program):
            continue
        tried = subprocess.run([program, "run", "--rm", "--pull=never", BOX, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return program
    pytest.skip(f"needs podman or docker with the image {BOX}")


def containers(program: str) -> str:
    names = [program, "ps", "--all", "--format={{.Names}}"]
    return subprocess.run(names, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_an_agent_in_a_real_container_asks_the_model_and_cannot_leave_its_limits(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = box_program()
    monkeypatch.chdir(tmp_path)
    box: dict[str, Any] = {"sandbox": program, "options": {"image": BOX}, "memory_limit_gib": 0.125}

    def boxed(source: str, **limits: Any) -> Trajectory:
        command(tmp_path, source)
        return play(renderer, "python3 agent.py", "5", **box, **limits)

    t = boxed(f"{ASK}\nprint(ask(task['messages'])['content'])")
    assert (t.end_reason, t.reward, t.error) == (EndReason.COMPLETED, 1.0, None)
    t = boxed(f"{ASK}\nask(task['messages'])\nprint(os.path.exists({str(Path(__file__))!r}))")
    assert t.turns[-1].info["result"] == "False"
    t = boxed(f"{ASK}\nask(task['messages'])\nprint(len(bytearray(2**28)))")
    assert t.end_reason is EndReason.ENV_ERROR and "the agent ended with status 137" in str(t.error)
    t = boxed(f"{ASK}\nask(task['messages'])\ntime.sleep(600)", step_timeout_s=5)
    assert t.end_reason is EndReason.ENV_TIMEOUT
    assert "trueturn-" not in containers(program)


def test_a_sandbox_runs_the_command_in_a_container_that_is_removed_at_the_end(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in: it notes its arguments, and runs what stands behind the image.
    podman = tmp_path / "podman"
    skip = "while [ $# -gt 0 ] && [ $1 != box ]; do shift; done\nshift"
    podman.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{skip}\nexec "$@"\n')
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    agent = command(tmp_path, f"{ASK}\nprint(ask(task['messages'])['content'])")
    t = play(renderer, agent, "5", sandbox="podman", options={"image": "box"}, memory_limit_gib=1)
    assert (t.end_reason, t.reward, t.error) == (EndReason.COMPLETED, 1.0, None)
    run, removal = (tmp_path / "calls").read_text().splitlines()
    assert run.startswith("run --rm --interactive --network=host --name=trueturn-")
    assert "--memory=1073741824" in run and "--env=OPENAI_API_KEY" in run and run.endswith(f"box {agent}")
    assert removal.startswith("rm --force trueturn-")
