"""Reads the raw rows of a file, a folder or a Hugging Face id as an indexable sequence of plain dicts.

Images stay in their stored form. JSON rows are held in memory; parquet files and Hugging Face sets are memory mapped,
and their rows become dicts when they are read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from envs.config import given
from envs.config.plugins import import_object
from envs.datasets.hub import hub_problem
from envs.errors import UserError, did_you_mean, first_line

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".parquet", ".jsonl", ".json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SOURCES_FIX = f"give a {', '.join(SUFFIXES)} file, a folder of them, or a Hugging Face id such as hiyouga/geometry3k"


# Not `Sequence`: a data set of Hugging Face has a length and an index, and neither `count` nor `index`.
class Rows(Protocol):
    """Rows in order; each read returns a dict of plain Python values."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class RowSource:
    """Rows, with the names that errors and ids use.

    Example::

        source = open_rows("geo3k/train.jsonl", split="train")
        source.name, source.stem, len(source.rows)       # ("train.jsonl", "train", 514)
        source.rows[0]["images"]                         # ["images/1622.png"], relative to source.root
    """

    rows: Rows
    #: The name in errors.
    name: str
    #: The prefix of the id of a row without one.
    stem: str
    #: Image paths are relative to this folder and must stay in it.
    root: Path


@dataclass(frozen=True)
class ArrowRows:
    """Rows of a parquet file or of a data set of Hugging Face; `name` is theirs in errors.

    A column of float32 gives the shortest decimal that float32 rounds to the same value: 18.8, where Arrow gives
    18.799999237060547, which no grader takes for 18.8.
    """

    name: str
    #: A table of Arrow, or anything whose slices are some.
    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a row. Raises `UserError` if Python cannot hold a value of it, such as a date after the year 9999."""
        try:
            found = self.table[index : index + 1]
            (row,) = found.to_pylist()
        except Exception as error:  # Arrow raises what the conversion of each type raises
            fix = "write the column as text or numbers, or leave it out"
            where = f"{self.name} row {index}"
            raise UserError(where, "must have values that Python can hold", first_line(error), fix) from error
        for field in found.schema:
            narrow = _NARROW_FLOATS.get(str(field.type))
            if narrow and row[field.name] is not None:
                row[field.name] = float(str(narrow(row[field.name])))
        return {name: _without_none(value) for name, value in row.items()}


_NARROW_FLOATS = {"halffloat": np.float16, "float": np.float32}


def _without_none(value: Any) -> Any:
    """Return a nested value without what Arrow adds: it gives each dict of a column the keys of all dicts."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def read_tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Return the tool schemas of a list, or of its JSON; none for an empty value.

    Raises:
        UserError: it is anything else.
    """
    rule = "must be a list of tool schemas, or its JSON"
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(where, rule, json_fault(error), "fix the JSON") from error
    tools = value or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        fix = 'give [{"type": "function", "function": {"name": ...}}]'
        raise UserError(where, rule, value, fix)
    return tuple(tools)


def json_fault(error: ValueError | RecursionError) -> str:
    """Return what is wrong with a JSON text."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "lists that nest too deeply"
    return "a number with too many digits"


def check_is_a_source(source: str) -> None:
    """Raise `UserError` if a text is no data set: neither rows of Python code nor a file, a folder or a hub id."""
    if not source.strip():
        raise UserError("data source", "must not be empty", source, _SOURCES_FIX)
    path = Path(source)
    # A name such as geo3k/train.jsonl has the form of an id, and is a file that is missing.
    is_id = bool(_HUB_ID.fullmatch(source)) and path.suffix not in SUFFIXES
    if not (is_id or path.is_file() or path.is_dir() or source.startswith(f"{given.__name__}:")):
        raise UserError(source, "no such file, folder or Hugging Face id", source, _SOURCES_FIX)


def open_rows(source: str, split: str) -> RowSource:
    """Open a data set by path or Hugging Face id; `split` selects files of a folder or a split of a set.

    Raises:
        UserError: the source or the split is missing, empty, or not readable in the format that its name says.
    """
    check_is_a_source(source)
    path = Path(source)
    if source.startswith(f"{given.__name__}:"):  # rows of Python code
        found = RowSource(_plain_rows(import_object("data", source)), "data", "data", Path.cwd())
    elif path.is_file():
        found = RowSource(_read_files([path], path.name), path.name, path.stem, path.parent)
    elif path.is_dir():
        found = _open_folder(path, split)
    else:
        found = _open_hub(source, split)
    if len(found.rows) == 0:
        raise UserError(found.name, "must hold at least one row", 0, "give a data set that is not empty")
    return found


def _plain_rows(rows: Any) -> Rows:
    """Return the rows that Python code gave: a list of dicts, or a data set. Raises `UserError` if they are none."""
    # Who gives such an object has imported the library, which takes a second to import.
    if "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset):
        return _arrow_rows(rows, "data")
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, str | bytes | Mapping):
        raise UserError("data", "must be a list of dicts", type(rows).__name__, "give a list, a file or a hub id")
    for index in range(len(rows)):
        if not isinstance(rows[index], Mapping):
            got = type(rows[index]).__name__
            raise UserError("data", "must hold dicts", got, 'write {"problem": ..., "answer": ...}')
    return rows


