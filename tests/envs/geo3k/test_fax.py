"""Pictures that came by fax: the same problems and places, coarser and with speckles."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from PIL import Image

from envs.geo3k import fax as module
from envs.geo3k.fax import fax
from envs.geo3k.procedural import ProceduralGeo3k


def detail(image: Image.Image) -> float:
    """Return the mean difference of neighbouring pixels."""
    return float(np.abs(np.diff(np.asarray(image.convert("L"), dtype=np.float64), axis=1)).mean())


def test_a_fax_shows_the_problem_that_was_sent_in_the_same_places() -> None:
    sent, arrived = (ProceduralGeo3k("train", 20, seed=3, style=style) for style in ("plain", "fax"))
    for index in range(20):
        (problem, image, boxes), (same, copy, places) = sent.drawn(index), arrived.drawn(index)
        assert (problem, boxes) == (same, places)
        assert (copy.size, copy.mode) == (image.size, "RGB") and copy.tobytes() != image.tobytes()
        before, after = (np.asarray(each.convert("L"), dtype=np.float64) for each in (image, copy))
        assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.4
        assert arrived.item(index)[1].tobytes() == copy.tobytes()


def test_the_coarser_a_fax_the_less_is_left_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    image = ProceduralGeo3k("train", 1).item(0)[1]
    monkeypatch.setattr(module, "SPECKLES", 0.0)
    left = []
    for coarseness in (1.0, 2.0, 4.0):
        monkeypatch.setattr(module, "COARSENESS", (coarseness, coarseness))
        left.append(detail(fax(image, Random(1))))
    assert left[0] == detail(image) > left[1] > left[2]


def test_blank_paper_gets_speckles_of_the_stated_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COARSENESS", (1.0, 1.0))
    grey = np.asarray(fax(Image.new("RGB", (200, 200), (128, 128, 128)), Random(2)).convert("L"), dtype=np.float64)
    assert grey.mean() == pytest.approx(128, abs=1) and grey.std() == pytest.approx(module.SPECKLES, rel=0.05)
