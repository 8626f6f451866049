"""Start a new environment: `python -m envs.new my_env` writes its module, registry entry and test."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.console import Console
from envs.errors import UserError
from envs.registry import load_registry

SCAFFOLD = Path(__file__).with_name("scaffold")
MODULE = "my_env.py"
TEST = "test_my_env.py"
REGISTRY = "registry.yaml"


class NewConfig(Section):
    """The options of `python -m envs.new`."""

    name: str = Field(description="name of the environment and its module")
    folder: Path = Field(default=Path(), description="folder to write into")


def write_scaffold(name: str, folder: Path) -> tuple[list[Path], str | None]:
    """Write module, test and registry file; return their paths, and the entry to add if a registry exists already.

    Example::

        write_scaffold("shop", Path("here"))[0]      # [here/shop.py, here/test_shop.py, here/registry.yaml]

    Raises:
        UserError: the name is no valid module name or is taken, or a file exists already.
    """
    _check_spelling(name)
    targets = {folder / MODULE.replace("my_env", name): MODULE, folder / TEST.replace("my_env", name): TEST}
    if found := [str(path) for path in targets if path.exists()]:
        raise UserError("NAME", "must name new files", found[0], "choose another name, or remove the file")
    _check_free(name)
    entry = None
    if (folder / REGISTRY).is_file() and name in load_registry(folder / REGISTRY):
        raise UserError(
            "NAME", f"must not be in {folder / REGISTRY} already", name, "choose another, or remove the entry"
        )
    # It may hold comments and an order of its own, which no YAML writer keeps.
    if (folder / REGISTRY).exists():
        entry = _filled(REGISTRY, name)
    else:
        targets[folder / REGISTRY] = REGISTRY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in targets.items():
            with path.open("x", encoding="utf-8") as file:  # never overwrites a file
                file.write(_filled(template, name))
    except OSError as error:
        raise UserError("--folder", "must be writable", str(folder), f"give another ({error.strerror})") from error
    return list(targets), entry


def _check_spelling(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        fix = "write small letters, digits and _, such as fruit_shop"
        raise UserError("NAME", "must be a module's name", name, fix)


def _check_free(name: str) -> None:
    # Of the prefix: pytest would collect the module itself.
    if name.startswith("test_") or importlib.util.find_spec(name) is not None:
        raise UserError("NAME", "must not hide another module", name, f"choose another, such as {name}_env")
    known = load_registry()
    if name in known:
        raise UserError("NAME", "must not be in the registry already", name, f"known: {', '.join(sorted(known))}")


def _filled(template: str, name: str) -> str:
    text = (SCAFFOLD / template).read_text(encoding="utf-8")
    class_name = "".join(part.capitalize() for part in name.split("_")).removesuffix("Env") + "Env"
    return text.replace("my_env", name).replace("MyEnv", class_name)


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, write the files, print the next commands."""
    config = parse(NewConfig, argv, "python -m envs.new", "Start a new environment.")
    paths, entry = write_scaffold(config.name, config.folder)
    console = Console(soft_wrap=True)
    console.print("\n".join(f"wrote {path}" for path in paths))
    if entry is not None:
        console.print(f"add to {config.folder / REGISTRY}:\n\n{entry}")
    if config.folder.resolve() != Path.cwd():
        console.print(f"next, in {config.folder}:")
    else:
        console.print("next:")
    console.print(f"  python -m envs.check {config.name} --registry {REGISTRY}")
    console.print(f"  python -m pytest {TEST.replace('my_env', config.name)}")
    console.print(f"  python -m agents.play --env {config.name} --registry {REGISTRY}")
    console.print(f"  python -m trainer.run --env {config.name} --registry {REGISTRY} --steps 1")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
