"""SGLang servers as an engine: `client` calls one server, `payloads` are its requests and answers, `adapters` what it
takes beside a checkpoint, `releases` are what releases of SGLang do differently, `servers` keeps the servers running,
`engine` is the engine."""

from agents.engines.sglang.engine import SGLangEngine
from agents.engines.sglang.settings import SGLangSettings

__all__ = ["SGLangEngine", "SGLangSettings"]
