"""Claims about the image store: an image is processed once, memory is bounded, and the same pixels go everywhere."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from agents.model.architectures import ARCHITECTURES
from agents.rendering.images import ImageStore, stable_size
from agents.rendering.renderer import Renderer
from agents.types import ProcessedImage
from envs.errors import UserError
from envs.images import MAX_RATIO, image_digest
from starter.architecture import build_image_processor
from tests.agents.rendering.template_cases import renderer_for
from tests.budget import examples
from tests.by_architecture import VISION_TYPES
from tests.prompts import make_image, question
from tests.tiny_models import image_processor


def qwen_processor(patch_size: int, shortest: int, longest: int) -> Any:
    """Return the processor of a Qwen model: 14-pixel patches for Qwen2.5-VL, 16 for Qwen3-VL."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=patch_size, size={"shortest_edge": shortest, "longest_edge": longest})


#: Of every architecture, two with the limits of their real checkpoints.
PROCESSORS = {
    "starter": build_image_processor(),
    **{name: image_processor(name) for name in VISION_TYPES},
    "qwen2_5_vl": qwen_processor(14, 56 * 56, 28 * 28 * 1280),
    "qwen3_vl": qwen_processor(16, 256 * 256, 4096 * 4096),
}
EVERY = pytest.mark.parametrize("name", PROCESSORS)
STAGES = st.integers(1, 300)


def store(name: str = "starter", **options: Any) -> ImageStore:
    return ImageStore(PROCESSORS[name], merge_size=2, **options)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def is_stable(name: str, width: int, height: int, processed: Any) -> bool:
    """Whether the processor's own size is one that it would keep."""
    processor = PROCESSORS[name]
    _, rows, columns = processed["image_grid_thw"][0]
    rows, columns = rows * processor.patch_size, columns * processor.patch_size
    return stable_size(processor, height, width) == (rows, columns)


@EVERY
@examples(30)
@given(width=STAGES, height=STAGES)
def test_patches_are_those_that_the_models_own_processor_cuts(name: str, width: int, height: int) -> None:
    if max(width, height) > MAX_RATIO * min(width, height):
        return
    expected = PROCESSORS[name](images=[noise(width, height)], return_tensors="np")
    if not is_stable(name, width, height, expected):
        return
    image = store(name).process(noise(width, height))
    assert np.array_equal(image.pixels_PD, expected["pixel_values"])
    assert [image.grid_thw] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    assert (
        image.num_tokens * 4 == PROCESSORS[name].get_number_of_image_patches(height, width, {}) == len(image.pixels_PD)
    )


def processor_folder(folder: Path, **settings: Any) -> Path:
    """Write the settings of an image processor and return the folder."""
    kind = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind, **settings}))
    return folder


EDGES = {"shortest_edge": 3136, "longest_edge": 100352}
PIXELS = {"min_pixels": 3136, "max_pixels": 100352}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"size": None},
        {"size": EDGES},
        PIXELS,
        {**PIXELS, "size": None},
        {**PIXELS, "size": {"min_pixels": 4, "max_pixels": 5}},
        {"max_pixels": 50176, "size": EDGES},
        {"min_pixels": None, "max_pixels": None, "size": EDGES},
    ],
)
def test_limits_of_pixels_are_those_that_transformers_reads(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = processor_folder(tmp_path, **settings)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[noise(1000, 700)], return_tensors="np")
    found = ImageStore.find(folder)
    assert found is not None
    assert found.process(noise(1000, 700)).grid_thw == tuple(expected["image_grid_thw"][0].tolist())


@pytest.mark.parametrize(
    ("size", "same"),
    [
        (PIXELS, EDGES),
        ({**PIXELS, **EDGES}, EDGES),
        ({**PIXELS, "shortest_edge": None, "longest_edge": None}, EDGES),
        ({"max_pixels": 50176}, {"shortest_edge": 56 * 56, "longest_edge": 50176}),
        ({"shortest_edge": 3136, "max_pixels": 50176}, {"shortest_edge": 3136, "longest_edge": 50176}),
    ],
)
def test_limits_of_pixels_inside_size_are_the_limits(
    size: dict[str, Any], same: dict[str, Any], tmp_path: Path
) -> None:
    found = [ImageStore.find(processor_folder(tmp_path, size=given)) for given in (size, same)]
    grids = [None if store is None else store.process(noise(1000, 700)).grid_thw for store in found]
    assert grids[0] is not None
    assert grids[0] == grids[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 448},
        {"size": [448, 448]},
        {"size": {"height": 448, "width": 448}},
        {"size": {"shortest_edge": 3136}},
        {"size": {}},
        {"size": {"shortest_edge": "3136", "longest_edge": "100352"}},
        {"size": {"shortest_edge": 100352, "longest_edge": 3136}},
        {"size": {"shortest_edge": 10**12, "longest_edge": 10**12}},
        {"patch_size": 0},
        {"merge_size": None},
        {"image_mean": [0.5, 0.5]},
        {"image_mean": [float("nan"), 0.5, 0.5]},
        {"image_std": [0.5, 0.0, 0.5]},
    ],
)
def test_settings_that_cannot_process_a_image_are_a_user_error(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must have a preprocessor_config\.json that can process an image, got"):
        ImageStore.find(processor_folder(tmp_path, **settings))


@EVERY
@examples(30)
@given(short=st.integers(1, 20), ratio=st.floats(1, MAX_RATIO), is_tall=st.booleans())
def test_a_png_is_not_resized_again_and_gives_the_same_patches(
    name: str, short: int, ratio: float, is_tall: bool
) -> None:
    sides = (short, max(1, int(short * ratio)))
    original = noise(*(sides[::-1] if is_tall else sides))
    image = store(name).process(original)
    sent = Image.open(io.BytesIO(image.png))
    rows, columns = (n * PROCESSORS[name].patch_size for n in image.grid_thw[1:])
    assert (sent.format, sent.mode, sent.size) == ("PNG", "RGB", (columns, rows))
    received = PROCESSORS[name](images=[sent], return_tensors="np")
    assert np.array_equal(received["pixel_values"], image.pixels_PD)
    assert [tuple(grid) for grid in received["image_grid_thw"].tolist()] == [image.grid_thw]
    assert image.png is image.png


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("starter", (2100, 20), (2048, 32)),  # the processor itself gives 2624 x 32, over its 65,536 pixels
        ("qwen3_vl", (8000, 40), (6400, 32)),  # it gives 8000 x 32, a ratio of 250 that it would refuse
    ],
)
def test_a_very_thin_image_is_resized_until_its_size_is_stable(
    name: str, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert not is_stable(name, *size, PROCESSORS[name](images=[noise(*size)], return_tensors="np"))
    image = store(name).process(noise(*size))
    assert image.resized is not None
    assert image.resized.size == expected


@pytest.mark.parametrize("size", [(0, 0), (0, 4), (1, 300), (4000, 10)])
def test_a_image_that_no_model_can_see_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"must have pixels|aspect ratio"):
        store().process(Image.new("RGB", size))


