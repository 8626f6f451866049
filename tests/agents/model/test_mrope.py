"""Claims about mRoPE positions: those of Transformers, for any stream of text and images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agents.model import STARTER_PATH
from agents.model.architectures import ARCHITECTURES
from agents.model.mrope import mrope_positions
from tests.budget import examples
from tests.by_architecture import VISION_TYPES
from tests.tiny_models import tiny_config

IMAGE = 9
MERGE = 2


@pytest.fixture(scope="module", params=VISION_TYPES)
def reference(request: pytest.FixtureRequest) -> Any:
    config = tiny_config(request.param, AutoTokenizer.from_pretrained(STARTER_PATH), tied=False)
    config.image_token_id = IMAGE
    with torch.device("meta"):  # its positions need no weights
        network: Any = ARCHITECTURES[request.param].build(config)
    return network.model


def stream(pieces: list[int], grids: list[tuple[int, int, int]]) -> np.ndarray:
    """Return ids with `pieces[k]` text tokens before image k, and the last piece behind all images."""
    ids: list[int] = []
    for length, grid in zip(pieces, [*grids, None], strict=True):
        ids += [1] * length + ([IMAGE] * (grid[1] * grid[2] // MERGE**2) if grid else [])
    return np.array(ids, dtype=np.int64)


grid = st.tuples(st.just(1), st.integers(1, 7).map(lambda n: MERGE * n), st.integers(1, 7).map(lambda n: MERGE * n))


@examples(60)
@given(data=st.data(), grids=st.lists(grid, max_size=3))
def test_positions_equal_those_of_transformers(
    reference: Any, data: st.DataObject, grids: list[tuple[int, int, int]]
) -> None:
    pieces = [data.draw(st.integers(0 if k == 0 else 1, 20)) for k in range(len(grids))] + [
        data.draw(st.integers(1, 20))
    ]
    ids = stream(pieces, grids)
    expected, _ = reference.get_rope_index(
        torch.from_numpy(ids)[None],
        mm_token_type_ids=(torch.from_numpy(ids) == IMAGE).int()[None],
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    assert mrope_positions(ids, grids, IMAGE, MERGE).tolist() == expected[:, 0].tolist()


def test_text_goes_on_one_past_the_larger_side_of_an_image() -> None:
    ids = np.array([7, 7, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 7, 7])  # 2 rows of 3 columns
    assert mrope_positions(ids, [(1, 4, 6)], IMAGE, MERGE).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_without_an_image_token_a_stream_counts_from_zero() -> None:
    assert mrope_positions(np.array([7, 7, IMAGE, 7]), [], -1, 1).tolist() == [[0, 1, 2, 3]] * 3


def test_a_prefix_of_a_stream_has_the_same_positions_as_in_the_whole() -> None:
    grids = [(1, 4, 8), (1, 6, 2)]
    ids = stream([5, 3, 6], grids)
    whole = mrope_positions(ids, grids, IMAGE, MERGE)
    assert np.array_equal(mrope_positions(ids[:15], grids[:1], IMAGE, MERGE), whole[:, :15])


@pytest.mark.parametrize(
    ("ids", "grids", "rule"),
    [
        ([1, IMAGE, 1], [], "1 in the stream, 0 in grids"),
        ([1, 1, 1], [(1, 2, 2)], "0 in the stream, 1 in grids"),
        ([IMAGE, 1], [(1, 2, 2), (1, 2, 2)], "1 in the stream, 2 in grids"),
        ([IMAGE, IMAGE, IMAGE], [(1, 2, 4)], "3 in the stream, 2 in grids"),
        ([IMAGE, 1, IMAGE], [(1, 2, 4)], "0 to 2 are no unbroken run of 2"),
    ],
)
def test_placeholders_that_do_not_match_the_grids_are_refused(ids: list[int], grids: list, rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        mrope_positions(np.array(ids), grids, IMAGE, MERGE)
