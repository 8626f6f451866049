"""Makes tools of MCP servers (https://modelcontextprotocol.io) the tools of an environment.

One line in a registry file is enough; the problems come from `--data` or the entry's `dataset`::

    clock: {mcp: [uvx mcp-server-time], description: Say what time it is., max_turns: 4}

A server is a command, which every episode starts for itself, or the URL of one that runs. With `shared: true` in
`options`, one process serves all episodes. A server that ends, or whose messages break the limits here, ends the
episode; an error that a server answers with is a tool error, which the model reads.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import functools
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from envs.contract import MAX_IMAGE_PIXELS, EnvFault, HostLost
from envs.env import EnvArgs
from envs.errors import UserError, shortened
from envs.execution.coroutines import loop_of_users
from envs.images import load_image
from envs.tool_env import ToolEnv
from envs.tools import MAX_FAULT_CHARS, Tool, ToolError, fault_line
from envs.types import Sample
from envs.workers.forkserver import kill_with_children

try:
    import anyio
    import mcp
    from jsonschema import SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import extend, validator_for
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp_types import CONNECTION_CLOSED, jsonrpc_message_adapter
    from referencing import Registry
    from referencing.exceptions import Unresolvable
except ImportError as error:
    raise UserError("mcp", "needs the package mcp", str(error), "pip install 'trueturn[mcp]'") from error

R = TypeVar("R")
#: Of one message; a screenshot is one.
MAX_MESSAGE_BYTES = 32 * 2**20
#: Of messages and other lines while a request waits: a flood of them would keep the program from all else.
MAX_LINES = 10_000
MAX_TEXT_CHARS = 200_000
#: Rules with patterns of the server, which the server alone checks: one that backtracks would hold up all threads.
_WITH_PATTERNS = ("pattern", "patternProperties", "additionalProperties", "unevaluatedProperties")
#: Of a server for all episodes; the limit of an episode's reset may be less.
OPENED_WITHIN_S = 60.0
#: So long may a server for all episodes take to list its tools: one that hangs in a call would stop all episodes.
ANSWERED_WITHIN_S = 10.0
KILLED_WITHIN_S = 2.0
LAST_WORDS_BYTES = 2000


class _Connection:
    """A session with a server on the event loop that opened it. A task keeps it until that is cancelled.

    Example::

        connection = _Connection("uvx mcp-server-time")
        await connection.call("get_current_time", {"timezone": "Asia/Tokyo"})
        connection.has_ended            # True once the server has, or has sent what breaks the limits
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.is_remote = server.startswith(("http://", "https://"))
        self.loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._opened: asyncio.Future[mcp.Client] = self.loop.create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._last_words = b""
        self._num_lines = 0
        self._opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())  # nobody may wait
        # Entered and left by one task, as the package demands; calls come from others.
        self._task = self.loop.create_task(self._hold())
        self.loop.call_later(OPENED_WITHIN_S, lambda: self._opened.done() or self._task.cancel())

    @property
    def has_ended(self) -> bool:
        """Whether no call can succeed any more."""
        # A child that holds the pipes open hides the end of its parent from the reader.
        return self._ended.is_set() or (self._process is not None and self._process.returncode is not None)

    @property
    def last_words(self) -> str:
        """What the process wrote last to its errors."""
        return shortened(" ".join(self._last_words.decode(errors="replace").split()), MAX_FAULT_CHARS)

    async def client(self) -> mcp.Client:
        """Return the client, once the session is open."""
        self._num_lines = 0
        return await asyncio.shield(self._opened)

    async def tools(self) -> list[mcp.types.Tool]:
        """Return the server's tools, of all pages."""
        client = await self.client()
        page = await client.list_tools()
        tools = page.tools
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools = [*tools, *page.tools]
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> mcp.types.CallToolResult:
        """Call a tool."""
        client = await self.client()
        return await client.call_tool(name, dict(arguments))

    def end(self) -> None:
        """End the session soon."""
        self._ended.set()

    def kill(self) -> None:
        """Kill the process, if there is one, and those that it started."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            kill_with_children(process.pid)
        else:  # what it left behind is of its process group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _hold(self) -> None:
        transport = self.server if self.is_remote else self._started()
        try:
            async with mcp.Client(transport) as client:
                self._opened.set_result(client)
                await self._ended.wait()
        except (Exception, asyncio.CancelledError) as error:
            if not self._opened.done():
                why = f"{fault_line(_first(error))} {self.last_words}"
                self._opened.set_exception(EnvFault(f"MCP server '{self.server}' did not start: {why}"))
            elif isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._ended.set()

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[Any]:
        """Start the command; yield the streams of its messages, and kill it in the end.

        The package's own transport bounds neither the length of a line nor the number of lines.
        """
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            *shlex.split(self.server),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=MAX_MESSAGE_BYTES,
            env=get_default_environment(),  # no keys of the run
            start_new_session=True,
        )
        send_received, received = anyio.create_memory_object_stream[Any](0)
        sent, receive_sent = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.create_task(self._read(process.stdout, send_received)),
            asyncio.create_task(self._write(receive_sent, process.stdin)),
            asyncio.create_task(self._read_errors(process.stderr)),
        ]
        try:
            yield received, sent
        finally:
            for task in tasks:
                task.cancel()
            self.kill()
            for stream in (send_received, received, sent, receive_sent):
                stream.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILLED_WITHIN_S)

    async def _read(self, stdout: Any, messages: Any) -> None:
        # `messages` closes at the end of the server, so that what waits for an answer learns of it.
        with messages, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while (line := await _line(stdout)) and self._num_lines < MAX_LINES:
                self._num_lines += 1
                with contextlib.suppress(ValueError):  # other servers print there too
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    await messages.send(SessionMessage(message))
            self._ended.set()

    async def _write(self, messages: Any, stdin: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the reader sees the end too
            async for message in messages:
                stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()

    async def _read_errors(self, stderr: Any) -> None:
        while part := await stderr.read(LAST_WORDS_BYTES):
            self._last_words = (self._last_words + part)[-LAST_WORDS_BYTES:]


async def _line(stdout: Any) -> bytes:
    """Return the next line, empty at the end and if a line is too long."""
    try:
        return await stdout.readline()
    except ValueError:
        return b""


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group, in which task groups put them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# Servers for all episodes ---------------------------------------------------------------------------------------------

#: By command, only read and changed on the loop of users.
_SHARED: dict[str, _Connection] = {}


async def _shared(server: str) -> _Connection:
    """Return the connection that all episodes have; a server that has ended or does not answer is started again."""
    if server in _SHARED and not (found := _SHARED[server]).has_ended:
        await found.client()
        try:
            async with asyncio.timeout(ANSWERED_WITHIN_S):
                await found.tools()
        except TimeoutError:
            found.end()
    if server not in _SHARED or _SHARED[server].has_ended:
        _SHARED[server] = _Connection(server)
    return _SHARED[server]


@atexit.register
def _kill_shared() -> None:
    for connection in _SHARED.values():
        connection.kill()


async def _on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, R]) -> R:
    """Await a coroutine on the loop that it belongs to."""
    if loop is asyncio.get_running_loop():
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


# Episodes -------------------------------------------------------------------------------------------------------------


class FromMcp(ToolEnv):
    """One episode with the tools of MCP servers. The entry's grader compares the last text with the sample's label.

    A subclass, named as the entry's `entry_point`, may add tools and rewards of its own.

    Example::

        env = FromMcp(sample, EnvArgs(max_turns=4, options={"servers": ["uvx mcp-server-time"]}))
        env.reset()
        env.tools[0]["function"]["name"]                                      # "get_current_time"
        env.step('<tool_call>{"name": "get_current_time", "arguments": {"timezone": "Asia/Tokyo"}}</tool_call>')
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        super().__init__(sample, args)
        self._servers: Sequence[str] = args.options["servers"]
        self._is_shared = bool(args.options.get("shared"))
        self._own_tools = dict(self._tools)
        self._connections: list[_Connection] = []

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the servers and ask for their tools."""
        super().close()  # the servers of an earlier reset
        self._tools = dict(self._own_tools)
        self._connections = []
        self._run(self._connect())
        return super().reset()

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Run the calls. Raises `EnvFault` if a server has ended, because all later calls would fail too."""
        result = super().step(response_text)
        for connection in self._connections:
            if connection.has_ended and result[2]["tool_calls"]:
                fault = f"MCP server '{connection.server}' has ended, or sent too much. {connection.last_words}"
                if self._is_shared or connection.is_remote:  # nobody knows whose call ended it
                    raise HostLost(fault)
                raise EnvFault(fault, process_ended=True)
        return result

    async def _connect(self) -> None:
        for server in self._servers:
            if self._is_shared:
                connection = await _on(loop_of_users(), _shared(server))
            else:
                connection = _Connection(server)
            self._connections.append(connection)
            for tool in await _on(connection.loop, connection.tools()):
                self._add(connection, tool)

    def _add(self, connection: _Connection, tool: mcp.types.Tool) -> None:
        if tool.name in self._tools:
            raise EnvFault(f"MCP server '{connection.server}': there is already a tool {tool.name!r}")

        async def call(**arguments: Any) -> Any:
            return await _result(connection, tool.name, arguments)

        parameters = {"type": "object", "properties": {}, **tool.input_schema}
        function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
        try:
            arguments = _arguments(tool.name, json.dumps(parameters))
        except SchemaError as error:
            rule = f"the schema of the tool {tool.name!r} is wrong"
            raise EnvFault(f"MCP server '{connection.server}': {rule}: {shortened(error.message, 200)}") from error
        schema = {"type": "function", "function": function}
        self._tools[tool.name] = Tool(tool.name, call, arguments, schema, is_async=True, result=None)


