"""Claims about MCP servers in the registry: their tools are the model's, and no server breaks more than its episode."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.check import check_env
from envs.contract import EnvFault, HostLost, ToolFault
from envs.env import EnvArgs
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner, StepResult
from envs.problems import ProblemsConfig
from envs.registry import get_spec, parse_entry
from envs.spec import EnvLimits
from envs.types import Sample, message_images
from tests.environments import write_rows
from tests.paths import ROOT

COMMAND = shlex.join([sys.executable, str(ROOT / "tests" / "mcp_server.py")])
ENTRY = {"mcp": [COMMAND], "description": "Try a server.", "max_turns": 3}


def test_a_missing_package_is_one_line_with_the_extra() -> None:
    code = "import sys; sys.modules['mcp'] = None; import envs.from_mcp"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip().endswith("pip install 'trueturn[mcp]'")


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"mcp": "a command"}, "mcp must be a list of commands and URLs, got 'a command'"),
        ({"mcp": []}, r"mcp must be a list of commands and URLs, got \[\]"),
        ({"options": {"share": True}}, "options of mcp must be shared: true or false, got {'share': True}"),
        ({"isolation": "inline"}, "mcp needs isolation: thread or process, because servers may hang, got inline"),
    ],
)
def test_a_wrong_entry_is_one_line(entry: dict[str, object], error: str) -> None:
    with pytest.raises(UserError, match=error):
        parse_entry("registry.yaml", "tools", {**ENTRY, **entry})


mcp = pytest.importorskip("mcp")

from envs.from_mcp import FromMcp  # noqa: E402


def args(shared: bool = False, server: str = COMMAND) -> EnvArgs:
    return EnvArgs(max_turns=3, tools_timeout_s=1.0, options={"servers": [server], "shared": shared})


def play(what: str, shared: bool = False) -> StepResult:
    """Play an episode of one call, and close it."""

    async def episode() -> StepResult:
        runner = EnvRunner(lambda: FromMcp(Sample("0", (), "3"), args(shared)), EnvLimits(step_timeout_s=20))
        try:
            await runner.open()
            return await runner.step(f'<tool_call>{{"name": "act", "arguments": {{"what": "{what}"}}}}</tool_call>')
        finally:
            assert await runner.close() is None

    return asyncio.run(episode())


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent."""
    try:
        return "(python" in (stat := Path(f"/proc/{pid}/stat").read_text()) and ") Z" not in stat
    except OSError:
        return False


def test_schemas_are_the_servers_own_and_an_entry_is_one_line() -> None:
    spec = parse_entry("registry.yaml", "tools", ENTRY)
    env = load_env(spec)(Sample("0", (), "3"), spec.args())
    try:
        env.reset()
        (schema,) = env.tools
        assert schema["function"]["name"] == "act"
        assert schema["function"]["parameters"]["$defs"] == {"What": {"type": "string", "maxLength": 20}}
        assert env.reward("\\boxed{3}") == 1.0
    finally:
        env.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("what", "answer", "outcome"),
    [
        ("hello", '{"what": "hello"}', "ok"),
        ("refuse", "not that", "tool_error"),
        ("long text", "The result has more than 200000 characters.", "tool_error"),
        ("not an image", "the image of the result: must be an image of a known format", "tool_error"),
        ("x" * 30, f"\"what\" '{'x' * 30}' is too long. Call", "bad_arguments"),
    ],
)
def test_the_model_reads_results_and_errors(shared: bool, what: str, answer: str, outcome: str) -> None:
    result = play(what, shared)
    assert result.messages[0]["content"].startswith(answer)
    assert result.info["tool_calls"][0]["outcome"] == outcome


def test_images_of_a_result_are_seen() -> None:
    result = play("image")
    (image,) = message_images(result.messages)
    assert image.getpixel((0, 0)) == (255, 0, 0)
    assert result.messages[0]["content"][0] == {"type": "text", "text": "red"}


@pytest.mark.parametrize("what", ["die", "long line", "many lines"])
def test_a_server_that_ends_or_floods_ends_its_episode(what: str) -> None:
    with pytest.raises(ToolFault, match="has ended, or sent too much"):
        play(what)
    # Nobody knows whose call ended the process of all episodes; the next episode has a new one.
    with pytest.raises(HostLost):
        play(what, shared=True)
    assert play("hello", shared=True).info["tool_calls"][0]["outcome"] == "ok"


def test_a_call_that_hangs_is_told_to_the_model_and_costs_other_episodes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envs.from_mcp.ANSWERED_WITHIN_S", 0.5)
    for shared in (False, True):
        assert "TimeoutError" in play("hang", shared).messages[0]["content"]
        assert play("hello", shared).info["tool_calls"][0]["outcome"] == "ok"


def test_processes_end_with_the_episode_or_serve_all() -> None:
    child, server = (int(play(what).messages[0]["content"]) for what in ("child", "pid"))
    deadline = time.monotonic() + 5
    while (is_running(child) or is_running(server)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    assert not is_running(server)
    first = play("pid", shared=True).messages
    assert is_running(int(first[0]["content"]))
    assert play("pid", shared=True).messages == first


ADDS = """
import socket, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("adds")
@server.tool()
def add(a: int, b: int) -> int: return a + b
with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
print(f"http://127.0.0.1:{port}/mcp", flush=True)
server.run(transport="streamable-http", host="127.0.0.1", port=port)
"""


def test_a_server_of_a_url_is_asked_and_one_that_has_gone_drops_the_episode() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", ADDS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    env = FromMcp(Sample("0", (), "3"), args(server=server.stdout.readline().strip()))
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    try:
        for _ in range(100):  # until it listens
            with contextlib.suppress(EnvFault):
                env.reset()
                break
            time.sleep(0.1)
        assert env.step(call)[0]["obs_str"] == "3"
        server.kill()
        with pytest.raises(HostLost):
            env.step(call)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        env.close()


def test_a_server_that_does_not_start_says_why() -> None:
    server = shlex.join([sys.executable, "-c", "import no_such_module"])
    env = FromMcp(Sample("0", (), "3"), args(server=server))
    with pytest.raises(EnvFault, match=r"did not start: .*No module named 'no_such_module'"):
        env.reset()
    env.close()


def test_keys_of_the_run_do_not_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    assert "SECRET_KEY" not in play("variables").messages[0]["content"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_check_of_environments_passes(isolation: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", *({"problem": f"Say {n}.", "answer": str(n)} for n in range(2)))
    registry = tmp_path / "registry.yaml"
    registry.write_text(f"tools: {{mcp: ['{COMMAND}'], description: Try., max_turns: 3, isolation: {isolation}}}")
    findings = check_env(get_spec("tools", registry), ProblemsConfig(data=data), num_samples=2, max_seconds=60)
    assert [finding for finding in findings if finding.passed is False] == []
