"""Grades short mathematical answers: 1.0 if the answer in a model's text equals the gold label, else 0.0.

`extraction` finds the answer in the text, `normal_form` parses it, and `arithmetic` decides nearly every pair in
microseconds. `screening` and `algebra` pass the rest to math-verify in a process that can be killed. `graders` names
the rules.
"""

from envs.grading.equality import RELATIVE_TOLERANCE
from envs.grading.extraction import extract_answer, extract_boxed
from envs.grading.graders import (
    GRADERS,
    MAX_CHARS,
    Grader,
    GraderName,
    GraderReference,
    get_grader,
    grade,
    score_text,
)

__all__ = [
    "GRADERS",
    "MAX_CHARS",
    "RELATIVE_TOLERANCE",
    "Grader",
    "GraderName",
    "GraderReference",
    "extract_answer",
    "extract_boxed",
    "get_grader",
    "grade",
    "score_text",
]