async def _result(connection: _Connection, name: str, arguments: Mapping[str, Any]) -> Any:
    """Call a tool; return its texts and images. Raises `ToolError` for an error of the server."""
    try:
        result = await _on(connection.loop, connection.call(name, arguments))
    except mcp.MCPError as error:
        if error.code == CONNECTION_CLOSED:
            connection.end()
        raise ToolError(shortened(str(error), MAX_TEXT_CHARS)) from error
    parts = [_shown(block) for block in result.content]
    texts = [part for part in parts if isinstance(part, str)]
    if sum(map(len, texts)) > MAX_TEXT_CHARS:
        raise ToolError(f"The result has more than {MAX_TEXT_CHARS} characters.")
    if result.is_error:
        raise ToolError("\n".join(texts) or "The call failed.")
    if not parts and result.structured_content is not None:
        return result.structured_content
    if len(texts) == len(parts):
        return "\n".join(texts)
    return parts


def _shown(block: Any) -> Any:
    """Return a block of a result as the model sees it: its text, its image, or what else it is."""
    if block.type == "text":
        return block.text
    if block.type == "image":
        try:
            return load_image(base64.b64decode(block.data), "the image of the result", max_pixels=MAX_IMAGE_PIXELS)
        except (UserError, ValueError) as error:
            raise ToolError(str(error)) from error
    if block.type == "resource" and hasattr(block.resource, "text"):
        return block.resource.text
    if block.type == "resource_link":
        return str(block.uri)
    return f"({block.type} is not shown)"


