"""How many random cases a test draws: its own number, or a few of them in `make test`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

QUICK = 10
#: Set by `make test`; `make test-all` and pytest by itself draw the full number.
IS_QUICK = os.environ.get("HYPOTHESIS_PROFILE") == "quick"


def examples(count: int, **options: Any) -> settings:
    """Return the settings of a test with so many random cases. No deadline: a busy machine is no bug."""
    return settings(max_examples=min(count, QUICK) if IS_QUICK else count, deadline=None, **options)
