"""The published training speeds of EasyR1, and ours on the same workload: `python -m benchmarks.reference`.

EasyR1 0.3.2 (assets/baselines.md) trained Qwen2.5-VL on Geometry3K, one turn, 512 problems with 5 samples a step,
prompts and responses of up to 2,048 tokens each, an update every 128 problems, KL to the reference, offload on. It
gives tokens a second a GPU, prompts and responses of a whole step counted. From those, the seconds and the GPUs follows
the mean length of a sample; here every sample has it: its prompt has an image of 504 x 504 pixels, and its response
takes what is left. EasyR1 scales smaller images to 512 x 512 pixels, which the network's processor rounds to that: 324
tokens. Each step is one of the public command: rollout, training, push. MFU counts operations as EasyR1 does
(verl/utils/flops_counter.py), but over all seconds of training, log-probs of the reference among them; EasyR1 takes
those of the actor's update alone.

    python -m benchmarks.reference --shape qwen2.5-vl-3b --tokenizer FOLDER -- --engine sglang --num-gpus 4 ...

`FOLDER` has tokenizer.json and chat template of the model; the weights are fresh, so that rewards say nothing: each
text is rewarded by a hash. What stands after `--` are flags of `trainer.run`. With a model of your own and its data
nothing is forced, and the table is by step, with the reward:

    python -m benchmarks.reference --model Qwen/Qwen3-VL-2B-Instruct --data hiyouga/geometry3k -- --engine sglang

Prints a table and writes `benchmarks/results/reference_SHAPE.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from PIL import Image, ImageDraw

from agents.types import Trajectory
from benchmarks.learner_tools import NOMINAL
from benchmarks.report import RESULTS, commit, markdown, write_result
from benchmarks.training_run import train
from trainer.planning.shape import decoder_weights

#: Pixels of a side of every image, and words of every problem.
SIDE = 504
WORDS = 40
GROUP = 5
ENTRY = "envs.geo3k.env:Geo3kSingleEnv"
#: A forward, and twice that for the gradients of inputs and of weights.
TRAINING_FACTOR = 3
SHOWN = (
    "step_s",
    "rollout_s",
    "train_s",
    "sync_s",
    "rollout_train_kl",
    "token_mult_prob_error",
    "memory/learner_peak_gib",
)


@dataclass(frozen=True)
class Published:
    """A row of EasyR1's table, and the sizes of its network.

    `tokens_per_s` are those of a GPU. `tied`: input and output embeddings are one.
    """

    gpus: str
    num_gpus: int
    tokens_per_s: float
    step_s: float
    mfu: float
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    tied: bool

    @property
    def tokens_per_sample(self) -> int:
        """The mean length of a sample, prompt and response."""
        return round(self.tokens_per_s * self.num_gpus * self.step_s / (512 * GROUP))


PUBLISHED: Mapping[str, Published] = {
    "qwen2.5-vl-3b": Published("8 H100", 8, 1800, 120, 0.081, 2048, 36, 16, 2, 11008, 151_936, tied=True),
    "qwen2.5-vl-7b": Published("8 H100", 8, 2000, 120, 0.232, 3584, 28, 28, 4, 18944, 152_064, tied=False),
}


def by_hash(trajectory: Trajectory) -> float:
    """Return a reward that hardly two texts share."""
    digest = hashlib.blake2b(trajectory.final_text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


def shape_config(shape: Published | None, tokenizer: Any) -> Any:
    """Return the configuration of Qwen2.5-VL in a shape; a tiny one without."""
    from transformers import AutoConfig

    image, start, end = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    sizes = shape or Published("", 1, 1, 1, 0.0, 64, 2, 4, 2, 128, len(tokenizer), tied=True)
    width = sizes.hidden // sizes.heads
    sections = [width // 8, 3 * width // 16, 3 * width // 16]
    text = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.mlp,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        "tie_word_embeddings": sizes.tied,
    }
    vision = {
        "depth": 32 if shape else 2,
        "hidden_size": 1280 if shape else 32,
        "intermediate_size": 3420 if shape else 64,
        "num_heads": 16 if shape else 2,
        "out_hidden_size": sizes.hidden,
        "fullatt_block_indexes": [7, 15, 23, 31] if shape else [1],
    }
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=sizes.tied,
    )


def write_model(folder: Path, tokenizer_folder: Path, shape: Published | None, device: str) -> tuple[Any, int]:
    """Write fresh weights as a model folder; return its configuration and the tokens of a prompt."""
    import torch
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from agents.model.policy import PolicyModel
    from agents.rendering.images import ImageStore
    from agents.rendering.renderer import Renderer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = shape_config(shape, tokenizer)
    torch.manual_seed(0)
    with torch.device(device):
        PolicyModel.from_config(config).save(folder)
    # What the weights took belongs to the learner and its server from here on.
    torch.cuda.empty_cache()
    processor = Qwen2VLImageProcessorPil(
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": SIDE * SIDE, "longest_edge": 4 * 2**20},
        image_mean=[0.48145466, 0.4578275, 0.40821073],
        image_std=[0.26862954, 0.26130258, 0.27577711],
    )
    renderer = Renderer(tokenizer, ImageStore(processor, processor.merge_size))
    renderer.save(folder)
    problem = next(problems(1))
    parts = [{"type": "image", "image": problem["image"]}, {"type": "text", "text": problem["problem"]}]
    return config, len(renderer.prompt([{"role": "user", "content": parts}]).ids)


def problems(number: int) -> Iterator[dict[str, Any]]:
    """Yield problems of one length, each with lines of its own as its diagram."""
    random = Random(0)
    for _ in range(number):
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw = ImageDraw.Draw(image)
        for _ in range(6):
            draw.line([random.randrange(SIDE) for _ in range(4)], fill="black", width=2)
        words = random.choices(("find", "the", "angle", "of", "side", "x", "in", "circle", "line", "and"), k=WORDS)
        yield {"problem": " ".join(words), "image": image}


def write_problems(folder: Path, number: int) -> Path:
    """Write problems as JSONL beside their images; return the file."""
    lines = []
    for place, problem in enumerate(problems(number)):
        problem["image"].save(folder / f"{place}.png")
        lines.append(json.dumps({"problem": problem["problem"], "answer": "1", "images": [f"{place}.png"]}))
    path = folder / "problems.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def published_flops(config: Any, length: int) -> int:
    """Return the operations of a training step a sample as EasyR1 counts them.

    Both embeddings and every pair of tokens are counted, though neither is needed; the vision tower is not.
    """
    text = config.text_config
    weights = decoder_weights(text) + 2 * text.vocab_size * text.hidden_size
    attention = 2 * length**2 * text.hidden_size * text.num_hidden_layers
    return 2 * TRAINING_FACTOR * (weights * length + attention)


def speed(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the workload at forced lengths; return its figures."""
    shape = PUBLISHED.get(args.shape)
    config, prompt = write_model(work / "model", args.tokenizer, shape, args.device)
    response = (shape.tokens_per_sample - prompt) if shape else args.response
    data = write_problems(work, args.problems)
    own = Path(__file__).resolve()
    # The prompt is the problem alone, as there.
    registry = work / "registry.yaml"
    registry.write_text(f"reference: {{entry_point: {ENTRY}, description: One turn., max_turns: 1}}\n")
    flags = ["--model", str(work / "model"), "--env", "reference", "--registry", str(registry), "--data", str(data)]
    flags += ["--reward", f"{own}:by_hash"]
    flags += ["--problems-per-step", str(args.problems), "--group-size", str(GROUP), "--max-turns", "1"]
    flags += ["--minibatches", str(max(1, args.problems // 128)), "--lr", "1e-6", "--kl-coef", "0.01"]
    flags += ["--max-new-tokens", str(response), "--doctor", "off", *args.flags]
    rows = [with_step_s(row) for row in train(work / "run", args.steps, *flags)]
    later = rows[1:] or rows
    num_samples = args.problems * GROUP
    means = {name: fmean(row[name] for row in later if name in row) for name in SHOWN if name in later[0]}
    tokens = num_samples * (prompt + response)
    num_gpus = max(1, args.gpus)
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    operations = num_samples * published_flops(config, prompt + response)
    return {
        "gpu": card,
        "num_gpus": num_gpus,
        "prompt_tokens": prompt,
        "response_tokens": response,
        "written_tokens": fmean(row["num_tokens"] for row in later) / num_samples,
        "samples": num_samples,
        "tokens_per_s_per_gpu": tokens / means["step_s"] / num_gpus,
        "mfu": operations / means["train_s"] / num_gpus / NOMINAL,
        **means,
        "rows": rows,
    }


def with_step_s(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step with its whole time, of which rollout, training and push are parts."""
    # What lies between them counts too: a server on the same GPU frees its memory, rewards become advantages.
    return {**row, "step_s": row["rollout_s"] / row["idle/learner_time_frac"]}


def by_step(args: argparse.Namespace, work: Path) -> list[dict[str, float]]:
    """Train a given model on given data; return the metrics of each step."""
    flags = ["--model", args.model, "--env", "geo3k", "--problems-per-step", str(args.problems), *args.flags]
    flags += ["--data", args.data] if args.data else []
    return [with_step_s(row) for row in train(work / "run", args.steps, *flags)]


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("tiny", *PUBLISHED), help="fresh weights of this shape, lengths forced")
    parser.add_argument("--tokenizer", type=Path, help="with --shape, folder with the tokenizer and its template")
    parser.add_argument("--model", default="", help="a model of your own: the table is by step")
    parser.add_argument("--data", default="", help="with --model, its problems, as trainer.run takes them")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the flags use, to divide by")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--response", type=int, default=16, help="with --shape tiny, tokens of a response")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="torch device to make fresh weights on")
    parser.add_argument("--work", type=Path, help="folder to keep the run in")
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="after --, flags of trainer.run")
    args = parser.parse_args()
    if bool(args.shape) == bool(args.model) or (args.shape and not args.tokenizer):
        parser.error("give --shape with --tokenizer, or --model")
    at = commit()
    command = f"python -m benchmarks.reference {shlex.join(sys.argv[1:])}"
    out = args.out or RESULTS / f"reference_{args.shape or 'model'}.json"
    with tempfile.TemporaryDirectory(prefix="reference-") as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if args.model:
            rows = by_step(args, work)
            names = ("step", "reward", *SHOWN)
            print(markdown(names, [[f"{row.get(name, 0.0):.4g}" for name in names] for row in rows]))
            write_result(out, command, {"rows": rows}, at, ("torch", "transformers"))
            return
        figures = speed(args, work)
    shape = PUBLISHED.get(args.shape)
    names = ("samples", "tokens_per_s_per_gpu", "mfu", *(name for name in SHOWN if name in figures))
    lines = [["TrueTurn", *(f"{figures[name]:.4g}" for name in names)]]
    if shape:
        theirs = {"samples": 512 * GROUP, "tokens_per_s_per_gpu": shape.tokens_per_s, "mfu": shape.mfu}
        theirs |= {"step_s": shape.step_s}
        lines.append([f"EasyR1, {shape.gpus}", *(f"{theirs[name]:.4g}" if name in theirs else "" for name in names)])
    print(markdown(("", *names), lines))
    published = asdict(shape) if shape else {}
    write_result(out, command, {"published": published, **figures}, at, ("torch", "transformers"))


if __name__ == "__main__":
    main()
