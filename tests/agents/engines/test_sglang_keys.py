"""The key of the servers goes to them alone: to no other host, no file, no log and no list of processes."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agents.engines.sglang import SGLangSettings
from agents.engines.sglang.client import ask
from agents.engines.sglang.process import LocalProcess
from agents.engines.sglang.settings import ServerPlace
from agents.engines.weight_servers import ServerLost, ServerRefused
from tests.paths import ROOT

KEY = "0123456789abcdef" * 4
#: Reads its key as SGLang does, and logs its arguments as SGLang does; then says what else it sees.
LOGS_ITS_ARGUMENTS = r"""
import sys, time, yaml
from pathlib import Path
given = Path(sys.argv[sys.argv.index("--config") + 1])
assert given.suffix == ".yaml" and given.exists()
with open(given) as file:
    key = yaml.safe_load(file)["api-key"]
print(f"server_args=ServerArgs(api_key='{key}', port=1)", len(key), flush=True)
arguments = any(key in word for word in sys.argv)
print("again:", given.read_text() == "", "arguments:", arguments, file=sys.stderr, flush=True)
"""


def started(code: str, folder: Path, *arguments: str, api_key: str = KEY) -> LocalProcess:
    given = SGLangSettings(
        command=(sys.executable, "-c", code), arguments=arguments, log_folder=folder / "logs", api_key=api_key
    )
    return LocalProcess(given.with_key(), 0, ServerPlace(30000))


def log_of(process: LocalProcess) -> str:
    process.popen.wait(30)
    process.log()
    return process.log_path.read_text()


def test_a_server_reads_its_key_from_a_pipe_and_its_log_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = started(LOGS_ITS_ARGUMENTS, tmp_path)
    log = log_of(process)
    assert "server_args=ServerArgs(api_key='(key)', port=1) 64\n" in log
    assert "again: True arguments: False" in log and KEY not in log and KEY not in process.log()
    assert not any(KEY in path.read_text() for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    process.stop()
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".yaml"]


def test_a_killed_run_leaves_no_file_with_the_key(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.agents.engines.test_sglang_keys import started\n"
        f"started('import time; time.sleep(60)', Path({str(tmp_path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=False
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path.name for path in files] == ["sglang-0.log"] and KEY not in files[0].read_text()
    assert all(path.readlink().parent == Path("/dev/fd") for path in tmp_path.glob("*.yaml")), "to a pipe that is gone"


def test_a_key_that_the_user_puts_into_the_arguments_is_not_logged_either(tmp_path: Path) -> None:
    log = log_of(started("import sys; print(sys.argv)", tmp_path, f"--api-key={KEY}", api_key=""))
    assert log.count("--api-key=(key)") == 2 and KEY not in log


def test_the_log_has_every_line_that_the_server_printed_to_its_end_and_a_long_one_does_not_stop_it(
    tmp_path: Path,
) -> None:
    code = "import sys; print('x' * 3_000_000); print('y' * 100); sys.stderr.write('no line break')"
    log = log_of(started(code, tmp_path))
    assert log.count("x") >= 3_000_000 and "\n" + "y" * 100 + "\n" in log and log.endswith("no line break")


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Sends everyone to another host."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", self.server.elsewhere)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_key_does_not_follow_a_redirect_to_another_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, http.server.HTTPServer(("127.0.0.1", 0), Redirecting) as own:
        own.elsewhere = f"http://localhost:{other.getsockname()[1]}/model_info"  # type: ignore[attr-defined]
        threading.Thread(target=own.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(ServerRefused, match="status 302"):
            ask(f"http://127.0.0.1:{own.server_port}", "model_info", KEY)
        own.shutdown()
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


def test_all_calls_with_a_key_go_through_the_client_that_follows_no_redirect() -> None:
    client = "agents/engines/sglang/client.py"
    keyless = "envs/from_openenv.py"  # reads a schema, and has no key to send
    for package in ("envs", "agents", "trainer", "trueturn"):
        for path in (ROOT / package).rglob("*.py"):
            found = re.findall(
                r"urlopen|build_opener|urllib\.request|import (?:requests|httpx)\b(?!\.utils)",
                path.read_text(encoding="utf-8"),
            )
            assert not found or path.relative_to(ROOT).as_posix() in (client, keyless), path
    calls = re.findall(r"_http\.request\((.*?)\) as", (ROOT / client).read_text(encoding="utf-8"), re.DOTALL)
    assert calls and all("allow_redirects=False" in call for call in calls)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"])
def test_a_server_that_answers_a_byte_now_and_then_is_given_up_in_time(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(head)
                for byte in b"HTTP/1.1 200 OK, and a header without end ":
                    connection.sendall(bytes([byte]))
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(ServerLost, match="TimeoutError"):
            ask(f"http://127.0.0.1:{server.getsockname()[1]}", "model_info", "", timeout_s=0.5)
        assert time.monotonic() - began < 2
