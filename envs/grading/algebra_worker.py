"""The code that `algebra` runs in a worker process: math-verify compares two normalised texts.

Never call it in the program's own process: `prepare` limits its memory, and `compare` may end it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal

# math-verify reads two numbers at the end of a product as a mixed number: (2)(3) as 5, and x2(3) as 5x
_IMPLICIT_PRODUCT = re.compile(r"(?<=\))(?=[\d(])|(?<![_^\d.])(?P<number>\d+(?:\.\d+)?)(?=\()")


def prepare(memory_bytes: int) -> bool:
    """Limit the memory of this process, load math-verify, and return whether it works."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has it
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in (memory_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    # It warns at each call that its time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return is_equal("x+1", "1+x") and not is_equal("x+1", "x+2")


def compare(answer: str, label: str, limit_s: float) -> bool:
    """Return `is_equal` of the texts; the kernel kills this process if it uses more processor time than the limit.

    A Python handler could not interrupt ``9**387420489``, which is a single operation.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return is_equal(answer, label)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def is_equal(answer: str, label: str) -> bool:
    r"""Return math-verify's verdict, without any limit; False if it cannot read a text.

    Both texts are boxed, because it reads a bare ``8\sqrt{2}`` as 2. Its removal of units is off, because it treats
    "ab", "c" and "h" as units and would read ``5h`` as ``5``. An inequality may equal an interval: ``x>5``,
    ``(5,\infty)``.
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
    r"""Return whether no part is infinite or undefined, except a lone infinity or the end of an interval.

    math-verify compares a difference; if that is not finite, the verdict is random: it finds ``\pi\sqrt{\infty}`` equal
    to every number.
    """
    import sympy

    if not isinstance(parsed, sympy.Basic):
        return True
    value = parsed.doit()
    if value.has(sympy.zoo, sympy.nan):
        return False
    infinities = (sympy.oo, -sympy.oo)
    return isinstance(parsed, sympy.Set) or parsed in infinities or not value.has(*infinities)
