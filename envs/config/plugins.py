"""Objects that users bring: settings name them, and this module finds them.

A reference is `module:NAME` or `path/to/file.py:NAME`.

An object that Python code gives, rather than a name, gets a reference too: see `give`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from envs.config import given
from envs.errors import CODE_FAULTS, UserError, did_you_mean, quoted

R = TypeVar("R")
#: How the names of files with settings end.
YAML = (".yaml", ".yml")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: Modules of files by path, with the file's time when it was read: a notebook may edit a file and train again.
_FILES: dict[Path, tuple[int, ModuleType]] = {}
#: Modules and files whose import is going on, and the thread that imports them.
_BEING_IMPORTED: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class Plugin:
    """A kind of object that users bring: how errors call it, and the parameters it takes.

    `names` are those of our own that a reference may be too.

    Example: `Plugin("an advantage", ("groups", "config"))`.
    """

    word: str
    parameters: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make `Annotated[str, plugin]` the type of a setting that holds a reference."""
        return core_schema.no_info_after_validator_function(self.check_reference, handler(source))

    def check_reference(self, text: str) -> str:
        """Return a reference, the path in it absolute. Raises ValueError if it is none, for pydantic."""
        place, _, name = text.rpartition(":")
        if not place and text in ("", *self.names):
            return text
        if not name.isidentifier() or not (place.endswith(".py") or _MODULE.fullmatch(place)):
            ours = "".join(f"{own} or " for own in self.names)
            raise ValueError(f"must be {ours}module:NAME or file.py:NAME")
        if place.endswith(".py"):
            # A recording or a resumed run may start in another folder.
            return f"{Path(place).absolute()}:{name}"
        return text

    def load(self, field: str, reference: str) -> Any:
        """Return the object that a reference names, if it can be called as this kind of plug-in is.

        Raises:
            UserError: it cannot be imported, or takes other parameters; the error names `field`, such as "--advantage".
        """
        return self.check(field, reference, import_object(field, reference))

    def check(self, field: str, reference: str, found: object) -> Any:
        """Return an object if it can be called as this kind of plug-in is. Raises `UserError` if not."""
        if not callable(found):
            fix = "name a function or class"
            raise UserError(field, f"'{reference}' must be callable", type(found).__name__, fix)
        check_parameters(field, reference, found, self.parameters)
        return found

    def call(self, field: str, reference: str, function: Callable[..., R], *args: object) -> R:
        """Return what a user's function returns. Raises `UserError` where it raises, or is async."""
        check_not_async(field, reference, function)
        try:
            return function(*args)
        except CODE_FAULTS as error:
            raise UserError(field, f"'{reference}' must not raise", import_cause(error), "fix it") from error

    @contextlib.contextmanager
    def result_of(self, field: str, reference: str, result: object) -> Iterator[None]:
        """Raise `UserError` for a TypeError or ValueError that reading a function's result raises."""
        try:
            yield
        except (TypeError, ValueError) as error:
            rule = f"'{reference}' must return what {self.word} does ({error})"
            place = place_of(import_object(field, reference))
            got = f"{quoted(result, str)} ({place})" if place else result
            raise UserError(field, rule, got, "see docs/plugins.md") from error


@dataclass(frozen=True)
class WeightedPlugin(Plugin):
    """A kind of object of which a setting names several, each with a weight: `my.py:brevity@0.1`, or 1 without one.

    A YAML file may stand in place of an object.
    """

    def check_reference(self, text: str) -> str:
        """Return a reference with its weight, the path in it absolute."""
        reference, at, weight = self._split(text)
        try:
            is_number = not weight or math.isfinite(float(weight))
        except ValueError:
            is_number = False
        if not is_number:
            raise ValueError(f"must have a number as its weight after @, which '{weight}' is not")
        if reference.endswith(YAML):
            return f"{Path(reference).absolute()}{at}{weight}"
        return super().check_reference(reference) + at + weight

    def load_weighted(self, field: str, text: str) -> tuple[str, float, Any]:
        """Return name, weight and object: None for our own `names`, its path for a file. Raises as `load` does."""
        reference, _, weight = self._split(text)
        if reference.endswith(YAML):
            return Path(reference).stem, float(weight or 1), Path(reference)
        found = None if reference in self.names else self.load(field, reference)
        return plugin_name(reference), float(weight or 1), found

    @staticmethod
    def _split(text: str) -> tuple[str, str, str]:
        return text.rpartition("@") if "@" in text else (text, "", "")


def is_reference(value: object) -> bool:
    """Return whether a setting's value names an object of a user by module or file."""
    return isinstance(value, str) and bool(re.search(r"[\w/]:[A-Za-z_]\w*(@|$)", value))


