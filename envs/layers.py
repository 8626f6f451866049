"""Where a command's settings come from besides its flags: YAML files and environment variables in, settings out.

Later layers win: defaults, the configuration of a folder that is gone on with, `--config` files in their order,
environment variables, flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from envs.config_file import parse_yaml, read_file
from envs.errors import UserError, did_you_mean
from envs.settings import FieldPath, Setting, Settings, is_tuple, leaves


@dataclass(frozen=True)
class Layers:
    """What a command reads besides its flags.

    Args:
        ready: folder of the ready configurations, a NAME.yaml each, for `--config NAME`.
        base: field that names a folder to go on with, whose `config.yaml` is then the lowest layer.
        like: field that names a folder whose `config.yaml` is the lowest layer of something new, where there is one and
            no folder is gone on with.
        own: sections and fields that are not taken from there.
        shared: model of another command; the variables of its fields are passed over where this command has no such
            field, so that what is exported for one command does not stop another.
        prefix: with what the names of environment variables begin.

    Example::

        parse(RunConfig, argv, "python -m trainer.run", "Train.", Layers(Path("configs"), ("checkpoint", "resume")))
    """

    ready: Path
    base: FieldPath = ()
    like: FieldPath = ()
    own: tuple[FieldPath, ...] = ()
    shared: type[BaseModel] | None = None
    prefix: str = "TRUETURN_"

    def find(self, name: str) -> Path:
        """Return the file that a `--config` names: a ready configuration, or the file of that path."""
        known = {file.stem: file for file in sorted(self.ready.glob("*.yaml"))}
        file = known.get(name, Path(name))
        if not file.is_file():
            fix = f"the ready ones are {', '.join(known)}"
            raise UserError("--config", "must be a YAML file or the name of a ready configuration", name, fix)
        return file

    def read_files(self, model: type[BaseModel], names: Sequence[str]) -> Settings:
        """Return what the files of several `--config` give, later ones over earlier ones."""
        settings: Settings = {}
        for name in names:
            settings |= read_file(model, self.find(name), name)
        return settings

    def read_variables(self, model: type[BaseModel], environ: Mapping[str, str]) -> Settings:
        """Return what environment variables give. Raises `UserError` for one that is no field's."""
        fields = {self.prefix + path[-1].upper(): (path, field) for path, field in leaves(model)}
        known = {self.prefix + path[-1].upper() for path, _ in leaves(self.shared or model)} | fields.keys()
        settings: Settings = {}
        for name, text in sorted(environ.items()):
            if name in fields:
                path, field = fields[name]
                settings[path] = Setting(_items(name, text) if is_tuple(field) else text, name)
            elif name.startswith(self.prefix) and name not in known:
                raise UserError(name, "is no setting of this command", f"{name}={text}", did_you_mean(name, known))
        return settings

    def read_base(self, model: type[BaseModel], above: Settings) -> Settings:
        """Return the configuration of the folder that is gone on with, or done like, if the layers above name one."""
        setting = above.get(self.base)
        if setting is None or setting.value in ("", None):
            return self._read_like(model, above.get(self.like))
        file = Path(setting.value) / "config.yaml"
        if not file.is_file():
            rule = f"must be a folder with a {file.name}"
            raise UserError(setting.place, rule, setting.value, "give the folder of a run")
        return read_file(model, file)

    def _read_like(self, model: type[BaseModel], setting: Setting | None) -> Settings:
        """Return what is taken from the configuration of another folder; nothing where it has none."""
        if setting is None or setting.value in ("", None):
            return {}
        file = Path(setting.value) / "config.yaml"
        found = read_file(model, file) if file.is_file() else {}
        return {path: value for path, value in found.items() if not any(path[: len(own)] == own for own in self.own)}


def _items(name: str, text: str) -> list[object]:
    """Return the items of a list that stands in a variable."""
    items = parse_yaml(text, name) or []
    if not isinstance(items, list):
        raise UserError(name, "must be a list", text, f"write {name}='[{text}]'")
    return items
