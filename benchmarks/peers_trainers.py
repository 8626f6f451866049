"""The trainers of `benchmarks.peers`, each with its own settings: `python -m benchmarks.peers_trainers trl FOLDER`.

The folder holds the task and the model; a trainer writes `steps.jsonl` there. Each runs in the environment of its
packages, so that it imports only its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers_task import (
    LR,
    MAX_TOKENS,
    TURNS,
    Steps,
    Task,
    prompt_images,
    question,
    reward,
    shown,
    write_model,
)

#: The server's share of the memory, besides a learner of 2 B parameters with its float32 weights and moments.
SERVER = {
    "engine": "sglang",
    "mem_fraction": 0.35,
    "context_length": 4096,
    "max_tokens_per_microbatch": 16384,
    # Without it, a learner of 2 B ran out of the memory that such a server leaves on an H100.
    "recompute": 1.0,
}


def ours(folder: Path, task: Task) -> None:
    """Train with `trueturn.train`: on a GPU SGLang writes, on the learner's own card."""
    import trueturn as tt
    from envs import ToolEnv, tool
    from trainer.callbacks import Callback

    steps = Steps(folder)

    class Game(ToolEnv):
        @tool
        def look(self) -> Any:
            """Look at the image once more."""
            return shown(task)

    class Clock(Callback):
        def on_step_end(self, step: int, row: Mapping[str, float]) -> None:
            written = row["tokens_per_episode"] * row["episodes"]
            peak = row.get("learner_peak_gib", 0.0)
            steps.end(written, total[-1], kl=row["rollout_train_kl"], learner_peak_gib=peak)
            total.append(0)

    total = [0]

    def scored(trajectory: Any) -> float:
        total[-1] += len(trajectory.ids_T)
        return reward(trajectory.ids_T[trajectory.mask_T])

    rows = [
        {"problem": question(number), "images": images, "answer": "1"}
        for number, images in enumerate(prompt_images(task))
    ]
    on_gpu = task.device.startswith("cuda")
    settings: Any = SERVER if on_gpu else {"engine": "hf"}
    tt.train(
        tt.env(Game, data=rows, max_turns=TURNS, max_new_tokens=MAX_TOKENS),
        model=str(folder / "model"),
        reward_funcs=[scored],
        callbacks=[Clock()],
        steps=task.steps,
        problems_per_step=task.problems,
        group_size=task.group,
        lr=LR,
        eval_size=0,
        save_every=0,
        doctor="off",
        tracker="",
        device=task.device,
        dtype="bfloat16" if on_gpu else "float32",
        out=str(folder / "runs"),
        **settings,
    )


def trl(folder: Path, task: Task) -> None:
    """Train with TRL's `GRPOTrainer`, whose tool loop asks Transformers to generate all samples of a step at once.

    Its weights and moments are bfloat16, with which generation and training are fastest; ours and verl's are float32.
    Transformers' continuous batching takes no images, so it is off.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, TrainerCallback
    from trl.chat_template_utils import qwen3_template
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    steps = Steps(folder)
    on_gpu = task.device.startswith("cuda")
    played: list[tuple[float, float]] = []

    class Game:
        def reset(self, **_: Any) -> None:
            return None

        def look(self) -> Any:
            """Look at the image once more."""
            seen = shown(task)
            return [{"type": "image", "image": seen}] if task.images else seen

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
            steps.end(*played[-1], learner_peak_gib=peak)

    class Counting(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            completed = output["completion_mask"]
            written = float((completed * output["tool_mask"]).sum())
            played.append((written, float(completed.sum() + output["prompt_mask"].sum())))
            return output

    def scored(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [reward(ids) for ids in completion_ids]

    processor = (AutoProcessor if task.images else AutoTokenizer).from_pretrained(folder / "model")
    getattr(processor, "tokenizer", processor).response_template = qwen3_template
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=min(task.batch, task.samples),
        gradient_accumulation_steps=max(1, task.samples // task.batch),
        num_generations=task.group,
        max_completion_length=MAX_TOKENS,
        max_tool_calling_iterations=TURNS - 1,
        max_steps=task.steps,
        learning_rate=LR,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    network = AutoModelForImageTextToText.from_pretrained(
        folder / "model", dtype="bfloat16" if on_gpu else "float32", attn_implementation="sdpa"
    )
    # TRL looks for it there where the processor is a tokenizer.
    network.config.max_position_embeddings = network.config.text_config.max_position_embeddings
    images = prompt_images(task)
    columns: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": question(number)}] for number in range(len(images))]
    }
    if task.images:
        columns["images"] = images
    options: Any = {"processing_class": processor, "callbacks": [Clock()], "environment_factory": Game}
    Counting(network, scored, args, Dataset.from_dict(columns), **options).train()


def model(folder: Path, task: Task) -> None:
    """Write the network that all train."""
    write_model(folder / "model", task)


TRAINERS: Mapping[str, Callable[[Path, Task], None]] = {"model": model, "ours": ours, "trl": trl}


if __name__ == "__main__":
    trainer, place = sys.argv[1], Path(sys.argv[2])
    TRAINERS[trainer](place, Task.read(place))
