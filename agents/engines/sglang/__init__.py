"""SGLang servers as an engine: `client` speaks to one server, `servers` keeps them running, `engine` is the engine."""

from agents.engines.sglang.engine import SGLangEngine, SGLangSettings

__all__ = ["SGLangEngine", "SGLangSettings"]
