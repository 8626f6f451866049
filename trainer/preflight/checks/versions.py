"""Compares the installed versions with the supported ranges, and with versions that are known to be broken.

Every row of `KNOWN_BAD` names the source that describes the problem. `RANGES` equals pyproject.toml; a test compares
them.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envs.checks import Status, Verdict, combine, fault, ok, warning
from trainer.setup.servers import FIRST_EXACT, SUPPORTED, release_doubt

#: The supported versions. A later version is untried; an earlier one lacks something that TrueTurn uses, or of SGLang
#: is untried too.
RANGES: Mapping[str, str] = {
    "torch": ">=2.11,<2.14",
    "transformers": ">=5.12,<6",
    "sglang": ">=0.5.15,<0.5.24",
    "ray": ">=2.60",
    "peft": ">=0.15",
}
#: The oldest driver for each CUDA major version:
#: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
LEAST_DRIVER: Mapping[int, int] = {12: 525, 13: 580}


@dataclass(frozen=True)
class Versions:
    """The installed versions. `sglang_requires` lists the requirements in the metadata of the installed sglang.

    Example::

        Versions("3.11.9", {"torch": "2.11.0", "transformers": "5.12.1"}, cuda="13.0", cudnn=91900, driver="580.95.05")
    """

    python: str
    packages: Mapping[str, str]
    cuda: str | None = None
    cudnn: int | None = None
    driver: str | None = None
    is_gpu_usable: bool = False
    sglang_requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Uses:
    """The packages and features that a run uses.

    Example: the starter on a CPU is `Uses(packages=("torch", "transformers"), dtype="float32", model_type="qwen3_vl")`.
    """

    packages: tuple[str, ...] = ("torch", "transformers")
    model_type: str = ""
    has_vision: bool = False
    on_gpu: bool = False
    dtype: str = "float32"


@dataclass(frozen=True)
class KnownBad:
    """Versions of a package that are broken for some uses: what they do wrong, the fix, and a source."""

    package: str
    versions: str
    what: str
    fix: str
    source: str
    status: Status = "fault"
    concerns: Callable[[Versions, Uses], bool] = field(default=lambda versions, uses: True)


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        "sglang",
        f"<{FIRST_EXACT}",
        "decodes the ids of a request with images and tokenises the text again: it may read another stream",
        "install sglang 0.5.15 or later",
        # The setting SGLANG_MM_AVOID_RETOKENIZE is not in the wheel of 0.5.12.post1, and on by default in 0.5.13's.
        "https://github.com/sgl-project/sglang/issues/12383, https://github.com/sgl-project/sglang/pull/26555",
        concerns=lambda versions, uses: uses.has_vision,
    ),
    KnownBad(
        "transformers",
        ">=5.3,<5.5.4",
        "get_rope_index gives images of Qwen2.5-VL wrong positions in time",
        "install transformers 5.12 or later",
        "https://github.com/huggingface/transformers/issues/45325, https://github.com/huggingface/transformers/pull/45330",
        concerns=lambda versions, uses: uses.model_type == "qwen2_5_vl",
    ),
    KnownBad(
        "torch",
        ">=2.9",
        "leaves cuDNN 9.8 to 9.14 out of 3-d convolutions in half precision, for these are broken there: the patch "
        "embedding takes many times the time and memory",
        "pip install 'nvidia-cudnn-cu12>=9.15' (cu13 for CUDA 13)",
        "https://github.com/pytorch/pytorch/issues/166643, https://github.com/pytorch/pytorch/pull/166480",
        status="warning",
        concerns=lambda versions, uses: (
            uses.has_vision and uses.on_gpu and uses.dtype == "bfloat16" and 90800 <= (versions.cudnn or 0) < 91500
        ),
    ),
)


def read_versions() -> Versions:
    """Return the installed versions, without importing the packages."""
    packages: dict[str, str] = {}
    for name in RANGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return Versions(
        python=platform.python_version(),
        packages=packages,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if torch.version.cuda else None,
        driver=read_driver(),
        is_gpu_usable=torch.cuda.is_available(),
        sglang_requires=tuple(requires("sglang") or ()) if "sglang" in packages else (),
    )


def read_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the NVIDIA driver; None if there is none, or it is not visible."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    if found:
        return found[1]
    return None


def check_versions(versions: Versions, uses: Uses) -> Verdict:
    """Return whether everything that a run uses is supported, and not known to be broken."""
    shown = [f"python {versions.python}", *(f"{name} {number}" for name, number in versions.packages.items())]
    if uses.on_gpu:
        shown += [f"CUDA {versions.cuda}"] if versions.cuda else []
        shown += [f"cuDNN {_cudnn(versions.cudnn)}"] if versions.cudnn else []
        shown += [f"driver {versions.driver}"] if versions.driver else []
    used = {name: number for name, number in versions.packages.items() if name in uses.packages}
    found = [verdict for name, number in used.items() for verdict in _one(name, number, versions, uses)]
    if "sglang" in used:
        found += _built_for(versions)
    if uses.on_gpu:
        found.append(_driver(versions))
    return combine([ok(", ".join(shown)), *(verdict for verdict in found if verdict.status != "ok")])


def _one(name: str, number: str, versions: Versions, uses: Uses) -> list[Verdict]:
    """Return the verdicts on one package: known problems and, unless one is a fault, its supported range."""
    known = [
        Verdict(row.status, f"{name} {number} {row.what} ({row.source})", row.fix)
        for row in KNOWN_BAD
        if row.package == name and _fits(number, row.versions) and row.concerns(versions, uses)
    ]
    has_fault = any(verdict.status == "fault" for verdict in known)
    if has_fault:
        return known
    return [*known, _in_range(name, number)]


def _in_range(name: str, number: str) -> Verdict:
    wanted = RANGES[name]
    if _fits(number, wanted):
        return ok("")
    fix = f"pip install '{name}{wanted}'"
    if doubt := release_doubt(number) if name == "sglang" else "":
        return warning(doubt, fix)
    if _fits(number, next(part for part in wanted.split(",") if part.startswith(">="))):
        return warning(f"{name} {number} is untried: {wanted} is supported", fix)
    return fault(f"{name} {number} is too old: {wanted} is supported", fix)


def check_releases(doubts: Iterable[str]) -> list[Verdict]:
    """Return what is not known of the releases of SGLang that servers run."""
    return [warning(doubt, f"serve with SGLang {SUPPORTED}") for doubt in dict.fromkeys(doubts) if doubt]


def _built_for(versions: Versions) -> list[Verdict]:
    """Compare sglang's own requirements with what is installed: its kernels are built for one version of torch.

    https://github.com/sgl-project/sglang/issues/5247, https://github.com/sgl-project/sglang/issues/36462
    """
    found = []
    for text in versions.sglang_requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:  # of an unofficial build
            continue
        installed = versions.packages.get(wanted.name)
        if wanted.name not in ("torch", "transformers") or installed is None or wanted.marker is not None:
            continue
        if not _fits(installed, wanted.specifier):
            asked = f"{wanted.name}{wanted.specifier}"
            what = f"sglang {versions.packages['sglang']} asks for {asked}, {installed} is there"
            fix = f"pip install '{asked}', or the sglang that was built for {installed}"
            if wanted.name == "torch":
                found.append(fault(f"{what}: its kernels are built for one torch and do not load in another", fix))
            else:
                found.append(warning(what, fix))
    return found


def _driver(versions: Versions) -> Verdict:
    major = int((versions.cuda or "0").split(".")[0])
    least = LEAST_DRIVER.get(major)
    if versions.is_gpu_usable or versions.driver is None or least is None:
        return ok("")
    if int(versions.driver.split(".")[0]) >= least:
        return ok("")
    fix = f"update the driver, or install a torch built for an older CUDA than {versions.cuda}"
    return fault(f"driver {versions.driver} is too old for CUDA {versions.cuda}, which needs {least}", fix)


def _fits(number: str, specifier: SpecifierSet | str) -> bool:
    if isinstance(specifier, str):
        specifier = SpecifierSet(specifier)
    return specifier.contains(Version(number).public.partition("+")[0], prereleases=True)


def _cudnn(number: int | None) -> str:
    """Write 91002 as "9.10.2"."""
    return f"{(number or 0) // 10000}.{(number or 0) // 100 % 100}.{(number or 0) % 100}"