@pytest.mark.parametrize("model", VISION_TYPES)
@examples(15)
@given(sizes=st.lists(st.tuples(STAGES, STAGES), min_size=1, max_size=3), ratio=st.integers(1, 60))
def test_placeholders_are_those_of_the_models_own_processor(
    model: str, sizes: list[tuple[int, int]], ratio: int
) -> None:
    import transformers

    renderer = renderer_for("starter")
    renderer = Renderer(renderer.tokenizer, store(model))
    # The processor insists on a video processor, which needs torchvision and has no part in this.
    cls: Any = getattr(transformers, ARCHITECTURES[model].processor)
    lenient = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, name, value: type(value)})
    processor = lenient(PROCESSORS[model], renderer.tokenizer, None, chat_template=renderer.chat_template)
    # The vocabulary is the starter's, whatever the family calls its placeholder.
    processor.image_token = "<|image_pad|>"
    processor.image_token_id = renderer.image_token_id
    sizes = [(w, h) for w, h in [*sizes, (20 * ratio, 20)] if max(w, h) <= 60 * min(w, h)]
    prompt = question("Find x.", *(noise(width, height) for width, height in sizes))
    text = processor.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    images = [part["image"] for part in prompt[0]["content"] if part["type"] == "image"]
    expected = processor(text=[text], images=images or None, return_tensors="np")
    rendered = renderer.prompt(prompt)
    assert rendered.ids == tuple(np.asarray(expected["input_ids"])[0].tolist())
    if images:
        assert np.array_equal(np.concatenate([i.pixels_PD for i in rendered.images]), expected["pixel_values"])
        assert [list(i.grid_thw) for i in rendered.images] == expected["image_grid_thw"].tolist()


def test_all_samples_share_one_image() -> None:
    images = store()
    shared = make_image(seed=1)
    first = images.process(shared)
    assert images.process(shared) is first
    assert images.process(shared.copy()) is first


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_a_image_of_another_mode_is_the_one_that_it_is_in_rgb(mode: str) -> None:
    images = store()
    other = noise(64, 64, mode)
    assert images.process(other) is images.process(other) is images.process(other.convert("RGB"))
    assert images.process(other).digest == image_digest(other.convert("RGB"))


def draw(image: Image.Image) -> None:
    ImageDraw.Draw(image).rectangle((0, 0, 9, 9), fill="red")


@pytest.mark.parametrize(
    "change",
    [
        draw,
        lambda image: image.putpixel((0, 0), (1, 2, 3)),
        lambda image: image.paste((1, 2, 3), (0, 0, 4, 4)),
        lambda image: image.putdata([(1, 2, 3)] * (64 * 64)),
        lambda image: image.thumbnail((32, 32)),
    ],
)
def test_an_object_whose_pixels_are_changed_is_another_image(change: Any) -> None:
    images = store()
    shared = make_image(seed=1)
    first = images.process(shared)
    change(shared)
    second = images.process(shared)
    assert second is not first
    assert second.digest == image_digest(shared.convert("RGB"))
    assert images.process(make_image(seed=1)) is first
    change(shared)
    assert images.process(shared).digest == image_digest(shared.convert("RGB"))


def test_what_is_drawn_on_an_image_later_does_not_change_its_patches() -> None:
    shared = make_image(seed=1)
    first = store().process(shared)
    draw(shared)
    assert np.array_equal(first.pixels_PD, store().process(make_image(seed=1)).pixels_PD)
    assert first.png == store().process(make_image(seed=1)).png


def test_the_store_keeps_to_its_bytes_and_lets_go_of_what_was_used_longest_ago() -> None:
    size = store().process(make_image()).num_bytes
    images = store(max_bytes=2 * size)
    one = images.process(make_image(seed=1))
    two = images.process(make_image(seed=2))
    assert images.process(make_image(seed=1)) is one
    images.process(make_image(seed=3))
    assert images.process(make_image(seed=1)) is one
    again = images.process(make_image(seed=2))
    assert again is not two and np.array_equal(again.pixels_PD, two.pixels_PD)


def test_an_image_without_its_image_has_no_png() -> None:
    image = ProcessedImage("abc", np.zeros((4, 8), np.float32), (1, 2, 2), 1)
    assert image.num_bytes == 4 * 8 * 4
    with pytest.raises(ValueError, match="image abc was made without its image"):
        _ = image.png
