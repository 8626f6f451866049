"""An agent of openai-agents, which has a loop of its own: looks at parts of a diagram, then answers."""

import base64
import importlib
import io
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from PIL import Image

# The package that pip installs under this name, not ours: this file runs where ours is not.
theirs: Any = importlib.import_module("agents")

theirs.set_tracing_disabled(True)
task = json.loads(sys.stdin.readline())
system = next((message["content"] for message in task["messages"] if message["role"] == "system"), None)
given = [part for message in task["messages"] if isinstance(message["content"], list) for part in message["content"]]
content = [
    {"type": "input_text", "text": part["text"]}
    if part["type"] == "text"
    else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
    for part in given
]
link = next(part["image_url"]["url"] for part in given if part["type"] == "image_url")
image = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))


@theirs.function_tool
def zoom(left: int, top: int, right: int, bottom: int) -> Any:
    """Show a part of the picture enlarged.

    Args:
        left: left edge, in thousandths of the width
        top: upper edge, in thousandths of the height
        right: right edge, in thousandths of the width
        bottom: lower edge, in thousandths of the height
    """
    width, height = image.size
    box = (left * width // 1000, top * height // 1000, right * width // 1000, bottom * height // 1000)
    file = io.BytesIO()
    image.crop(box).resize(image.size).save(file, "PNG")
    return theirs.ToolOutputImage(image_url=f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")


agent = theirs.Agent(
    name="reader",
    instructions=system,
    tools=[zoom],
    # Of its two clients, that of chat completions leaves the images of tools out.
    model=theirs.OpenAIResponsesModel(model="policy", openai_client=AsyncOpenAI()),
)
# More turns than the entry's limit, at which an episode counts; at its own the runner raises.
print(theirs.Runner.run_sync(agent, [{"role": "user", "content": content}], max_turns=8).final_output)
