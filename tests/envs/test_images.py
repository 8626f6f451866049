"""Claims about reading images: every stored form gives the same RGB pixels, and every bad one a one-line error."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from envs import images
from envs.errors import UserError
from envs.images import ImageAccess, load_image

FIELD = "rows.jsonl row 4 images[1]"


def make_image(mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    image = Image.new("RGB", size)
    image.putdata([(x * 40, y * 60, 200) for y in range(size[1]) for x in range(size[0])])
    return image.convert(mode)


def encode(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def png_of_claimed_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its one byte of pixels does not have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def error_of(value: object, root: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_image(value, FIELD, ImageAccess(root))
    message = str(caught.value)
    assert message.startswith(FIELD)
    assert "\n" not in message
    return message


def test_every_stored_form_gives_the_same_pixels(tmp_path: Path) -> None:
    data = encode(make_image())
    text = base64.b64encode(data).decode()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(data)
    forms = [
        data,
        bytearray(data),
        {"bytes": data, "path": None},
        {"bytes": data, "path": "gone.png"},
        {"bytes": None, "path": "sub/a.png"},
        {"path": "sub/a.png"},
        {"bytes": text},
        text,
        text[:40] + "\n" + text[40:],
        f"data:image/png;base64,{text}",
        "sub/a.png",
        str(tmp_path / "sub" / "a.png"),
        Path("sub/a.png"),
        make_image(),
    ]
    for form in forms:
        image = load_image(form, FIELD, ImageAccess(tmp_path))
        assert image.mode == "RGB"
        assert image.tobytes() == make_image().tobytes(), form


def test_base64_that_begins_like_an_absolute_path_is_read_as_base64(tmp_path: Path) -> None:
    text = base64.b64encode(encode(make_image(), "JPEG")).decode()
    assert text.startswith("/9j/")
    assert load_image(text, FIELD, ImageAccess(tmp_path)).size == (6, 4)


def test_an_existing_file_wins_over_base64(tmp_path: Path) -> None:
    text = base64.b64encode(encode(make_image())).decode()[:60].replace("/", "_")
    (tmp_path / text).write_bytes(encode(make_image(size=(3, 3))))
    assert load_image(text, FIELD, ImageAccess(tmp_path)).size == (3, 3)


def test_transparency_is_laid_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    loaded = load_image(encode(image), FIELD)
    assert loaded.getpixel((0, 0)) == (255, 255, 255)
    assert loaded.getpixel((1, 0)) == (127, 127, 127)


def test_a_transparent_palette_colour_is_laid_on_white() -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    loaded = load_image(encode(image, transparency=0), FIELD)
    assert [loaded.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (40, 50, 60)]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_png_mode_becomes_rgb(mode: str) -> None:
    loaded = load_image(encode(make_image(mode)), FIELD)
    assert loaded.mode == "RGB"
    assert loaded.tobytes() == make_image(mode).convert("RGB").tobytes()


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    image = Image.new("I;16", (3, 1))
    for x, value in enumerate([0, 100 * 257, 65535]):
        image.putpixel((x, 0), value)
    loaded = load_image(encode(image), FIELD)
    assert [loaded.getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (100,) * 3, (255,) * 3]


def test_a_rotated_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert load_image(encode(make_image(), "JPEG", exif=exif), FIELD).size == (4, 6)


def test_an_animation_gives_its_first_frame() -> None:
    first, second = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    data = encode(first, "GIF", save_all=True, append_images=[second])
    assert load_image(data, FIELD).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("image_format", images.FORMATS)
def test_a_image_cut_short_is_refused_in_every_format(image_format: str) -> None:
    data = encode(make_image(size=(64, 48)), image_format)
    assert load_image(data, FIELD).size == (64, 48)
    for kept in (0.3, 0.6, 0.9):
        error_of(data[: int(len(data) * kept)])


def test_a_png_with_a_flipped_bit_is_refused() -> None:
    data = bytearray(encode(make_image(size=(64, 48))))
    data[len(data) // 2] ^= 1
    assert "must be a whole image" in error_of(bytes(data))


@given(st.binary(max_size=200), st.integers(0, 60))
def test_damage_of_any_kind_is_a_user_error_or_a_image(junk: bytes, at: int) -> None:
    data = encode(make_image())
    try:
        assert load_image(data[:at] + junk + data[at + 1 :], FIELD).mode == "RGB"
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("size", [(10_000, 6_000), (15_000, 10_000), (100_000, 100_000)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_many_pixels_are_refused_before_they_are_decoded(size: tuple[int, int]) -> None:
    assert "at most 50000000 pixels" in error_of(png_of_claimed_size(*size))


def test_too_many_pixels_are_refused_in_an_image_object_too() -> None:
    with pytest.raises(UserError, match="at most 10 pixels, got 6x4"):
        load_image(make_image(), FIELD, max_pixels=10)


def test_a_file_over_the_byte_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "big.png").open("wb") as file:
        file.truncate(images.MAX_BYTES + 1)
    assert "at most 67108864 bytes, got 67108865" in error_of("big.png", tmp_path)


@pytest.mark.parametrize("shape", [str, lambda text: f"data:image/png;base64,{text}", lambda text: {"bytes": text}])
def test_base64_over_the_byte_limit_is_not_decoded(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    monkeypatch.setattr(images.base64, "b64decode", lambda *args, **options: pytest.fail("decoded"))
    assert "at most 1000 bytes, got" in error_of(shape("A" * 2400))


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_a_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    assert f"must have pixels, got {size[0]}x{size[1]}" in error_of(Image.new("RGB", size))


@pytest.mark.parametrize("image_format", ["TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(image_format: str) -> None:
    assert "give one of PNG, JPEG, WEBP, GIF, BMP" in error_of(encode(make_image(size=(32, 32)), image_format))


def test_a_path_may_not_leave_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    outside = tmp_path / "outside.png"
    outside.write_bytes(encode(make_image()))
    (root / "link.png").symlink_to(outside)
    for value in ("../outside.png", str(outside), "link.png", {"bytes": None, "path": "../outside.png"}):
        assert "inside the data set's folder" in error_of(value, root)
        assert load_image(value, FIELD, ImageAccess(root, True)).size == (6, 4)


def test_without_a_folder_no_path_is_read_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(encode(make_image()))
    monkeypatch.chdir(tmp_path)
    assert "no such file" in error_of("a.png")
    assert "must be an image, not a path" in error_of(str(tmp_path / "a.png"))
    assert load_image(str(tmp_path / "a.png"), FIELD, ImageAccess(None, True)).size == (6, 4)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("gone.png", "no such file"),
        ("", "no such file"),
        ("a\0b", "no such file"),
        ("x" * 10_000, "no such file"),
        (base64.b64encode(b"no image at all").decode(), "no such file"),
        ("https://example.org/a.png", "must not be a URL"),
        ("data:image/png,raw", "must be a base64 data URI"),
        ("data:image/png;base64,%%%", "must be base64"),
        ({"bytes": None, "path": None}, "must be an image"),
        ({"url": "a.png"}, "no such file"),
        ({"image": {"image": {"bytes": b""}}}, "must be an image"),
        ({"image": "a.png", "max_pixels": 50_176}, "must have no max_pixels of its own, got 50176"),
        (None, "must be an image"),
        (7, "must be an image"),
        (b"", "must be an image of a known format"),
    ],
)
def test_what_is_no_image_is_refused_by_name(value: object, rule: str, tmp_path: Path) -> None:
    assert rule in error_of(value, tmp_path)
