"""Reads registry files and returns an `EnvSpec` for each environment id.

An entry names Python objects as "module:ATTRIBUTE". The `load` methods of `EnvSpec` import them::

    my_env:
      entry_point: my_package.my_env          # build_env(sample, args) -> Env; ":build_env" is the default
      description: one line for the list of environments
      dataset: my_package.my_env:MySamples    # optional: (split, size, seed) -> SampleSource, used without --data
      system_prompt: my_package.my_env:PROMPT # optional: a string that precedes every prompt
      max_turns: 3
      isolation: process                      # optional; `EnvSpec` lists every key

Entries come from four places: this package, installed packages (see `plugin_files`), the overlay files of a call, and
Python code of this process (`register`).
A later entry replaces an earlier one with the same id.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from pydantic import ValidationError

from envs.config.settings import takes_references, words_of
from envs.config.text_files import read_text
from envs.config.yaml_loader import load_yaml
from envs.errors import UserError, did_you_mean
from envs.mixture import MixtureEntry, mix, read_shares
from envs.spec import AGENT_KEYS, BRIDGES, REFERENCE_FIX, EnvSpec

#: At the top of a checkout, or inside the package of a wheel.
PACKAGED = next(
    file
    for file in (Path(__file__).with_name("registry.yaml"), Path(__file__).parents[1] / "registry.yaml")
    if file.is_file()
)
ENTRY_POINT_GROUP = "trueturn.envs"

logger = logging.getLogger(__name__)

_REGISTERED: dict[str, EnvSpec] = {}


def load_registry(*overlays: Path) -> dict[str, EnvSpec]:
    """Return all environments by id: packaged, installed, and from the overlay files.

    Example::

        load_registry(Path("registry.yaml"))["my_env"].max_turns      # 3

    Raises:
        UserError: a file is missing or not YAML, or has a broken entry.
    """
    entries = _read_file(PACKAGED)
    for name, file in plugin_files():
        try:
            added = _read_file(file)
            if replaced := sorted(entries.keys() & added.keys()):
                logger.warning("the installed package '%s' replaces the environments %s", name, ", ".join(replaced))
            entries |= added
        except UserError as error:  # a broken installed package must not stop every command
            logger.warning("left out the environments of the installed package '%s': %s", name, error)
    # In the order of the command line: a later file wins.
    for file in overlays:
        entries |= _read_file(file)
    return _with_mixtures(entries | _REGISTERED)


def _with_mixtures(entries: Mapping[str, EnvSpec | MixtureEntry]) -> dict[str, EnvSpec]:
    """Return all entries, once the environments of mixtures are looked up among those of all files."""
    specs = {name: entry for name, entry in entries.items() if isinstance(entry, EnvSpec)}
    mixed = {name: entry for name, entry in entries.items() if isinstance(entry, MixtureEntry)}
    return specs | {
        name: mix(entry.shares, [known(specs, part) for part in entry.shares], name, entry.description)
        for name, entry in mixed.items()
    }


def register(spec: EnvSpec) -> None:
    """Add an environment to the registry of this process; it replaces one of the same id.

    Example: `register(EnvSpec(id="shop", entry_point="shop:ShopEnv", description="Look prices up.", max_turns=3))`.
    """
    _REGISTERED[spec.id] = spec


def plugin_files() -> Iterator[tuple[str, Path]]:
    """Yield name and registry file of every installed package that provides environments.

    Such a package has, in its pyproject.toml, ``[project.entry-points."trueturn.envs"]`` with ``name = "my_package"``,
    and a `registry.yaml` in the folder of `my_package`. The package itself is not imported.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            found = importlib.util.find_spec(point.value)
        except Exception:  # this imports the parent packages, which may raise anything
            found = None
        folders = list(found.submodule_search_locations or ()) if found else []
        if folders:
            yield point.name, Path(folders[0]) / "registry.yaml"
        else:
            logger.warning(
                "entry point '%s' of group %s names no package: %s", point.name, ENTRY_POINT_GROUP, point.value
            )


def get_spec(env_id: str, *overlays: Path) -> EnvSpec:
    """Return the environment of that id.

    Raises:
        UserError: there is no such id, its entry is broken, or a registry file cannot be read.
    """
    return known(load_registry(*overlays), env_id, *overlays)


