"""The packages that each extra brings, and their licences: `python -m tests.packages dist/WHEEL`, with network.

pip resolves each extra for a new environment and installs nothing. An extra that does not resolve is an error; a
licence that is not known to be permissive is named.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.paths import ROOT

#: Licences that ask nothing of the code beside theirs. MPL-2.0 asks for changes to its own files.
PERMISSIVE = re.compile(
    r"apache|bsd|isc|mit\b|mpl-2\.0|mozilla public|psf|public domain|python software foundation|unlicense",
    re.IGNORECASE,
)
COPYLEFT = re.compile("GPL|General Public", re.IGNORECASE)
#: docutils has an Emacs mode under the GPL, which its wheel leaves out. CUDA's libraries may be used, not changed.
EXCEPT = re.compile("docutils|(nvidia|cuda)-.*")


def licence_of(metadata: Mapping[str, Any]) -> str:
    """Return what a package's metadata says of its licence: the expression, classifiers, first line of the text."""
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get("classifier", ()) if line.startswith("License")]
    text = metadata.get("license", "").strip().partition("\n")[0]
    return ", ".join(filter(None, [metadata.get("license_expression", ""), *classifiers, text]))


def is_permissive(metadata: Mapping[str, Any]) -> bool:
    """Return whether a package may be depended on by code under Apache-2.0."""
    licence = licence_of(metadata)
    known = PERMISSIVE.search(licence) is not None and COPYLEFT.search(licence) is None
    return known or EXCEPT.fullmatch(metadata["name"].lower()) is not None


def resolve(wheel: str, extra: str) -> list[dict[str, Any]]:
    """Return the metadata of all packages that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*pip, "--report", str(report), f"{wheel}[{extra}]"], check=True)
        return [package["metadata"] for package in json.loads(report.read_text(encoding="utf-8"))["install"]]


def main(wheel: str) -> int:
    """Resolve every extra; print its packages whose licence is not known to be permissive."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    failed = 0
    for extra in project["optional-dependencies"]:
        try:
            packages = resolve(wheel, extra)
        except subprocess.CalledProcessError:
            print(f"{extra}: does not resolve")
            failed = 1
            continue
        others = [f"{package['name']} ({licence_of(package)})" for package in packages if not is_permissive(package)]
        print(f"{extra}: {len(packages)} packages; licences not known to be permissive: {', '.join(others) or 'none'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
