"""Models behind OpenAI-compatible servers play episodes: texts and tool calls in, texts and tool calls out.

There are no token ids, so nothing here trains directly; `demonstrations` turns successes into data for `trainer.sft`.
"""
