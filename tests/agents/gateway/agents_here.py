"""Agents of tests: their loops are functions, run as a user's would be."""

from __future__ import annotations

from typing import Any

from openai import OpenAI


def one_question(task: dict[str, Any], base_url: str, api_key: str) -> str:
    client = OpenAI(base_url=base_url, api_key=api_key)
    answer = client.chat.completions.create(model="policy", messages=task["messages"])
    return answer.choices[0].message.content or ""
