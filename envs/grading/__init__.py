"""Grading of short mathematical answers: a model's text and a gold label come in, 1.0 or 0.0 goes out.

`extraction` finds the answer in the text, `normal_form` reads it, `arithmetic` settles nearly every pair in
microseconds, `screening` and `algebra` give what is left to math-verify in a process that can be killed, and `graders`
names the rules.
"""

from envs.grading.equality import RELATIVE_TOLERANCE
from envs.grading.extraction import extract_answer, extract_boxed
from envs.grading.graders import (
    GRADERS,
    MAX_CHARS,
    Grader,
    GraderName,
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
    "extract_answer",
    "extract_boxed",
    "get_grader",
    "grade",
    "score_text",
]
