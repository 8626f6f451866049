"""Claims about the policy network: its logits are those of plain Transformers, and shared images change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from agents.model import policy as policy_module
from agents.model.mrope import mrope_positions
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Rendered, Renderer
from envs.errors import UserError
from tests.prompts import make_image, question

TEXT = "Find the measure of angle ABC in the figure."


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> PolicyModel:
    return PolicyModel.load(checkpoint)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Qwen3VLForConditionalGeneration:
    """The network as Transformers runs it, with its own positions and one attention call an image."""
    return Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def plain_logits(plain: Qwen3VLForConditionalGeneration, rendered: Rendered) -> Tensor:
    ids = torch.tensor([rendered.ids])
    images: dict[str, Tensor] = {}
    if rendered.images:
        images["pixel_values"] = torch.from_numpy(np.concatenate([i.pixels_PD for i in rendered.images]))
        images["image_grid_thw"] = torch.tensor([i.grid_thw for i in rendered.images])
    types = (ids == plain.config.image_token_id).int()
    return plain(input_ids=ids, mm_token_type_ids=types, use_cache=False, **images).logits[0]


@torch.no_grad()
def policy_logits(policy: PolicyModel, streams: Sequence[Rendered]) -> list[Tensor]:
    """Return the (T, V) logits of every stream, all run in one batch padded on the right."""
    width = max(len(s.ids) for s in streams)
    ids_BT = torch.zeros(len(streams), width, dtype=torch.long)
    positions_3BT = torch.zeros(3, len(streams), width, dtype=torch.long)
    real_BT = torch.zeros(len(streams), width, dtype=torch.bool)
    for row, s in enumerate(streams):
        length = len(s.ids)
        ids_T = np.array(s.ids)
        grids = [i.grid_thw for i in s.images]
        positions = mrope_positions(ids_T, grids, policy.image_token_id, policy.merge_size)
        ids_BT[row, :length], real_BT[row, :length] = torch.from_numpy(ids_T), True
        positions_3BT[:, row, :length] = torch.from_numpy(positions)
    vision = VisionBatch.build([s.images for s in streams], "cpu")
    logits = policy(ids_BT, positions_3BT, None, real_BT, vision)
    return list(logits.split([len(s.ids) for s in streams]))


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize(
    "images",
    [
        (),
        (make_image(64, 64),),
        (make_image(96, 64, 1), make_image(96, 64, 2)),
        (make_image(96, 64, 1), make_image(32, 96, 2), make_image(64, 96, 3)),
        (make_image(64, 64, 1), make_image(32, 64, 2), make_image(64, 64, 3), make_image(64, 32, 4)),
    ],
    ids=["none", "one", "two of one size", "three sizes", "equal and different sizes"],
)
def test_logits_equal_plain_transformers(
    policy: PolicyModel,
    plain: Qwen3VLForConditionalGeneration,
    renderer: Renderer,
    images: tuple[Image.Image, ...],
) -> None:
    rendered = renderer.prompt(question(TEXT, *images))
    (got,) = policy_logits(policy, [rendered])
    expected = plain_logits(plain, rendered)
    assert expected.std() > 0.5  # weights large enough to tell a wrong network from a right one
    assert_close(got, expected)


def test_a_padded_batch_of_streams_with_different_images_equals_one_by_one(
    policy: PolicyModel, plain: Qwen3VLForConditionalGeneration, renderer: Renderer
) -> None:
    streams = [
        renderer.prompt(question("x?")),
        renderer.prompt(question(TEXT, make_image(96, 64, 1), make_image(32, 32, 2))),
        renderer.prompt(question("Find x.", make_image(32, 96, 3))),
        renderer.prompt(question(TEXT)),
    ]
    for got, rendered in zip(policy_logits(policy, streams), streams, strict=True):
        assert_close(got, plain_logits(plain, rendered))


def test_an_image_shown_by_several_streams_is_encoded_once_with_the_same_result(
    policy: PolicyModel, plain: Qwen3VLForConditionalGeneration, renderer: Renderer
) -> None:
    shared, own = make_image(96, 64, 1), make_image(64, 64, 2)
    streams = [
        renderer.prompt(question("x?", shared)),
        renderer.prompt(question("Find x.", own, shared)),
        renderer.prompt(question(TEXT, shared, shared)),
    ]
    vision = VisionBatch.build([s.images for s in streams], "cpu")
    assert vision is not None
    assert vision.grids == ((1, 4, 6), (1, 4, 4))
    assert vision.feature_index_M.tolist() == [*range(6), *range(6, 10), *range(6), *range(6), *range(6)]
    for got, rendered in zip(policy_logits(policy, streams), streams, strict=True):
        assert_close(got, plain_logits(plain, rendered))


def test_another_image_gives_other_logits(policy: PolicyModel, renderer: Renderer) -> None:
    one, other = policy_logits(policy, [renderer.prompt(question("x?", make_image(seed=s))) for s in (1, 2)])
    before = renderer.prompt(question("x?", make_image(seed=1))).ids.index(policy.image_token_id)
    assert_close(one[:before], other[:before])
    assert (one[-1] - other[-1]).abs().max() > 0.1


def test_only_the_chosen_places_come_back_in_row_order(policy: PolicyModel, renderer: Renderer) -> None:
    ids = torch.tensor([renderer.prompt(question(text)).ids[:6] for text in ("x?", "y?")])
    positions = torch.arange(6).expand(3, 2, 6)
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    chosen = torch.zeros_like(everywhere)
    chosen[0, [1, 4]] = chosen[1, 3] = True
    with torch.no_grad():
        everything = policy(ids, positions, None, everywhere).view(2, 6, -1)
        some = policy(ids, positions, None, chosen)
    torch.testing.assert_close(some, torch.stack([everything[0, 1], everything[0, 4], everything[1, 3]]))


def test_the_tower_attends_in_the_type_of_autocast(
    policy: PolicyModel, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights in float32 too: a GPU then needs no padded batches, whose masks are the largest of all inputs."""
    asked = []
    needed = policy_module.needs_buckets
    monkeypatch.setattr(policy_module, "needs_buckets", lambda *given: asked.append(given[1]) or needed(*given))
    vision = VisionBatch.build([renderer.prompt(question("x?", make_image())).images], "cpu")
    assert vision is not None
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        policy.encode_images(vision.pixels_PD, vision.grids)
    policy.encode_images(vision.pixels_PD, vision.grids)
    assert asked == [torch.bfloat16, torch.float32]


def test_no_stream_with_an_image_is_no_vision_batch() -> None:
    assert VisionBatch.build([(), ()], "cpu") is None


def test_a_folder_that_is_no_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model: must be a model folder"):
        PolicyModel.load(tmp_path)
