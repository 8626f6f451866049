"""An agent of smolagents: looks at parts of a diagram, then answers. Loop and prompts are those of the package."""

import base64
import io
import json
import os
import sys

from PIL import Image
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

task = json.loads(sys.stdin.readline())
parts = [part for message in task["messages"] if isinstance(message["content"], list) for part in message["content"]]
question = " ".join(part["text"] for part in parts if part["type"] == "text")
links = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
images = [Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))) for link in links]
shown = []


@tool
def zoom(left: int, top: int, right: int, bottom: int) -> str:
    """Show a part of the picture enlarged.

    Args:
        left: left edge, in thousandths of the width
        top: upper edge, in thousandths of the height
        right: right edge, in thousandths of the width
        bottom: lower edge, in thousandths of the height
    """
    width, height = images[0].size
    box = (left * width // 1000, top * height // 1000, right * width // 1000, bottom * height // 1000)
    shown.append(images[0].crop(box).resize(images[0].size))
    return "the part is shown"


def show(step, agent=None):
    """Put what was zoomed into the step's observation, as the package's own example of a browser does."""
    if shown:
        step.observations_images = [shown.pop()]


agent = ToolCallingAgent(
    tools=[zoom],
    model=OpenAIServerModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]),
    max_steps=3,
    step_callbacks=[show],
    verbosity_level=0,
)
print(agent.run(question, images=images))
