"""Supervised training of the starter model: `python -m trainer.sft --recipe starter`.

In: a recipe. Out: a checkpoint folder with weights in bfloat16, tokenizer, chat template, image processor settings and
`recipe.json` (settings, seed, seconds, losses, SHA-256 of the weights).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from agents.model import PolicyModel, VisionBatch
from agents.positions import mrope_positions
from envs.errors import UserError
from trainer.starter.architecture import SHAPES, build_config, build_tokenizer, write_parts
from trainer.starter.demonstrations import Demonstration, Demonstrator, Mixture, corpus


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a starter's weights but the hardware."""

    shape: str
    steps: int
    batch_size: int
    lr: float
    warmup_steps: int
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    seed: int = 17
    levels: tuple[int, ...] = (1, 2, 3)
    corpus_size: int = 20_000
    reuse: int = 1  # how often a batch of demonstrations is trained on
    mixture: Mixture = field(default_factory=Mixture)


RECIPES = {
    "starter": Recipe("starter", steps=20_000, batch_size=384, lr=1.2e-3, warmup_steps=400),
    "smoke": Recipe("smoke", steps=150, batch_size=16, lr=2e-3, warmup_steps=10, levels=(1,), corpus_size=2_000),
}


@dataclass(frozen=True, eq=False)
class SftBatch:
    """Packed rows. Legend: B rows, T tokens, D demonstrations, H W picture sides.

    `document_BT` numbers the demonstrations inside a row from 1; 0 is padding. Pictures stand in row order.
    """

    ids_BT: Tensor
    document_BT: Tensor
    loss_mask_BT: Tensor
    positions_3BT: Tensor
    images_DHW: Tensor

    def _map(self, function: Callable[[Tensor], Tensor]) -> SftBatch:
        return SftBatch(*(function(getattr(self, f.name)) for f in fields(self)))

    def to(self, device: torch.device) -> SftBatch:
        """Move to a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SftBatch:
        """Called by the data loader, so that copies to the device overlap with work."""
        return self._map(Tensor.pin_memory)


@dataclass(frozen=True)
class Collator:
    """Packs demonstrations into rows of `width` tokens, longest first, each where it still fits."""

    image_token_id: int
    pad_id: int
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
        height = -(-len(rows) // 16) * 16  # few shapes, so that few graphs are compiled
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
                positions_3BT[:, row, start:end] = mrope_positions(d.ids_T, [grid], self.image_token_id, self.merge_size)
        images_DHW = np.stack([d.image_HW for packed in rows for d in packed])
        return SftBatch(*(torch.from_numpy(x) for x in (ids_BT, document_BT, mask_BT, positions_3BT, images_DHW)))


def patchify(images_DHW: Tensor, patch_size: int = 16, merge_size: int = 2, temporal: int = 2) -> Tensor:
    """Cut uint8 grey pictures into patches, (patches of all, values), as the starter's image processor does for RGB ones.

    Values go from 0..255 to -1..1; patches come in merge-block order; the one frame fills the temporal axis.
    """
    count, height, width = images_DHW.shape
    rows, columns = height // patch_size // merge_size, width // patch_size // merge_size
    x = images_DHW.float() / 127.5 - 1.0
    x = x.view(count, rows, merge_size, patch_size, columns, merge_size, patch_size)
    x = x.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, 1, 1, patch_size * patch_size)
    return x.expand(-1, 3, temporal, -1).reshape(x.shape[0], -1)


def sft_loss(model: PolicyModel, batch: SftBatch) -> Tensor:
    """Return the mean cross-entropy over the tokens that count."""
    count, height, width = batch.images_DHW.shape
    grid = (1, height // 16, width // 16)
    tokens = count * grid[1] * grid[2] // model.merge_size**2
    vision = VisionBatch(
        pixels_PD=patchify(batch.images_DHW),
        grids=(grid,) * count,
        feature_index_N=torch.arange(tokens, device=batch.ids_BT.device),
    )
    same_BTT = batch.document_BT[:, :, None] == batch.document_BT[:, None, :]
    target_BT = batch.loss_mask_BT.roll(-1, dims=1)  # every demonstration begins with a prompt, so no target wraps around
    logits_NV = model(batch.ids_BT, batch.positions_3BT, same_BTT.tril()[:, None], target_BT, vision)
    return F.cross_entropy(logits_NV.float(), batch.ids_BT[batch.loss_mask_BT])


def lr_at(step: int, recipe: Recipe) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine down to a hundredth."""
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def batches(recipe: Recipe, tokenizer: Any, num_workers: int, device: torch.device) -> Iterator[SftBatch]:
    """Yield the recipe's batches in order, made by `num_workers` processes (0: in this one)."""
    from torch.utils.data import DataLoader

    fresh = -(-recipe.steps // recipe.reuse)
    demonstrator = Demonstrator(tokenizer, fresh * recipe.batch_size, recipe.seed, recipe.mixture, recipe.levels)
    collator = Collator(int(tokenizer.convert_tokens_to_ids("<|image_pad|>")), int(tokenizer.pad_token_id))
    loader: DataLoader[Any] = DataLoader(
        demonstrator,  # type: ignore[arg-type]
        batch_size=recipe.batch_size,
        collate_fn=collator,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=8 if num_workers else None,
    )
    rng = np.random.default_rng(recipe.seed)
    ring: list[SftBatch] = []
    for batch in loader:
        moved = batch.to(device)
        yield moved
        ring.append(moved)
        if len(ring) > 256:
            ring.pop(0)
        for _ in range(recipe.reuse - 1):
            yield ring[int(rng.integers(len(ring)))]


def train(recipe: Recipe, folder: Path, device: torch.device, num_workers: int, budget_s: float) -> dict[str, Any]:
    """Train a starter and write its checkpoint to `folder`; return what `recipe.json` holds.

    `budget_s` > 0 fits the schedule into that time at the speed of steps 100 to 300; the number of steps taken is
    reported.
    """
    torch.manual_seed(recipe.seed)
    started = time.perf_counter()
    shape = SHAPES[recipe.shape]
    tokenizer = build_tokenizer(corpus(recipe.corpus_size, recipe.seed), shape.vocabulary)
    config = build_config(shape, tokenizer)
    write_parts(folder, tokenizer, config)
    model = PolicyModel.from_config(config).to(device)
    if device.type == "cuda":
        compile_blocks(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
    )
    losses: list[float] = []
    recent: list[Tensor] = []
    trained = 0
    loop_started = warm = time.perf_counter()
    for step, batch in enumerate(batches(recipe, tokenizer, num_workers, device)):
        if step == 100:
            warm = time.perf_counter()
        if budget_s and step == 300:
            now = time.perf_counter()
            steps = 300 + int((budget_s - (now - started)) / (now - warm) * 200)
            recipe = Recipe(**{**asdict(recipe), "steps": steps, "mixture": recipe.mixture})
        if step >= recipe.steps or (budget_s and time.perf_counter() - started > 1.1 * budget_s):
            break
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, recipe)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = sft_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        trained += 1
        if (step + 1) % max(1, recipe.steps // 40) == 0:
            losses.append(round(torch.stack(recent).mean().item(), 5))
            recent.clear()
            speed = (time.perf_counter() - loop_started) / (step + 1)
            print(f"step {step + 1}/{recipe.steps}  loss {losses[-1]:.4f}  {speed * 1e3:.0f} ms/step", flush=True)
            model.save(folder)  # a run that is cut off leaves its latest weights
    model.save(folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    report = {
        "recipe": asdict(recipe),
        "steps_taken": trained,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "losses": losses,
        "sha256": digest,
    }
    (folder / "recipe.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def compile_blocks(model: PolicyModel) -> None:
    """Compile every transformer block on its own: the blocks of a tower share one graph."""
    inner: Any = model.backbone.model
    for block in [*inner.language_model.layers, *inner.visual.blocks]:
        block.compile(dynamic=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.sft", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="starter", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=Path("runs/sft"), help="checkpoint folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that draw demonstrations; 0: none")
    parser.add_argument("--budget-s", type=float, default=0, help="seconds to fit the schedule into; 0: all steps")
    parser.add_argument("--steps", type=int, default=0, help="steps to take instead of the recipe's; 0: the recipe's")
    parser.add_argument("--reuse", type=int, default=0, help="times to train on a batch instead of the recipe's")
    args = parser.parse_args(argv)
    try:
        if args.recipe not in RECIPES:
            raise UserError("--recipe", "must be a known recipe", args.recipe, f"give one of {', '.join(RECIPES)}")
        recipe = RECIPES[args.recipe]
        changes = {"steps": args.steps or recipe.steps, "reuse": args.reuse or recipe.reuse}
        recipe = Recipe(**{**asdict(recipe), **changes, "mixture": recipe.mixture})
        report = train(recipe, args.out, torch.device(args.device), args.num_workers, args.budget_s)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({key: report[key] for key in ("steps_taken", "parameters", "seconds", "sha256")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
