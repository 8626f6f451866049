"""What releases of SGLang do differently, as far as TrueTurn uses them.

What `/server_info` says goes in, a `Release` comes out. The sources of 0.5.12 to 0.5.23 were compared: docs/rollouts.md
has a table. A newer release counts as the newest of these. A server that names none, such as a gateway, counts as
0.5.15.post1, on which TrueTurn was measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The first and the last supported release. pyproject.toml has the same range.
OLDEST = (0, 5, 15)
NEWEST = (0, 5, 23)
#: The first release that keeps the ids of a request with images (https://github.com/sgl-project/sglang/pull/26555).
KEEPS_IDS = (0, 5, 13)
#: The first one that takes a copy of an adapter for each of its GPUs, under another name; older ones take one.
TAKES_ADAPTERS_BY_GPU = (0, 5, 17)
#: The first one that names images of Qwen3-VL by their files. `mm_hashes` end its scheduler with a CUDA error, up to
#: 0.5.23 at least (https://github.com/sgl-project/sglang/pull/40225).
NAMES_FILES = (0, 5, 20)
#: The first one that takes tensors in a session only (https://github.com/sgl-project/sglang/pull/28001).
HAS_SESSIONS = (0, 5, 21)

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})[\w.+-]{0,40}")
_FILE_NAMED_MODELS = ("qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True)
class Release:
    """What a server's release of SGLang does with what it is sent.

    Without `keeps_ids` it decodes the ids of a request with images and tokenises the text again. With `names_files`
    it names an encoded image by the bytes of its file, else by `mm_hashes`. With `takes_adapters_by_gpu` an adapter
    comes once for each GPU. With `has_update_sessions` it takes tensors between `begin_weight_update` and
    `end_weight_update` only. `doubt` says what is not known of it.

    Example::

        >>> release = Release.of({"version": "0.5.17"}, "qwen3_vl")
        >>> release.takes_adapters_by_gpu, release.has_update_sessions, release.doubt
        (True, False, '')
    """

    version: str = ""
    keeps_ids: bool = True
    names_files: bool = False
    takes_adapters_by_gpu: bool = False
    has_update_sessions: bool = False
    doubt: str = "the server does not name its release of SGLang: it is treated as 0.5.15.post1"

    @classmethod
    def of(cls, server_info: Mapping[str, Any], model_type: str = "") -> Release:
        """Return the release that a server names, with the type of its model as its configuration names it."""
        match = _VERSION.match(str(server_info.get("version", "")))
        if match is None:
            return UNKNOWN
        number = tuple(map(int, match.groups()))
        if not any(number):  # a build of a checkout may be 0.0.0
            return UNKNOWN
        # Servers with that cache name the images of every model by their files.
        has_file_names = model_type in _FILE_NAMED_MODELS or bool(server_info.get("mm_preprocess_cache_size_mb"))
        return cls(
            version=match[0],
            keeps_ids=number >= KEEPS_IDS,
            names_files=number >= NAMES_FILES and has_file_names,
            takes_adapters_by_gpu=number >= TAKES_ADAPTERS_BY_GPU,
            has_update_sessions=number >= HAS_SESSIONS,
            doubt=_doubt(match[0], number),
        )


#: The release of a server that names none.
UNKNOWN = Release()


def _doubt(version: str, number: tuple[int, ...]) -> str:
    if number < OLDEST:
        return f"SGLang {version} is untried: it is older than {dotted(OLDEST)}, and nothing is known of it"
    if number > NEWEST:
        return f"SGLang {version} is untried: it is treated as {dotted(NEWEST)}, and changes since are not known"
    return ""


def dotted(number: tuple[int, ...]) -> str:
    """Return a version as text.

    >>> dotted((0, 5, 23))
    '0.5.23'
    """
    return ".".join(map(str, number))
