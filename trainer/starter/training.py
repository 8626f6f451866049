"""Trains the starter's weights by a recipe.

It writes a checkpoint folder with weights in bfloat16, tokenizer, chat template, image processor settings and
`recipe.json` (settings, seed, seconds, losses, SHA-256 of the weights).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from agents.model.mrope import mrope_positions
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from trainer.starter.architecture import SHAPES, build_config, build_tokenizer, write_parts
from trainer.starter.demonstrations import Demonstration, Demonstrator, corpus
from trainer.starter.recipes import Recipe, Stage


@dataclass(frozen=True, eq=False)
class SftBatch:
    """Packed rows. Legend: B rows, T tokens, D demonstrations, H W picture sides.

    `document_BT` numbers the demonstrations inside a row from 1; 0 is padding. Pictures are in row order.
    """

    ids_BT: Tensor
    document_BT: Tensor
    loss_mask_BT: Tensor
    positions_3BT: Tensor
    images_DHW: Tensor

    def _map(self, function: Callable[[Tensor], Tensor]) -> SftBatch:
        return SftBatch(*(function(getattr(self, f.name)) for f in fields(self)))

    def to(self, device: torch.device) -> SftBatch:
        """Return the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SftBatch:
        """Return the batch in pinned memory (for the data loader), so that copies to the device overlap with work."""
        return self._map(Tensor.pin_memory)


