"""The texts that the starter's tokenizer is made from."""

from __future__ import annotations

import json

from PIL import Image

from envs.env import EnvArgs
from envs.geo3k.env import SYSTEM_PROMPT, build_env
from envs.geo3k.zoom import SYSTEM_PROMPT as ZOOM_SYSTEM_PROMPT
from envs.geo3k.zoom import Geo3kZoomEnv
from starter.demonstrations import demonstration_sample
from starter.plans import MAX_TURNS, score_call, written, zoom_call
from starter.textbook.problems import STYLES, problems_of

#: Sentences like those of real geometry problems, so that the tokenizer does not split these into single bytes.
GEOMETRY_ENGLISH = (
    "Find the measure of angle ABC in the figure. Express your answer in degrees.",
    "Find the value of the variable y. Round to the nearest tenth if necessary.",
    "In the figure, m \\angle 1 = 50 and m \\angle 3 = 60. Find m \\angle 8.",
    "Find the perimeter of \\triangle RUW if \\triangle RUW \\sim \\triangle STV, ST = 24 and VS = 12.",
    "Quadrilateral WXYZ is a rectangle. If XZ = 2c and ZY = 6, find WY. Find the length of AB.",
    "Circle O has a radius of 13 inches. The radius is perpendicular to the chord. Find the diameter.",
    "The two polygons are similar. Each pair of lines is parallel. Line l is a tangent of \\odot S.",
    "For the parallelogram, trapezoid, rhombus, square or hexagon, what is the area of the shaded region?",
)
#: What reading lessons and second attempts say besides. The style `overprint` has the names of `plain`.
LESSON_ENGLISH = (
    "Read the numbers. Read the figure.",
    "Step by step. Look again: 47, 65. Compute again. Another way.",
    *(name.replace("_", " ") for style, families in STYLES.items() if style != "overprint" for name in families),
)


def corpus(size: int, seed: int) -> list[str]:
    """Return the texts of demonstrations, and of realistic geometry problems."""
    sources = [problems_of("demonstrations", size, seed, style) for style in ("plain", "textbook")]
    texts: list[str] = [*(GEOMETRY_ENGLISH + LESSON_ENGLISH) * (size // 20)]
    for index in range(size):
        problem = sources[index % len(sources)].problem(index)
        call = written(score_call(problem.answer))
        texts += [problem.question, f"{problem.reasoning} {call}", f"\\boxed{{{problem.answer}}}"]
        sample = demonstration_sample(problem, Image.new("RGB", (1, 1)))
        env = build_env(sample, EnvArgs(MAX_TURNS))
        env.reset()
        zoom = written(zoom_call(100 * (index % 6), 100 * (index // 6 % 6)))
        texts += [SYSTEM_PROMPT, ZOOM_SYSTEM_PROMPT, zoom]
        texts += [json.dumps(tool["function"]) for tool in (*env.tools, *Geo3kZoomEnv(sample).tools)]
        for attempt in (problem.answer, "0", "", problem.answer):
            observation, _, _ = env.step(written(score_call(attempt)))
            texts.append(observation["obs_str"])
    return texts
