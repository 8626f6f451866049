"""The sources of a command's settings besides its flags: YAML files and environment variables.

Later sources override earlier ones: defaults, the configuration of a run folder to resume, `--config` files in their
order, variables of another program, environment variables, flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from envs.config.files import parse_yaml, read_file
from envs.config.settings import (
    FieldPath,
    Setting,
    Settings,
    flag_of,
    has_flag,
    is_tuple,
    is_under,
    leaves,
    takes_one,
    takes_references,
    words_of,
)
from envs.errors import UserError, did_you_mean

#: How the names of environment variables begin.
PREFIX = "TRUETURN_"


@dataclass(frozen=True)
class Sources:
    """What a command reads besides its flags.

    Args:
        ready: folder of the ready configurations, a NAME.yaml each, for `--config NAME`.
        resume: field that names a run folder to resume; its `config.yaml` is then the lowest layer.
        inherit: field that names a run folder, perhaps a stranger's, from which a new run inherits settings: without a
            run to resume, its `config.yaml` is the lowest layer, if it has one.
        inherited: sections and fields that `inherit` takes; it leaves out all others.
        shared: model of another command. Environment variables of its fields are ignored where this command has no such
            field, so a variable that is exported for one command does not stop another.
        other_names: what other programs call the fields, such as `{"TRL": {"beta": "kl_coef"}}`, to answer a flag or
            variable of theirs.
        no_counterpart: settings of other programs that no field stands for, with what is so instead.
        secrets: variables that are no settings, because their values must not be written; other code reads them.

    Example::

        parse(RunConfig, argv, "python -m trainer.run", "Train.", Sources(Path("configs"), ("checkpoint", "resume")))
    """

    ready: Path
    resume: FieldPath = ()
    inherit: FieldPath = ()
    inherited: tuple[FieldPath, ...] = ()
    shared: type[BaseModel] | None = None
    other_names: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    no_counterpart: Callable[[], Mapping[str, str]] = dict
    secrets: tuple[str, ...] = ()

    def find(self, name: str) -> Path:
        """Return the file that `--config` names: a ready configuration, or a path."""
        # A ready name wins over a file of that name in the working directory.
        known = {file.stem: file for file in sorted(self.ready.glob("*.yaml"))}
        file = known.get(name, Path(name))
        if not file.is_file():
            fix = f"the ready ones are {', '.join(known)}"
            raise UserError("--config", "must be a YAML file or the name of a ready configuration", name, fix)
        return file

    def read_files(self, model: type[BaseModel], names: Sequence[str]) -> Settings:
        """Return the settings of all `--config` files; later files override earlier ones."""
        settings: Settings = {}
        for name in names:
            settings |= read_file(model, self.find(name), name)
        return settings

    def read_variables(self, model: type[BaseModel], environ: Mapping[str, str]) -> Settings:
        """Return the settings of the environment variables. Raises `UserError` for a variable that no field has."""
        fields = {PREFIX + path[-1].upper(): (path, field) for path, field in leaves(model)}
        others = {PREFIX + path[-1].upper() for path, _ in leaves(self.shared or model)}
        # An exported variable of a command must not stop the commands that lack its setting.
        known = others | fields.keys() | {*self.secrets}
        settings: Settings = {}
        for name, text in sorted(environ.items()):
            if name in fields:
                path, field = fields[name]
                value = _items(name, text, takes_one(field)) if is_tuple(field) else text
                settings[path] = Setting(value, name)
            elif name.startswith(PREFIX) and name not in known:
                fix = self.translated(model, name.removeprefix(PREFIX)) or did_you_mean(name, known)
                raise UserError(name, "is no setting of this command", f"{name}={text}", fix)
        return settings

    def translated(self, model: type[BaseModel], flag: str) -> str:
        """Return how to give what an unknown flag stands for: a setting without a flag, or one of another program.

        Empty if it stands for nothing that `model` has.

        Example: "--beta of TRL is --kl-coef here: weight of the KL to the reference network in the loss".
        """
        name = flag.lstrip("-+~").replace("-", "_").lower()
        fields = {path[-1]: (path, field) for path, field in leaves(model)}
        for own in (name, name.removeprefix("no_")):
            if own in fields and not has_flag(fields[own][1]):
                return f"it has no flag: {in_file(fields[own][0])}, or set {PREFIX}{own.upper()}"
        programs = self.other_names()
        for own in dict.fromkeys(names[name] for names in programs.values() if name in names):
            if own in fields:
                users = " and ".join(user for user, names in programs.items() if names.get(name) == own)
                path, field = fields[own]
                place = flag_of(own, field) if has_flag(field) else f"{'.'.join(path)} of a --config file"
                return f"{flag} of {users} is {place} here: {field.description}"
        reason = self.no_counterpart().get(name.rpartition(".")[2])
        return f"{flag} has no counterpart here: {reason}" if reason else ""

    def read_base(self, model: type[BaseModel], above: Settings) -> Settings:
        """Return the settings of the run folder to resume or to inherit from, if the layers above name one."""
        if (setting := above.get(self.resume)) and setting.value:
            file = Path(setting.value) / "config.yaml"
            if not file.is_file():
                rule = f"must be a folder with a {file.name}"
                raise UserError(setting.place, rule, setting.value, "give the folder of a run")
            return self._of_run(model, file, setting)
        if (setting := above.get(self.inherit)) and setting.value:
            file = Path(setting.value) / "config.yaml"
            if file.is_file():
                found = self._of_run(model, file, setting)
            else:
                found = {}
            # What the new run says itself is no inheritance, and is not judged as a stranger's.
            taken = {p: value for p, value in found.items() if is_under(p, self.inherited) and p not in above}
            return self._without_code(model, taken)
        return {}

    @staticmethod
    def _of_run(model: type[BaseModel], file: Path, named: Setting) -> Settings:
        """Return the settings of a run's file. Raises `UserError` where they are those of another command."""
        try:
            return read_file(model, file)
        except UserError as error:
            raise UserError(named.place, "must be a run of this command", named.value, str(error)) from error

    @staticmethod
    def _without_code(model: type[BaseModel], found: Settings) -> Settings:
        """Return inherited settings. Raises `UserError` where one names code: it may be a stranger's."""
        fields = dict(leaves(model))
        for path, setting in found.items():
            kind = fields[path].annotation
            # One of our own words, such as grpo, names no code of a stranger.
            if setting.value and takes_references(kind) and setting.value not in words_of(kind):
                flag = flag_of(path[-1], fields[path])
                rule = "names code, which is not run because a recording says so"
                raise UserError(setting.place, rule, setting.value, f"give {flag} yourself")
        return found


def in_file(path: FieldPath) -> str:
    """Return how to give a setting in a file.

    >>> in_file(("rollout", "resample"))
    'write rollout: {resample: ...} into a --config file'
    """
    *sections, name = path
    opened = "".join(f"{section}: {{" for section in sections)
    return f"write {opened}{name}: ...{'}' * len(sections)} into a --config file"


def _items(name: str, text: str, takes_one: bool) -> list[object]:
    """Return the items of the list in a variable, of which the only one may stand without brackets."""
    items = parse_yaml(text, name) or []
    if isinstance(items, str) and takes_one:
        return [items]
    if not isinstance(items, list):
        raise UserError(name, "must be a list", text, f"write {name}='[{text}]'")
    return items
