"""Engines, which write the model's turns: one protocol (`agents.engines.base`), one module or folder per engine."""
