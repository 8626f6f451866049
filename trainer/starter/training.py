"""Trains the starter's weights by a recipe.

It writes a checkpoint folder with weights in bfloat16, tokenizer, chat template, image processor settings,
`recipe.json` (settings, seed, seconds, scores, SHA-256 of the weights), a model card, and `log.jsonl`. Until the end,
`state.pt` there holds all that the same command needs to go on.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from envs.errors import UserError
from trainer.starter.architecture import SHAPES, build_config, build_tokenizer, write_parts
from trainer.starter.attempts import play
from trainer.starter.batches import Collator, SftBatch, taught_logits
from trainer.starter.card import write_card
from trainer.starter.demonstrations import corpus
from trainer.starter.lessons import Lessons, OwnAttempts
from trainer.starter.misreadings import Solutions, misreadings
from trainer.starter.plans import Attempt
from trainer.starter.progress import Probe
from trainer.starter.recipes import Recipe, Stage

#: Rows of the log in each stage.
LOG_ROWS = 30
STATE, LOG = "state.pt", "log.jsonl"
SAVE_EVERY_S = 120
#: Tokens of a row: the longest stream with zooms, and the longest other.
WIDTHS = {True: 1152, False: 576}
#: On a GPU each shape of batch is compiled once: few shapes, and room for all of them.
GPU_STEPS = {"row_step": 16, "picture_step": 128, "patch_step": 8192}
MAX_GRAPHS = 64


def sft_loss(model: PolicyModel, batch: SftBatch) -> Tensor:
    """Return the mean cross-entropy over the tokens of the loss mask."""
    return F.cross_entropy(taught_logits(model, batch).float(), batch.ids_BT[batch.loss_mask_BT])


def lr_at(step: int, stage: Stage) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine down to the stage's `final_lr` of it."""
    if step < stage.warmup_steps:
        return stage.lr * (step + 1) / stage.warmup_steps
    progress = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.lr * (stage.final_lr + (1 - stage.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class Position:
    """Where a run stands: the next step of a stage (both from 0), the stages before it, and what the policy played."""

    stage: int = 0
    step: int = 0
    seconds: float = 0.0
    stage_began_s: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[OwnAttempts] = field(default_factory=list)

    def begin_next_stage(self) -> None:
        """Move to the first step of the stage after this one."""
        self.stage, self.step, self.attempts, self.stage_began_s = self.stage + 1, 0, [], self.seconds


class StarterRun:
    """One training, from nothing or from its last saved state.

    Example::

        run = StarterRun(RECIPES["starter"], Path("runs/starter"), torch.device("cuda"), num_workers=15)
        run.train(max_minutes=9)      # False: not done; the same two lines go on
    """

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device, num_workers: int = 0) -> None:
        self.recipe, self.folder, self.device, self.num_workers = recipe, folder, device, num_workers
        self.position = Position()
        torch.manual_seed(recipe.seed)
        state = self._read_state()
        if state:
            self.tokenizer = Renderer.from_checkpoint(folder).tokenizer
        else:
            self.tokenizer = build_tokenizer(corpus(recipe.corpus_size, recipe.seed), SHAPES[recipe.shape].vocabulary)
        self.model = PolicyModel.from_config(build_config(SHAPES[recipe.shape], self.tokenizer))
        write_parts(folder, self.tokenizer, self.model.config)
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
        )
        if state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.position = state["position"]
        if device.type == "cuda":
            torch._dynamo.config.cache_size_limit = MAX_GRAPHS
            for block in self.model.blocks:  # each on its own: blocks of the same kind share one graph
                block.compile(dynamic=False)
        image_token_id, pad_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>"), self.tokenizer.pad_token_id
        self._collator = Collator(image_token_id, pad_id, **(GPU_STEPS if device.type == "cuda" else {}))

    def train(self, max_minutes: float = math.inf) -> bool:
        """Train to the end and write the report, or stop after so many minutes with the state saved.

        Returns whether the training is done. Every call gets on by a row of the log at least.
        """
        clock = _Clock(self.position.seconds, max_minutes)
        while self.position.stage < len(self.recipe.stages):
            is_ended = self._train_stage(clock)
            self.position.seconds = clock.total_s
            if is_ended:
                self.position.begin_next_stage()
            self._save_state()
            if clock.is_over and self.position.stage < len(self.recipe.stages):
                return False
        self._finish(clock.total_s)
        return True

    def _train_stage(self, clock: _Clock) -> bool:
        """Train the current stage from where it stands; return whether it has ended, or else the time is over."""
        position, number = self.position, self.position.stage
        stage = self.recipe.stages[number]
        probe = Probe(self.tokenizer, self.recipe, number, self._stage_collator(stage))
        every, losses = max(1, stage.steps // LOG_ROWS), []
        with closing(self._batches(stage, number)) as batches:
            for batch in batches:
                losses.append(self._step(batch, lr_at(position.step, stage)))
                position.step += 1
                if position.step % every and position.step < stage.steps:
                    continue
                scores = probe.measure(self.model, self.device)
                self._log(clock, torch.stack(losses).mean().item(), scores.as_row())
                losses.clear()
                if position.step == stage.steps or (stage.until is not None and scores.reading >= stage.until):
                    seconds = round(clock.total_s - position.stage_began_s, 1)
                    report = {"stage": number + 1, "steps": position.step, "seconds": seconds}
                    position.history.append({**report, **scores.as_row()})
                    return True
                if clock.is_over:
                    return False
                if clock.total_s - position.seconds > SAVE_EVERY_S:
                    position.seconds = clock.total_s
                    self._save_state()
        raise AssertionError(f"stage {number + 1} ended at step {position.step} of {stage.steps}")

    def _step(self, batch: SftBatch, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = sft_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _stage_collator(self, stage: Stage) -> Collator:
        return replace(self._collator, width=WIDTHS[stage.zoom_frac > 0])

    def _lessons(self, stage: Stage, number: int) -> Lessons:
        return Lessons(self.tokenizer, stage, self.recipe.seed + number, attempts=self.position.attempts)

    def _own_attempts(self, stage: Stage, number: int, round_number: int) -> list[OwnAttempts]:
        """Return wrong attempts of today's policy at problems of the stage: as it plays them, and as it reads them."""
        lessons = self._lessons(stage, number)
        first = round_number * stage.num_attempts
        indices = (
            place * stage.lessons_per_drawing % len(lessons) for place in range(first, first + stage.num_attempts)
        )
        played = play(self.model, self.tokenizer, lessons.drawn, indices, self.device)
        read = self._read(lessons, stage, number, round_number)
        counts = f"played {stage.num_attempts} problems and read {stage.num_readings} pictures"
        print(f"stage {number + 1}: {counts}, {len(played)} and {len(read)} wrong attempts", flush=True)
        return played + read

    def _read(self, lessons: Lessons, stage: Stage, number: int, round_number: int) -> list[OwnAttempts]:
        """Return what the policy misreads in pictures of lessons that it has not seen yet in this stage."""
        draw = Random(f"read/{self.recipe.seed}/{number}/{round_number}")
        unseen = range(self.position.step * stage.batch_size, len(lessons))
        indices = sorted(draw.sample(unseen, min(stage.num_readings, len(unseen))))  # neighbours share drawings
        solutions = Solutions(lessons, indices, self._stage_collator(stage))
        batches = self._loader(solutions, range(len(solutions)), stage, solutions.collate)
        return misreadings(self.model, self.tokenizer, batches, self.device)

    def _batches(self, stage: Stage, number: int) -> Generator[SftBatch, None, None]:
        """Yield the batches of the rest of the stage; at the beginning of a round, the policy makes its attempts."""
        position, per_round = self.position, -(-stage.steps // stage.rounds)
        size = stage.batch_size
        while position.step < stage.steps:
            round_number = position.step // per_round
            if stage.attempts_frac and position.step % per_round == 0:
                position.attempts = self._own_attempts(stage, number, round_number)
            end = min(stage.steps, (round_number + 1) * per_round)
            indices = range(position.step * size, end * size)
            for batch in self._loader(self._lessons(stage, number), indices, stage, self._stage_collator(stage)):
                yield batch.to(self.device)

    def _loader(self, items: Any, indices: range, stage: Stage, collate: Callable[..., Any]) -> Iterable[Any]:
        """Return the batches of items at indices, made by `num_workers` processes (0: by this process)."""
        size = stage.batch_size
        return DataLoader(
            _Sturdy(items, stage.lessons_per_drawing),
            batch_sampler=[list(indices[start : start + size]) for start in range(0, len(indices), size)],
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=8 if self.num_workers else None,
        )

    def _log(self, clock: _Clock, loss: float, scores: dict[str, Any]) -> None:
        """Write a row of the log and print it, with the time at which the run will end if no stage ends early."""
        stages, position = self.recipe.stages, self.position
        stage = stages[position.stage]
        left = sum(s.num_lessons for s in stages[position.stage :]) - position.step * stage.batch_size
        rate = clock.rate(position.step * stage.batch_size, position.stage)
        row = {
            "stage": position.stage + 1,
            "step": position.step,
            "seconds": round(clock.total_s, 1),
            "lessons_per_s": round(rate, 1),
            "eta_s": round(left / rate, 1),
            "lr": lr_at(position.step - 1, stage),
            "loss": round(loss, 5),
            **scores,
        }
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"stage {row['stage']}/{len(stages)}  step {position.step}/{stage.steps}  loss {loss:.4f}  "
            f"reading {scores['reading']:.3f}  exact {scores['exact']:.3f}  {rate:.0f} lessons/s  "
            f"{clock.total_s / 60:.1f} min, {left / rate / 60:.1f} to go",
            flush=True,
        )

    def _read_state(self) -> dict[str, Any] | None:
        """Return the saved state of the same recipe, None if there is none."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fix = f"give another folder ({error.strerror})"
            raise UserError("--out", "must be a folder that can be written", str(self.folder), fix) from error
        if (self.folder / "recipe.json").exists():
            rule, fix = "must not hold a finished starter", "give another folder"
            raise UserError("--out", rule, str(self.folder), fix)
        if not (self.folder / STATE).exists():
            return None
        try:
            with torch.serialization.safe_globals([Position, OwnAttempts, Attempt]):  # other code is not run
                state = torch.load(self.folder / STATE, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            rule, fix = f"must hold a whole {STATE} of this command", "delete that file, or give another folder"
            raise UserError("--out", rule, str(self.folder), fix) from error
        if not isinstance(state, dict) or state.get("recipe") != asdict(self.recipe):
            raise UserError("--out", "must hold a run of the same recipe", str(self.folder), "give another folder")
        return state

    def _save_state(self) -> None:
        """Save the run where it stands, whole or not at all, and its weights as a model folder."""
        state = {"recipe": asdict(self.recipe), "position": self.position}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.folder / f"{STATE}.part")
        (self.folder / f"{STATE}.part").replace(self.folder / STATE)
        self.model.save(self.folder)

    def _finish(self, seconds: float) -> None:
        """Write weights, report and card, and delete what only an unfinished run needs."""
        self.model.save(self.folder)
        report = {
            "recipe": asdict(self.recipe),
            "stages": self.position.history,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "seconds": round(seconds, 1),
            "sha256": hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest(),
        }
        write_card(self.folder, report)
        (self.folder / "recipe.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (self.folder / STATE).unlink(missing_ok=True)


class _Sturdy(Dataset[Any]):
    """Items of which one that cannot be made is said, and replaced by one of another drawing.

    That is the one `step` items later. If it cannot be made either, that is an error.
    """

    def __init__(self, items: Any, step: int) -> None:
        self._items, self._step = items, step

    def __getitem__(self, index: int) -> Any:
        try:
            return self._items[index]
        except Exception as error:
            print(f"lesson {index} is left out: {error!r}", flush=True)
            return self._items[(index + self._step) % len(self._items)]


class _Clock:
    """Seconds of a run over all its parts, and when this part is over."""

    def __init__(self, before_s: float, max_minutes: float) -> None:
        self._before_s, self._began, self._max_s = before_s, time.perf_counter(), 60 * max_minutes
        self._mark: tuple[int, int, float] | None = None  # stage, lessons, time

    @property
    def total_s(self) -> float:
        return self._before_s + time.perf_counter() - self._began

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self._began > self._max_s

    def rate(self, lessons: int, stage: int) -> float:
        """Return the lessons per second since the last call in the same stage, or since the start."""
        now = time.perf_counter()
        if self._mark and self._mark[0] == stage:
            done, since = lessons - self._mark[1], now - self._mark[2]
        else:
            done, since = lessons, now - (self._mark[2] if self._mark else self._began)
        self._mark = stage, lessons, now
        return max(done, 1) / since
