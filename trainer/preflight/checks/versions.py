"""Compares the installed versions with the supported ranges, and SGLang's with what it was built for.

`RANGES` equals pyproject.toml; a test compares them.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envs.checks import Verdict, combine, fault, ok, warning

#: The supported versions. A later version is untried; an earlier one lacks something that TrueTurn uses.
RANGES: Mapping[str, str] = {
    "torch": ">=2.11,<2.14",
    "transformers": ">=5.12,<6",
    "sglang": ">=0.5.15,<0.5.24",
    "ray": ">=2.60",
    "peft": ">=0.15",
}


@dataclass(frozen=True)
class Versions:
    """The installed versions. `sglang_requires` lists the requirements in the metadata of the installed sglang.

    Example::

        Versions("3.11.9", {"torch": "2.11.0", "transformers": "5.12.1"}, cuda="13.0")
    """

    python: str
    packages: Mapping[str, str]
    cuda: str | None = None
    sglang_requires: tuple[str, ...] = ()


def read_versions() -> Versions:
    """Return the installed versions, without importing the packages."""
    packages: dict[str, str] = {}
    for name in RANGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    sglang_requires: tuple[str, ...] = ()
    if "sglang" in packages:
        sglang_requires = tuple(requires("sglang") or ())
    return Versions(platform.python_version(), packages, torch.version.cuda, sglang_requires)


def check_versions(versions: Versions, used: Sequence[str]) -> Verdict:
    """Return whether the packages that a run uses are supported, and SGLang is built for what is installed."""
    shown = [f"python {versions.python}", *(f"{name} {number}" for name, number in versions.packages.items())]
    if versions.cuda:
        shown.append(f"CUDA {versions.cuda}")
    verdicts = [ok(", ".join(shown))]
    verdicts += [_in_range(name, versions.packages[name]) for name in used if name in versions.packages]
    if "sglang" in used:
        verdicts += _built_for(versions)
    return combine(verdict for verdict in verdicts if verdict.found)


def _in_range(name: str, number: str) -> Verdict:
    wanted = SpecifierSet(RANGES[name])
    if _fits(number, wanted):
        return ok("")
    fix = f"pip install '{name}{RANGES[name]}'"
    if _fits(number, SpecifierSet(",".join(str(part) for part in wanted if part.operator == ">="))):
        return warning(f"{name} {number} is untried: {RANGES[name]} is supported", fix)
    return fault(f"{name} {number} is too old: {RANGES[name]} is supported", fix)


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
        # Other packages are pip's business, and a requirement with a marker may be for another platform.
        if wanted.name != "torch" or installed is None or wanted.marker or _fits(installed, wanted.specifier):
            continue
        what = f"sglang {versions.packages['sglang']} asks for {wanted}, {installed} is there"
        fix = f"pip install '{wanted}', or the sglang that was built for {installed}"
        found.append(fault(f"{what}: its kernels are built for one torch and do not load in another", fix))
    return found


def _fits(number: str, specifier: SpecifierSet) -> bool:
    # Without the local part: 2.11.0+cu130 is 2.11.0.
    return specifier.contains(Version(number).public, prereleases=True)