def known(registry: Mapping[str, EnvSpec], env_id: str, *overlays: Path) -> EnvSpec:
    """Return the environment of that id. Raises `UserError` if there is none, or its entry is broken."""
    if env_id not in registry:
        rule = " or in ".join(["must be in the registry", *map(str, overlays)])
        fix = did_you_mean(env_id, registry)
        if not overlays:
            fix = f"give the file of an entry of your own with --registry; {fix}"
        raise UserError("environment", rule, env_id, fix)
    return registry[env_id]


def get_mixture(env_ids: Sequence[str], *overlays: Path) -> EnvSpec:
    """Return the environment of an id, or the mixture of several, each with a share: "geo3k:0.7", "calculator:0.3".

    Raises:
        UserError: as `get_spec`, and for shares that cannot be read.
    """
    shares = read_shares(env_ids)
    registry = load_registry(*overlays)
    parts = [known(registry, env_id, *overlays) for env_id in shares]
    if len(parts) == 1:
        return parts[0]
    return mix(shares, parts)


def _read_file(file: Path) -> dict[str, EnvSpec | MixtureEntry]:
    """Return the entries of a file."""
    try:
        text = read_text(file, str(file))
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(str(file), "must be a readable registry file", got, "give an existing file") from error
    entries = load_yaml(text, str(file))
    if entries is None:
        return {}
    if not isinstance(entries, dict):
        raise UserError(str(file), "must map environment ids to entries", type(entries).__name__, "write my_env: {...}")
    if entries and not any(isinstance(entry, dict) for entry in entries.values()):  # such as a row of a data set
        name, value = next(iter(entries.items()))
        raise UserError(str(file), "must map environment ids to entries", f"{name}: {value}", "write my_env: {...}")
    return {str(env_id): _entry(file, env_id, entry) for env_id, entry in entries.items()}


def _entry(file: Path, env_id: object, entry: object) -> EnvSpec | MixtureEntry:
    if isinstance(entry, dict) and entry.get("mixture"):
        return MixtureEntry.read(f"{file} entry '{env_id}'", str(env_id), entry)
    return parse_entry(str(file), env_id, entry)


def parse_entry(source: str, env_id: object, entry: object) -> EnvSpec:
    """Return an entry of a registry file, or of other code, as its `source` says. Raises `UserError` if it is wrong."""
    where = f"{source} entry '{env_id}'"
    if not isinstance(env_id, str):
        raise UserError(where, "must have a text as its id", type(env_id).__name__, f'write "{env_id}": in quotes')
    # `origin` and `parts` are ours, and the id stands before the entry.
    keys = sorted(set(EnvSpec.model_fields) - {"id", "origin", "parts"} | BRIDGES.keys() | {"mcp", *AGENT_KEYS})
    if not isinstance(entry, dict):
        raise UserError(where, "must be a mapping", type(entry).__name__, f"give the keys {', '.join(keys)}")
    for key in entry:
        if key not in keys:
            raise UserError(where, "must have known keys only", key, did_you_mean(str(key), keys))
    try:
        return EnvSpec.model_validate({"id": env_id, **entry, "origin": source})
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a rule over several keys
            rule, _, got = first["msg"].removeprefix("Value error, ").partition(", got ")
            raise UserError(where, rule, got, "fix the entry") from error
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise UserError(f"{where} {name}", "is required", "nothing", "add it") from error
        field = f"{where} {name}"
        got = first["input"]
        if first["type"] == "string_pattern_mismatch":
            raise UserError(field, "must name something in a module", got, REFERENCE_FIX) from error
        kind = EnvSpec.model_fields[name].annotation
        # pydantic would list one error for each kind of the union.
        if words := words_of(kind):
            rule = f"must be one of {', '.join(words)}{', or module:NAME' * takes_references(kind)}"
            raise UserError(field, rule, got, did_you_mean(str(got), words)) from error
        rule = first["msg"].replace("Input should be", "must be").replace("a valid tuple", "a list")
        shown = f"the text '{got}'" if isinstance(got, str) else got
        raise UserError(field, rule[:1].lower() + rule[1:], shown, "fix the value") from error
