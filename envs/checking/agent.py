"""Checks an agent, a program with a loop of its own: one episode in which a model says the right answer at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from envs.agent_program import agent_call
from envs.checks import CheckRun, Finding, Verdict, fault, ok, warning
from envs.contract import EnvFault
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner, last_line
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample, message_images


def agent_findings(spec: EnvSpec, samples: Sequence[Sample]) -> list[Finding]:
    """Return what was found about an agent's entry. Raises `UserError` if its program is missing."""
    build = load_env(spec)
    checks = CheckRun()
    checks.run("prompts", lambda: _prompts(samples))

    async def play() -> Verdict:
        sample = samples[0]
        text = f"\\boxed{{{sample.label if sample.label is not None else 7}}}"
        runner = EnvRunner(lambda: build(sample, spec.args()), EnvLimits.of(spec), sample.id)
        with _model(text, spec.max_turns) as (base_url, paths):
            try:
                await runner.open()
                step = await runner.step(agent_call(base_url, "sk-check"))
                result = step.info["result"]
                reward = await runner.reward(result)
            except EnvFault as error:
                return fault(f"sample {sample.id}: {last_line(str(error))} (after {_counted(paths)})", "fix the agent")
            finally:
                await runner.close()
        found = f"sample {sample.id}: {_counted(paths)}, the result {result!r:.80}, reward {reward:g}"
        if not paths:
            return fault(found, "the agent must ask the model at OPENAI_BASE_URL")
        rule = spec.success_rule
        if sample.label is not None and spec.grader != "none" and rule and not rule.holds(reward, [step.info]):
            fix = f"the model always said {text}: print the answer as the last line, or return it"
            return warning(found, fix)
        return ok(found)

    checks.run("one episode", play)
    return checks.findings


def _prompts(samples: Sequence[Sample]) -> str:
    num_images = sum(len(message_images(sample.prompt)) for sample in samples)
    return f"{len(samples)} prompts with {num_images} images"


def _counted(paths: Sequence[str]) -> str:
    return f"{len(paths)} request{'s' * (len(paths) != 1)} of the model"


@contextmanager
def _model(text: str, max_turns: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Serve a model that says the same in each of its turns; yields its URL, and the paths that are asked."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            paths.append(self.path)
            is_stream = bool(asked.get("stream"))
            body = _completion(text, is_stream)
            # As in training, where an agent might go on for ever.
            self.send_response(200 if len(paths) <= max_turns else 400)
            self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", paths
        server.shutdown()


def _completion(text: str, is_stream: bool) -> bytes:
    said = {"role": "assistant", "content": text}
    kind = "chat.completion.chunk" if is_stream else "chat.completion"
    choice = {"index": 0, "delta" if is_stream else "message": said, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body: dict[str, Any] = {"id": "check", "object": kind, "created": 0, "model": "policy", "choices": [choice]}
    if is_stream:
        return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()
    return json.dumps({**body, "usage": usage}).encode()