@dataclass(frozen=True)
class Collator:
    """Packs demonstrations into rows of `width` tokens: longest first, each into the first row with room.

    The number of rows is a multiple of `row_step`, so that few shapes are compiled.
    """

    image_token_id: int
    pad_id: int
    row_step: int = 1
    width: int = 576
    patch_size: int = 16
    merge_size: int = 2

    def __call__(self, demonstrations: Sequence[Demonstration]) -> SftBatch:
        rows: list[list[Demonstration]] = []
        room: list[int] = []
        for d in sorted(demonstrations, key=lambda d: -len(d.ids_T)):
            length = len(d.ids_T)
            row = next((index for index, free in enumerate(room) if free >= length), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(max(self.width, length))
            rows[row].append(d)
            room[row] -= length
        width = max(self.width, max(len(d.ids_T) for d in demonstrations))
        height = -(-len(rows) // self.row_step) * self.row_step
        ids_BT = np.full((height, width), self.pad_id, dtype=np.int64)
        document_BT = np.zeros((height, width), dtype=np.int32)
        mask_BT = np.zeros((height, width), dtype=bool)
        positions_3BT = np.zeros((3, height, width), dtype=np.int64)
        for row, packed in enumerate(rows):
            end = 0
            for number, d in enumerate(packed, 1):
                grid = (1, *(side // self.patch_size for side in d.image_HW.shape))
                start, end = end, end + len(d.ids_T)
                ids_BT[row, start:end] = d.ids_T
                document_BT[row, start:end] = number
                mask_BT[row, start:end] = d.loss_mask_T
                positions_3BT[:, row, start:end] = mrope_positions(
                    d.ids_T, [grid], self.image_token_id, self.merge_size
                )
        images_DHW = np.stack([d.image_HW for packed in rows for d in packed])
        return SftBatch(*(torch.from_numpy(x) for x in (ids_BT, document_BT, mask_BT, positions_3BT, images_DHW)))


def patchify(images_DHW: Tensor, patch_size: int = 16, merge_size: int = 2, temporal: int = 2) -> Tensor:
    """Cut grey uint8 pictures into patches, (all patches, values), as the starter's image processor cuts RGB pictures.

    Values are scaled from 0..255 to -1..1. Patches are in merge-block order. The one frame fills the temporal axis.
    """
    count, height, width = images_DHW.shape
    rows, columns = height // patch_size // merge_size, width // patch_size // merge_size
    x = images_DHW.float() / 127.5 - 1.0
    x = x.view(count, rows, merge_size, patch_size, columns, merge_size, patch_size)
    x = x.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, 1, 1, patch_size * patch_size)
    return x.expand(-1, 3, temporal, -1).reshape(x.shape[0], -1)


def sft_loss(model: PolicyModel, batch: SftBatch) -> Tensor:
    """Return the mean cross-entropy over the tokens of the loss mask."""
    count, height, width = batch.images_DHW.shape
    grid = (1, height // 16, width // 16)
    tokens = count * grid[1] * grid[2] // model.merge_size**2
    vision = VisionBatch(
        pixels_PD=patchify(batch.images_DHW),
        grids=(grid,) * count,
        feature_index_M=torch.arange(tokens, device=batch.ids_BT.device),
    )
    same_BTT = batch.document_BT[:, :, None] == batch.document_BT[:, None, :]
    target_BT = batch.loss_mask_BT.roll(-1, dims=1)  # demonstrations begin with a prompt, so no target wraps around
    logits_NV = model(batch.ids_BT, batch.positions_3BT, same_BTT.tril()[:, None], target_BT, vision)
    return F.cross_entropy(logits_NV.float(), batch.ids_BT[batch.loss_mask_BT])


def lr_at(step: int, stage: Stage) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine down to 1 % of it."""
    if step < stage.warmup_steps:
        return stage.lr * (step + 1) / stage.warmup_steps
    progress = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def batches(recipe: Recipe, number: int, tokenizer: Any, num_workers: int, device: torch.device) -> Iterator[SftBatch]:
    """Yield the batches of stage `number` (from 0), made by `num_workers` processes (0: by this process)."""
    from torch.utils.data import DataLoader

    stage = recipe.stages[number]
    size = stage.steps * stage.batch_size
    demonstrator = Demonstrator(tokenizer, size, recipe.seed + number, stage.mixture, recipe.levels)
    image_token_id, pad_id = int(tokenizer.convert_tokens_to_ids("<|image_pad|>")), int(tokenizer.pad_token_id)
    collator = Collator(image_token_id, pad_id, row_step=16 if device.type == "cuda" else 1)
    loader: DataLoader[Any] = DataLoader(
        demonstrator,  # type: ignore[arg-type]
        batch_size=stage.batch_size,
        collate_fn=collator,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=8 if num_workers else None,
    )
    for batch in loader:
        yield batch.to(device)


def train_stage(
    model: PolicyModel,
    recipe: Recipe,
    number: int,
    tokenizer: Any,
    folder: Path,
    device: torch.device,
    num_workers: int,
) -> list[float]:
    """Train one stage in place and save the weights forty times on the way; return the mean loss of each fortieth."""
    stage = recipe.stages[number]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
    )
    losses: list[float] = []
    recent: list[Tensor] = []
    started = time.perf_counter()
    for step, batch in enumerate(batches(recipe, number, tokenizer, num_workers, device)):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, stage)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = sft_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        if (step + 1) % max(1, stage.steps // 40) == 0:
            losses.append(round(torch.stack(recent).mean().item(), 5))
            recent.clear()
            speed = (time.perf_counter() - started) / (step + 1)
            name = f"stage {number + 1}  step {step + 1}/{stage.steps}"
            print(f"{name}  loss {losses[-1]:.4f}  {speed * 1e3:.0f} ms/step", flush=True)
            model.save(folder)  # an interrupted run leaves its latest weights
    return losses


def train(
    recipe: Recipe,
    folder: Path,
    device: torch.device,
    num_workers: int = 0,
    init: Path | None = None,
    first_stage: int = 0,
) -> dict[str, Any]:
    """Train a starter and write its checkpoint to `folder`; return the content of `recipe.json`.

    With `init`, training continues at `first_stage` (from 0) from the checkpoint that the stages before it wrote.
    """
    torch.manual_seed(recipe.seed)
    started = time.perf_counter()
    if init:
        tokenizer, model = Renderer.from_checkpoint(init).tokenizer, PolicyModel.load(init)
    else:
        shape = SHAPES[recipe.shape]
        tokenizer = build_tokenizer(corpus(recipe.corpus_size, recipe.seed), shape.vocabulary)
        model = PolicyModel.from_config(build_config(shape, tokenizer))
    write_parts(folder, tokenizer, model.config)
    model.to(device)
    if device.type == "cuda":
        for block in model.blocks:  # each on its own: blocks of the same kind share one graph
            block.compile(dynamic=False)
    history = json.loads((init / "recipe.json").read_text(encoding="utf-8"))["stages"][:first_stage] if init else []
    for number in range(first_stage, len(recipe.stages)):
        stage_started = time.perf_counter()
        losses = train_stage(model, recipe, number, tokenizer, folder, device, num_workers)
        seconds = round(time.perf_counter() - stage_started, 1)
        history.append({"stage": number + 1, "seconds": seconds, "losses": losses})
    model.save(folder)
    report = {
        "recipe": asdict(recipe),
        "stages": history,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "recipe.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report
