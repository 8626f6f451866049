"""An MCP server without any package, started by tests: `python mcp_server.py`. Its tool `act` does what it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

#: A red pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
TOOL = {
    "name": "act",
    "description": "Do something.",
    "inputSchema": {
        "type": "object",
        "properties": {"what": {"$ref": "#/$defs/What"}, "times": {"type": "integer", "minimum": 1, "default": 1}},
        "required": ["what"],
        "$defs": {"What": {"type": "string", "maxLength": 20}},
    },
}


def result(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call."""
    match arguments["what"]:
        case "pid":
            text = str(os.getpid())
        case "variables":
            text = " ".join(os.environ)
        case "image":
            image = {"type": "image", "data": PNG, "mimeType": "image/png"}
            return {"content": [{"type": "text", "text": "red"}, image]}
        case "not an image":
            return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}
        case "refuse":
            return {"content": [{"type": "text", "text": "not that"}], "isError": True}
        case "die":
            sys.exit("I am gone")
        case "hang":
            time.sleep(600)
        case "long line":
            while True:
                sys.stdout.write("x" * 2**20)
        case "many lines":
            while True:
                print("not JSON")
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            text = str(child.pid)
        case "long text":
            text = "x" * 300_000
        case _:
            text = json.dumps(arguments)
    return {"content": [{"type": "text", "text": text}]}


def main() -> None:
    """Answer the requests of the protocol that a client needs for tools."""
    print("A banner, which is no message.", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                answer = {
                    "protocolVersion": request["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "test", "version": "1"},
                }
            case "tools/list":
                answer = {"tools": [TOOL]}
            case "tools/call":
                answer = result(request["params"].get("arguments", {}))
            case _:
                answer = None
        if "id" not in request:
            continue
        error = {"code": -32601, "message": "unknown method"}
        answered = {"error": error} if answer is None else {"result": answer}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answered}), flush=True)


if __name__ == "__main__":
    main()
