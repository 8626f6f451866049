"""Claims about loading data sets: every source gives the same samples, and every bad row a one-line error at load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from envs.config.given import keep
from envs.datasets.prompts import DataKeys
from envs.datasets.samples import RowSamples, Subset, epoch_order, filter_overlong, load_samples
from envs.errors import UserError
from envs.grading import score_text
from envs.types import Sample, message_images
from tests.paths import SHARED

GEO3K = SHARED / "geo3k"


def png(color: str = "red", size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def row(
    problem: Any = "<image>Find x.", answer: Any = "68", images: Any = ("red.png",), **others: Any
) -> dict[str, Any]:
    images = list(images) if isinstance(images, tuple) else images
    return {"problem": problem, "answer": answer, "images": images, **others}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for color in ("red", "blue"):
        (tmp_path / f"{color}.png").write_bytes(png(color))
    return tmp_path


def write(folder: Path, *rows: dict[str, Any], name: str = "train.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def load(folder: Path, *rows: dict[str, Any], **options: Any) -> RowSamples:
    return load_samples(write(folder, *rows), **options)


def error_of(source: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_samples(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shape(sample: Sample) -> list[tuple[str, list[str]]]:
    """The prompt with each image as the name of its colour."""
    names = {(255, 0, 0): "RED", (0, 0, 255): "BLUE"}

    def part_shape(part: dict[str, Any]) -> str:
        return part["text"] if part["type"] == "text" else names[part["image"].getpixel((0, 0))]

    return [
        (message["role"], [content] if isinstance(content := message["content"], str) else [*map(part_shape, content)])
        for message in sample.prompt
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("test", 400), ("train", 514), ("train_rebuilt", 685)])
def test_every_real_row_loads_with_its_image_and_answer(name: str, size: int) -> None:
    if not GEO3K.is_dir():
        pytest.skip("the shared data set is not here")
    samples = load_samples(str(GEO3K / f"{name}.jsonl"))
    assert len(samples) == size
    for sample in samples:
        assert sample.label
        assert len(message_images(sample.prompt)) == 1
        assert "<image>" not in str(sample.prompt)
    assert len({sample.id for sample in samples}) == size


def test_a_folder_gives_the_file_named_for_the_split() -> None:
    if not GEO3K.is_dir():
        pytest.skip("the shared data set is not here")
    assert len(load_samples(str(GEO3K), split="test")) == 400
    assert len(load_samples(str(GEO3K), split="train", limit=7)) == 7


def test_placeholders_become_the_images_in_order(folder: Path) -> None:
    samples = load(folder, row("A <image> and <image>\nb", images=("red.png", "blue.png")), system_prompt="Think.")
    assert shape(samples[0]) == [("system", ["Think."]), ("user", ["A ", "RED", " and ", "BLUE", "\nb"])]


def test_without_placeholders_the_images_come_first(folder: Path) -> None:
    samples = load(folder, row("Which?", images=("red.png", "blue.png")), row("One?", images="blue.png"))
    assert shape(samples[0]) == [("user", ["RED", "BLUE", "Which?"])]
    assert shape(samples[1]) == [("user", ["BLUE", "One?"])]


def test_chat_messages_keep_their_turns_and_places(folder: Path) -> None:
    prompt = [
        {"role": "system", "content": "Own."},
        {"role": "user", "content": "See <image>."},
        {"role": "assistant", "content": "Yes.", "name": None},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]},
    ]
    rows = row(prompt, images=("red.png", "blue.png")), row([{"role": "user", "content": "Hi"}])
    samples = load(folder, *rows, system_prompt="Ours.")
    assert shape(samples[0]) == [
        ("system", ["Ours.\n\nOwn."]),
        ("user", ["See ", "RED", "."]),
        ("assistant", ["Yes."]),
        ("user", ["BLUE", "And this?"]),
    ]
    assert "name" not in samples[0].prompt[2]
    assert shape(samples[1]) == [("system", ["Ours."]), ("user", ["RED", "Hi"])]


@pytest.mark.parametrize("images", [None, [], "missing"])
def test_rows_without_images_are_text(images: Any, folder: Path) -> None:
    given_row = row("1 + 1?", 2, images)
    if images == "missing":
        del given_row["images"]
    sample = load(folder, given_row)[0]
    assert sample.prompt == ({"role": "user", "content": "1 + 1?"},)


def test_ids_labels_and_metadata(folder: Path) -> None:
    first = row(id="a7", choices=["1", "2"], level=3, note=None, nested={"a": 1}, mixed=[{"a": 1}])
    samples = load(folder, first, row(answer=0), row(answer=2.5, id=12))
    assert [(sample.id, sample.label) for sample in samples] == [("a7", "68"), ("train-1", "0"), ("12", "2.5")]
    assert samples[0].metadata == {"choices": ["1", "2"], "level": 3, "note": None}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"b": {"enum": ["x"]}}}}}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tools_of_a_row_reach_its_metadata_wherever_and_however_they_are_written(folder: Path, suffix: str) -> None:
    import pyarrow
    import pyarrow.parquet

    columns: list[dict[str, Any]] = [
        {"tools": [TOOL, OTHER]},
        {"tools": json.dumps([TOOL, OTHER])},
        {"metadata": {"tools": [TOOL, OTHER], "seed": 7}},
        {"metadata": {"tools": json.dumps([TOOL, OTHER]), "seed": 7}},
        {"tools": None, "metadata": {"tools": json.dumps([TOOL, OTHER]), "seed": 7}},
    ]
    for number, column in enumerate(columns):
        name = f"{number}.{suffix}"
        rows = [row(images=None, problem="Find x.", **column)]
        if suffix == "parquet":  # gives each schema the keys of all, as None
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
            source = str(folder / name)
        else:
            source = write(folder, *rows, name=name)
        metadata = load_samples(source)[0].metadata
        assert metadata["tools"] == [TOOL, OTHER]
        assert metadata.get("seed") == (7 if "metadata" in column else None)


def test_tools_that_are_names_and_no_schemas_stay_what_they_are(folder: Path) -> None:
    samples = load(folder, row(tools=["zoom"]), row(tools="zoom"), row(tools=None))
    assert [sample.metadata["tools"] for sample in samples] == [["zoom"], "zoom", None]


@pytest.mark.parametrize(
    ("kind", "value", "label"),
    [
        ("float16", 18.8, "18.8"),
        ("float32", 18.8, "18.8"),
        ("float32", 1 / 3, "0.33333334"),
        ("float32", 1e-7, "1e-07"),
        ("float32", 16777216.0, "16777216.0"),
        ("float64", 18.8, "18.8"),
        ("float64", 0.1 + 0.2, "0.30000000000000004"),  # the graders take 0.3
        ("decimal128(6, 2)", "18.80", "18.80"),
        ("int8", 18, "18"),
    ],
)
def test_a_number_is_read_as_the_shortest_text_of_its_own_type(kind: str, value: Any, label: str, folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    given = Decimal(value) if kind.startswith("decimal") else np.float16(value) if kind == "float16" else value
    types = {"decimal128(6, 2)": pyarrow.decimal128(6, 2)}
    column = pyarrow.array([given], types.get(kind) or getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"answer": column, "problem": ["Find x."]}), folder / "rows.parquet")
    (sample,) = load_samples(str(folder / "rows.parquet"))
    assert sample.label == label
    assert score_text(f"\\boxed{{{label}}}", str(sample.label)) == 1.0


def test_a_value_that_python_cannot_hold_is_named_by_its_row(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    far = pyarrow.array([2**62], pyarrow.timestamp("us"))
    table = pyarrow.table({"problem": ["2 + 2?"], "answer": ["4"], "expires": far})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    error = error_of(str(folder / "rows.parquet"))
    assert error.startswith("rows.parquet row 0: must have values that Python can hold, got ")
    assert error.endswith("; write the column as text or numbers, or leave it out")


def test_shards_may_differ_in_columns(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    for shard, level in enumerate([{"level": [1]}, {}]):
        table = pyarrow.table({"problem": ["p"], "answer": [str(shard)], **level})
        pyarrow.parquet.write_table(table, folder / f"train-0000{shard}-of-00002.parquet")
    samples = load_samples(str(folder))
    assert [sample.label for sample in samples] == ["0", "1"]
    assert [sample.metadata for sample in samples] == [{"level": 1}, {"level": None}]


def test_a_data_set_of_python_code_is_read_as_one_of_a_file() -> None:
    import datasets

    name = keep(datasets.Dataset.from_dict({"problem": ["p"], "answer": ["1"], "level": [3]}))
    assert load_samples(f"{keep.__module__}:{name}")[0].metadata == {"level": 3}


def test_every_file_format_gives_the_same_samples(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [row(), row("<image>b<image>", 3, ("blue.png", "red.png"), id="x")]
    expected = [shape(sample) for sample in load(folder, *rows)]
    (folder / "list.json").write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    encoded = [
        {**r, "answer": str(r["answer"]), "images": [stored(folder, name) for name in r["images"]]} for r in rows
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(encoded), folder / "rows.parquet")
    for name in ("list.json", "rows.parquet"):
        samples = load_samples(str(folder / name))
        assert [shape(sample) for sample in samples] == expected, name
        assert [sample.label for sample in samples] == ["68", "3"]


def stored(folder: Path, name: str) -> dict[str, Any]:
    return {"bytes": (folder / name).read_bytes(), "path": name}


def test_parquet_shards_of_a_split_are_read_in_order(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (folder / "data").mkdir()
    for shard, split in enumerate(("train", "train", "test")):
        table = pyarrow.Table.from_pylist([{"problem": "p", "answer": f"{shard}{index}"} for index in range(2)])
        pyarrow.parquet.write_table(table, folder / "data" / f"{split}-0000{shard}-of-00002.parquet")
    samples = load_samples(str(folder), split="train")
    assert [sample.label for sample in samples] == ["00", "01", "10", "11"]
    assert samples[3].id == f"{folder.name}-train-3"
    assert "did you mean 'test'?" in error_of(str(folder), split="tes")


def test_a_saved_hugging_face_set_is_read_undecoded(folder: Path) -> None:
    import datasets

    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "images": datasets.Image()}
    )
    rows = {"problem": ["a", "b"], "answer": ["1", "2"], "images": [str(folder / f"{c}.png") for c in ("red", "blue")]}
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(str(folder / "one"))
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(str(folder / "splits"))
    assert [shape(s) for s in load_samples(str(folder / "one"))] == [
        [("user", ["RED", "a"])],
        [("user", ["BLUE", "b"])],
    ]
    assert shape(load_samples(str(folder / "splits"), split="test")[0]) == [("user", ["BLUE", "b"])]
    assert "did you mean 'test'?" in error_of(str(folder / "splits"), split="tests")


def test_a_hugging_face_id_without_network_is_one_line(folder: Path) -> None:
    code = (
        "from envs.datasets.samples import load_samples\nfrom envs.errors import UserError\n"
        "try: load_samples('some-owner/some-set')\nexcept UserError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("some-owner/some-set: must load with the split 'train'")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(answer=None), "row 1 answer: must not be empty"),
        (row(answer=" "), "row 1 answer: must not be empty"),
        (row(answer=float("nan")), "row 1 answer: must not be empty, got nan"),
        (row(answer=["1", "2"]), "row 1 answer: must be a text or a finite number"),
        (row(answer=float("inf")), "row 1 answer: must be a text or a finite number, got inf"),
        (
            {"problem": "a", "anser": "1"},
            "row 1: must hold an answer under 'answer', got keys problem, anser; give --answer-key anser",
        ),
        (
            {"problm": "a", "answer": "1"},
            "row 1: must hold a prompt under 'problem', got keys problm, answer; give --prompt-key problm",
        ),
        (row(""), "row 1 problem: must be a text or a list of messages"),
        (row([]), "row 1 problem: must be a text or a list of messages"),
        (row([{"content": "a"}]), "row 1 problem[0]: must be a message with a role"),
        (row([{"role": "system", "content": "a"}]), "row 1 problem: must hold a user message, got roles system"),
        (row([{"role": "user", "content": 3}]), "row 1 problem[0] content: must be a text or a list of parts"),
        (row([{"role": "user", "content": [{"type": "video"}]}]), "must hold text parts and image placeholders"),
        (
            row("<image><image>"),
            "row 1: must have as many <image> placeholders as images, got 2 placeholders and 1 images",
        ),
        (row(images=None), "got 1 placeholders and 0 images"),
        (row("<image>", images=("red.png", "blue.png")), "got 1 placeholders and 2 images"),
        (row(images=("gone.png",)), "row 1 images[0]: no such file"),
        (row("a", images=("red.png", "broken.png")), "row 1 images[1]: must be a whole image, got broken.png"),
        (row(images=("../set.png",)), "row 1 images[0]: must be inside the data set's folder"),
        (
            {"problem": "a", "answer": "1", "image": "red.png"},
            "row 1: must hold its images under the images key 'images'",
        ),
    ],
)
def test_a_bad_row_is_found_at_load_and_named(bad: dict[str, Any], message: str, folder: Path) -> None:
    (folder.parent / "set.png").write_bytes(png())
    (folder / "broken.png").write_bytes(png(size=(64, 64))[:-30])
    error = error_of(write(folder, row(), bad))
    assert error.startswith("train.jsonl row 1")
    assert message in error


def test_outside_images_load_when_allowed(folder: Path) -> None:
    (folder / "set").mkdir()
    samples = load(folder / "set", row(images=("../red.png",)), allow_outside_images=True)
    assert shape(samples[0]) == [("user", ["RED", "Find x."])]


def test_an_images_key_that_no_row_has_is_refused(folder: Path) -> None:
    error = error_of(write(folder, row("a")), keys=DataKeys(images="imags"))
    assert "images key 'imags'" in error
    assert "give --image-keys images" in error


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"problem": "a"}\n\n{"problem": \n', "a.jsonl line 3: must be one JSON object (Expecting value"),
        ("a.jsonl", "[1]\n", "a.jsonl line 1: must be one JSON object"),
        ("a.jsonl", "[" * 100_000, "a.jsonl line 1: must be one JSON object (lists that nest too deeply)"),
        ("a.jsonl", '{"answer": ' + "1" * 5000, "a.jsonl line 1: must be one JSON object (a number with too many"),
        ("a.json", "[" * 100_000, "a.json: must be JSON, got lists that nest too deeply"),
        ("a.json", "[" + "1" * 5000, "a.json: must be JSON, got a number with too many digits"),
        ("a.json", '[\n {"a": 1},\n {"a" 2}\n]', "a.json line 3: must be JSON"),
        ("a.json", '{"a": 1}\n{"a": 2}', "one object a line must end in .jsonl"),
        ("a.json", '{"rows": []}', "a.json: must be a list of rows, got dict"),
        ("a.json", "[1]", "a.json row 0: must be an object"),
        ("a.jsonl", "\n", "a.jsonl: must hold at least one row"),
        ("a.json", "[]", "a.json: must hold at least one row"),
        ("a.jsonl", "\udcff", "a.jsonl: must be UTF-8 text"),
        ("a.parquet", "no parquet", "a.parquet: must be readable parquet"),
        ("a.csv", "problem,answer", "a.csv: must end in .parquet, .jsonl, .json"),
    ],
)
def test_an_unreadable_file_is_one_line_with_its_place(name: str, text: str, message: str, folder: Path) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert message in error_of(str(folder / name))


def test_a_source_that_is_not_there_is_refused(folder: Path) -> None:
    for source in ("gone", "data/gone.jsonl", str(folder / "gone")):
        assert "no such file, folder or Hugging Face id" in error_of(source)
    assert "data source: must not be empty" in error_of("")
    (folder / "empty").mkdir()
    assert "must hold a data set" in error_of(str(folder / "empty"))


def test_a_split_in_two_formats_is_ambiguous(folder: Path) -> None:
    write(folder, row())
    write(folder, row(), name="train.json")
    assert "in one format, got train.json, train.jsonl" in error_of(str(folder))


def test_a_limit_reads_no_row_behind_it(folder: Path) -> None:
    assert len(load(folder, row(), row(), row(answer=None), limit=2)) == 2
    assert "limit: must be at least 1" in error_of(write(folder, row()), limit=0)


def test_samples_index_like_a_sequence_and_read_alike_twice(folder: Path) -> None:
    samples = load(folder, *(row(answer=index) for index in range(40)))
    first = samples[0]
    assert [sample.label for sample in samples] == [str(index) for index in range(40)]
    assert samples[-1].label == "39"
    assert samples[0] == first
    with pytest.raises(IndexError):
        samples[40]


def test_overlong_samples_are_dropped_and_counted(folder: Path) -> None:
    samples = load(folder, *(row("x" * size, answer=size, images=None) for size in (5, 50, 6, 51)))

    def length(sample: Sample) -> int:
        return len(sample.prompt[0]["content"])

    kept, dropped = filter_overlong(samples, length, max_prompt_tokens=50)
    assert ([sample.label for sample in kept], dropped) == (["5", "50", "6"], 1)
    with pytest.raises(UserError, match="at least one of 4 samples, got 3; the shortest prompt has 5 tokens"):
        filter_overlong(samples, length, max_prompt_tokens=3)


def test_a_prompt_that_the_template_cannot_write_names_its_row(folder: Path) -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": 5}
    samples = load(folder, row("?", images=None), row([{"role": "user", "content": "?"}, calls], images=None))

    def length(sample: Sample) -> int:
        return sum(len(list(message.get("tool_calls", ()))) for message in sample.prompt)

    rule = "must have messages that the model's chat template can write, got TypeError: 'int' object is not iterable"
    with pytest.raises(UserError, match=f"^sample {samples[1].id}: {rule}"):
        filter_overlong(samples, length, max_prompt_tokens=50)


def test_an_answer_may_be_an_integer_that_no_float_holds(folder: Path) -> None:
    assert load(folder, row("?", 10**400, None))[0].label == str(10**400)


def test_a_subset_shows_the_chosen_samples(folder: Path) -> None:
    samples = load(folder, *(row(answer=index) for index in range(5)))
    subset = Subset(samples, (4, 0))
    assert [sample.label for sample in subset] == ["4", "0"]
    assert len(subset) == 2


@given(st.integers(0, 300), st.integers(0, 2**63), st.integers(0, 1000))
def test_an_epoch_order_is_a_permutation_and_repeats(size: int, seed: int, epoch: int) -> None:
    order = epoch_order(size, seed, epoch)
    assert sorted(order) == list(range(size))
    assert order == epoch_order(size, seed, epoch)


def test_an_epoch_order_is_the_same_on_every_machine_and_differs_by_epoch_and_seed() -> None:
    assert epoch_order(5, seed=0, epoch=1) == [3, 1, 2, 0, 4]
    assert len({tuple(epoch_order(20, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_images_of_a_prompt_are_a_list_from_which_one_can_be_taken() -> None:
    one, other = Image.new("RGB", (28, 28)), Image.new("RGB", (56, 28))
    parts = [{"type": "image", "image": one}, {"type": "text", "text": "and"}, {"type": "image", "image": other}]
    assert message_images([{"role": "user", "content": parts}])[1] is other
