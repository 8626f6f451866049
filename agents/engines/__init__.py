"""Engines: one protocol (`agents.engine`), one file per engine."""
