"""What a worker process of `algebra` runs: two normalised texts come in, math-verify's verdict goes out.

Not to be called in the program's own process: `prepare` limits its memory, and `compare` may end it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal

# math-verify takes two numbers at the end of a product for a mixed number: (2)(3) is 5 to it, and x2(3) is 5x
_IMPLICIT_PRODUCT = re.compile(r"(?<=\))(?=[\d(])|(?<![_^\d.])(?P<number>\d+(?:\.\d+)?)(?=\()")


def prepare(memory_bytes: int) -> bool:
    """Limit the memory of this process, load math-verify, and tell whether it works."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in (memory_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    # It warns at each call that its time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return is_equal("x+1", "1+x") and not is_equal("x+1", "x+2")


def compare(answer: str, label: str, limit_s: float) -> bool:
    """Return `is_equal` of the texts; the kernel ends this process where that takes more processor time than the limit.

    No handler in Python could: ``9**387420489`` is a single operation.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return is_equal(answer, label)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def is_equal(answer: str, label: str) -> bool:
    r"""Ask math-verify, without any limit; False where it cannot read a text.

    Both are boxed, for a bare ``8\sqrt{2}`` is read as 2. Its removal of units is off, for "ab", "c" and "h" are units
    to it, so that ``5h`` would be ``5``. An inequality may equal an interval: ``x>5``, ``(5,\infty)``.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    normalization = dataclasses.replace(LatexExtractionConfig().normalization_config, units=False)
    box = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization),)
    gold, given = (
        parse(f"\\boxed{{{text}}}", box, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=0)
        for text in (_IMPLICIT_PRODUCT.sub(r"\g<number>\\cdot ", text) for text in (label, answer))
    )
    if not gold or not given or not (_is_defined(gold[0]) and _is_defined(given[0])):
        return False
    return bool(verify(gold, given, timeout_seconds=0, allow_set_relation_comp=True))


def _is_defined(parsed: object) -> bool:
    r"""Tell whether nothing in it is infinite or undefined, save a lone infinity or the end of an interval.

    math-verify compares a difference, and where that is not finite the verdict is chance: ``\pi\sqrt{\infty}`` equals
    every number to it.
    """
    import sympy

    if not isinstance(parsed, sympy.Basic):
        return True
    value = parsed.doit()
    if value.has(sympy.zoo, sympy.nan):
        return False
    infinities = (sympy.oo, -sympy.oo)
    return isinstance(parsed, sympy.Set) or parsed in infinities or not value.has(*infinities)