def _open_folder(folder: Path, split: str) -> RowSource:
    name = folder.resolve().name
    stem = f"{name}-{split}"
    # The two files that `save_to_disk` writes for several splits and for one.
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return RowSource(_load_saved(folder, split, name), name, stem, folder)
    files = _files_of(folder, split)
    # One of the two may be a conversion of the other: all of them together would hold each row twice.
    if len({file.suffix for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(str(folder), f"must hold the split '{split}' in one format", names, "give one of the files")
    if len(files) == 1:
        name = files[0].name
        stem = files[0].stem
    return RowSource(_read_files(files, name), name, stem, files[0].parent)


def _files_of(folder: Path, split: str) -> list[Path]:
    """Return the files of a split in a folder or its `data`, in order: train.jsonl, train-00000-of-00002.parquet."""
    there = [*sorted(folder.glob("*")), *sorted(folder.glob("data/*"))]
    # The number of a shard follows the split's name.
    splits = {file: re.sub(r"[-._]\d.*", "", file.stem) for file in there if file.suffix in SUFFIXES}
    if not splits:
        raise UserError(str(folder), "must hold a data set", "a folder without one", _SOURCES_FIX)
    files = [file for file, name in splits.items() if name == split]
    if not files:
        fix = did_you_mean(split, set(splits.values()))
        raise UserError(str(folder), "must hold a file of the requested split", split, fix)
    return files


def _read_files(files: Sequence[Path], name: str) -> Rows:
    """Return the rows of files of one format, in order; `name` is the set's in errors."""
    suffix = files[0].suffix
    if suffix == ".parquet":
        return _read_parquet(files, name)
    if suffix not in SUFFIXES:
        raise UserError(files[0].name, f"must end in {', '.join(SUFFIXES)}", suffix, "convert or rename it")
    read = _read_jsonl if suffix == ".jsonl" else _read_json
    return [row for file in files for row in read(file)]


def _read_parquet(files: Sequence[Path], name: str) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        # Unlike `read_table`, this adds no columns from the names of folders.
        tables = [pyarrow.parquet.ParquetFile(file, memory_map=True).read() for file in files]
        table = pyarrow.concat_tables(tables, promote_options="permissive")
    except (OSError, pyarrow.ArrowException) as error:
        names = ", ".join(file.name for file in files)
        raise UserError(names, "must be readable parquet", first_line(error), "write the file again") from error
    return ArrowRows(name, table)


def _read_jsonl(file: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    # Not `splitlines`, which also splits at characters such as U+2028, legal inside of a JSON text.
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file.name} line {number}"
        rule = "must be one JSON object"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(where, f"{rule} ({json_fault(error)})", line[:60], "fix the line") from error
        if not isinstance(row, dict):
            raise UserError(where, rule, line[:60], 'write {"problem": ...}')
        rows.append(row)
    return rows


def _read_json(file: Path) -> list[Mapping[str, Any]]:
    try:
        rows = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        where = file.name
        fix = "fix it"
        if isinstance(error, json.JSONDecodeError):
            where += f" line {error.lineno}"
            if error.msg == "Extra data":
                fix = "a file with one object a line must end in .jsonl"
        raise UserError(where, "must be JSON", json_fault(error), fix) from error
    if not isinstance(rows, list):
        raise UserError(file.name, "must be a list of rows", type(rows).__name__, "put the rows into a list")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(
                f"{file.name} row {index}", "must be an object", type(row).__name__, 'write {"problem": ...}'
            )
    return rows


def _read_text(file: Path) -> str:
    try:
        # Windows begins UTF-8 with a mark, which would be a part of the first key.
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"{error.reason} at byte {error.start}"
        raise UserError(file.name, "must be UTF-8 text", got, "save it as UTF-8") from error
    except OSError as error:
        fix = "check the file and its permissions"
        raise UserError(file.name, "must be readable", first_line(error), fix) from error


def _load_saved(folder: Path, split: str, name: str) -> Rows:
    """Return the rows of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(str(folder), "must be a saved data set", first_line(error), "save it again") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return _arrow_rows(loaded, name)
    if split not in loaded:
        raise UserError(str(folder), "must hold the requested split", split, did_you_mean(split, map(str, loaded)))
    return _arrow_rows(loaded[split], name)


def _open_hub(name: str, split: str) -> RowSource:
    import datasets
    from datasets import config

    if problem := hub_problem(name, "dataset"):
        raise UserError(name, "must be a data set of the hub, or a file or folder here", name, problem)
    try:
        loaded = datasets.load_dataset(name, split=split)
    # The library raises errors of many HTTP, file system and parser packages.
    except Exception as error:
        fix = "check the name, the split and the network, or give a local file"
        raise UserError(name, f"must load with the split '{split}'", first_line(error), fix) from error
    # Without `split` it would be a dict of data sets, and with streaming a data set without a length.
    assert isinstance(loaded, datasets.Dataset), f"split='{split}' gave {type(loaded).__name__}, not one data set"
    shown = f"{name}[{split}]"
    # The library's own paths point into its cache; a row must not name any other file.
    cache = Path(config.HF_CACHE_HOME)
    return RowSource(_arrow_rows(loaded, shown), shown, f"{name.split('/')[-1]}-{split}", cache)


def _arrow_rows(dataset: datasets.Dataset, name: str) -> Rows:
    # The arrow format returns images as stored ({bytes, path}); the default format would decode each one.
    return ArrowRows(name, dataset.with_format("arrow"))