def check_parameters(field: str, reference: str, found: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Raise `UserError` if what a reference names cannot be called with these parameters."""
    try:
        # By position: names of parameters are the author's.
        inspect.signature(found).bind(*parameters)
    except TypeError as error:
        rule = f"'{reference}' must take {', '.join(parameters) or 'no arguments'}"
        raise UserError(field, rule, f"{inspect.signature(found)}: {error}", "change its parameters") from error
    except ValueError:  # code in C, which does not tell its parameters
        pass


def check_not_async(field: str, reference: str, function: object) -> None:
    """Raise `UserError` for an async function where nothing would await it."""
    call = vars(type(function)).get("__call__")  # of an object that stands for a function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        raise UserError(field, f"'{reference}' must not be async", place_of(function), "write `def` without `async`")


def plugin_name(reference: str) -> str:
    """Return what metrics call a plug-in: the name without its place.

    >>> plugin_name("my_package.rewards:brevity"), plugin_name("brevity")
    ('brevity', 'brevity')
    """
    return reference.rpartition(":")[2]


def give(found: object) -> str:
    """Return a reference to an object of this process.

    It names the object's own module where that can be imported. Otherwise `envs.config.given` keeps it: an object of a
    notebook, a script or a function can be found by this process only.
    """
    module = getattr(found, "__module__", None)
    name = getattr(found, "__qualname__", "")
    # Another process imports a module by its name, and has a `__main__` of its own.
    if module and module != "__main__" and getattr(sys.modules.get(module), name, None) is found:
        return f"{module}:{name}"
    return f"{given.__name__}:{given.keep(found)}"


def import_object(field: str, reference: str) -> object:
    """Return what "module:NAME" or "file.py:NAME" names.

    Raises:
        UserError: there is no such module or name, or the module, which is a user's code, raises.
    """
    place, _, name = reference.rpartition(":")
    try:
        with _not_by_itself(field, place):
            if place.endswith(".py"):
                module = _import_file(Path(place))
            else:
                module = importlib.import_module(place)
    except UserError:
        raise
    except CODE_FAULTS as error:
        raise UserError(field, f"'{place}' must import", import_cause(error), _import_fix(error, place)) from error
    # Not `getattr`: a module may define `__getattr__`, which runs code for any name.
    names = vars(module)
    if name in names:
        return names[name]
    if module is given:
        fix = "write it into a file, and name that: file.py:NAME"
        raise UserError(field, "was given as an object of Python code that does not run here", name, fix)
    public = [public for public in names if not public.startswith("_")]
    raise UserError(field, f"'{place}' must define it", name, did_you_mean(name, public))


@contextlib.contextmanager
def _not_by_itself(field: str, place: str) -> Iterator[None]:
    """Raise `UserError` if a module is used by its own import: a script would begin its run again in each worker."""
    # Two threads may import one module at the same time: Python makes one wait.
    being_imported = place, threading.get_ident()
    if being_imported in _BEING_IMPORTED:
        fix = 'put what its file runs under `if __name__ == "__main__":`'
        raise UserError(field, "must not be used by the file that defines it while that is imported", place, fix)
    _BEING_IMPORTED.add(being_imported)
    try:
        yield
    finally:
        _BEING_IMPORTED.discard(being_imported)


def _import_file(path: Path) -> ModuleType:
    """Return the module of a file, which is run once as long as it does not change."""
    path = path.resolve()
    if not path.is_file():  # to read a pipe may take for ever
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    changed = path.stat().st_mtime_ns
    if path in _FILES and _FILES[path][0] == changed:
        return _FILES[path][1]
    # Two files named my.py in two folders are two modules.
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None, f"{path} does not end in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Half a module must not be found by the next import.
        del sys.modules[spec.name]
        raise
    _FILES[path] = changed, module
    return module


def place_of(function: object) -> str:
    """Return where a function, or the class of a callable object, is defined: "my.py:12"; empty for code in C."""
    found: Any = function.func if isinstance(function, functools.partial) else function
    # A decorator's own line would not help its user.
    found = inspect.unwrap(found)
    code = getattr(found if hasattr(found, "__code__") else type(found).__call__, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""


def import_cause(error: BaseException) -> str:
    """Return an import error in one line, with the place in the user's code that raised it."""
    # The first frame is the caller's, importlib's say nothing of the cause.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, FileNotFoundError) and error.filename:  # the module's own file
        return "no such file"
    return f"{type(error).__name__}: {error}{place}"


def _import_fix(error: BaseException, place: str) -> str:
    if isinstance(error, OSError):
        return "give the path of a Python file"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return "fix the module"
    module, _, attribute = place.rpartition(".")
    # Python writes module.NAME where a reference has a colon.
    if place == error.name and f"'{module}' is not a package" in str(error):
        return f"write a colon before the name: {module}:{attribute}"
    if place == error.name or place.startswith(f"{error.name}."):
        return "check the spelling, install it, or put its folder on PYTHONPATH"
    if error.name.partition(".")[0] == "slime":
        return "add `compat: slime` to the entry, or install 'slime', which the module imports"
    return f"install '{error.name}', which the module imports"