# Arguments ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _arguments(name: str, schema_json: str) -> type[BaseModel]:
    """Return the model that checks arguments, each by its part of the schema. Raises `SchemaError` for a wrong one."""
    schema = json.loads(schema_json)
    checker = extend(validator_for(schema), {name: lambda *_: None for name in _WITH_PATTERNS})
    checker.check_schema(schema)
    required = schema.get("required", ())
    fields: dict[str, Any] = {}
    for number, (argument, rule) in enumerate(schema["properties"].items()):
        # What references lead to stands beside the properties.
        whole = {"$defs": schema.get("$defs", {}), "definitions": schema.get("definitions", {}), "allOf": [rule]}
        check = AfterValidator(functools.partial(_checked, checker(whole, registry=Registry())))
        default = ... if argument in required else None
        fields[f"p{number}"] = (Annotated[Any, check], Field(default, alias=argument))
    extra = "allow" if schema.get("additionalProperties") else "forbid"
    return create_model(name, __config__=ConfigDict(extra=extra), **fields)


def _checked(checker: Any, value: Any) -> Any:
    """Return a value that a schema takes. Raises ValueError otherwise; one with a wrong reference takes all."""
    with contextlib.suppress(Unresolvable, RecursionError):
        error = best_match(checker.iter_errors(value))
        if error is not None:
            raise ValueError(shortened(error.message, MAX_FAULT_CHARS))
    return value
