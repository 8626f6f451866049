"""The task of `benchmarks.peers`: a network that plays the same scripted turns under every trainer, problems, a reward.

The residual branches are silent, since `o_proj` and `down_proj` are zero, though all of them are computed. So the
logits of a token depend on that token alone: the output head makes a Markov chain of them. A turn is some text, a tool
call and the end of the turn. Every tenth token of the text has several successors, equally likely, and one of them ends
the text early, so that samples and lengths differ.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TURNS = 3
#: Tokens that an episode may hold after its prompt; many more than it needs.
MAX_TOKENS = 1024
#: A learning rate so small that the chain stays.
LR = 1e-9
#: The successors of every tenth token of the text.
CHOICES = 4
#: The logit of a successor; all other tokens are near 0.
SUCCESSOR_LOGIT = 30.0
#: A token of its own, since no id may come twice in the chain.
CALL = '{"name": "look", "arguments": {}}'
STEPS, TASK = "steps.jsonl", "task.json"
#: The packages of a peer that do not come with torch, Transformers or, for verl, SGLang; its own is the first.
HUB = ("datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0")
PINS = {
    "trl": ("trl==1.16.0", *HUB),
    "verl": (
        "verl==0.9.1",
        "ray==2.60.0",
        "tensordict==0.10.0",
        "pyvers==0.2.3",
        "TransferQueue==0.1.11",
        "hydra-core==1.3.2",
        "omegaconf==2.3.0",
        "antlr4-python3-runtime==4.9.3",
        "torchdata==0.11.0",
        "codetiming==1.4.0",
        "pylatexenc==2.11",
        "peft==0.21.2",
        "qwen-vl-utils==0.0.14",
        "cachetools==8.0.2",
        *HUB,
    ),
}
#: Peers that use the SGLang of ours.
WITH_SGLANG = ("verl",)


@dataclass(frozen=True)
class Task:
    """What every trainer plays, kept in `task.json`. TRL trains on `batch` samples at once, verl on half as many."""

    device: str = "cuda"
    shape: str = "2b"
    steps: int = 5
    problems: int = 16
    group: int = 8
    text: int = 150
    batch: int = 8
    images: bool = True

    @property
    def samples(self) -> int:
        """Return the episodes of a step."""
        return self.problems * self.group

    def write(self, folder: Path) -> None:
        """Keep the task for the processes of the trainers."""
        (folder / TASK).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Return the task that was kept in a folder."""
        return cls(**json.loads((folder / TASK).read_text()))


class Steps:
    """Writes a line for the end of every step, which the benchmark reads: when, and what the trainer knows of it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEPS
        self._path.unlink(missing_ok=True)

    def end(self, written: float, tokens: float, **figures: float) -> None:
        """Take note of a step: the tokens that the model wrote, and all tokens of its episodes."""
        row = {"at": time.time(), "written": written, "tokens": tokens, **figures}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def image(number: int, width: int = 256, height: int = 256) -> Any:
    """Return an image that no other number has."""
    from PIL import Image

    colour = (number * 37 % 256, number * 91 % 256, number * 151 % 256)
    return Image.new("RGB", (width, height), colour)


def prompt_images(task: Task) -> list[list[Any]]:
    """Return the images of each problem, four steps of them."""
    return [[image(number)] if task.images else [] for number in range(4 * task.problems)]


def shown(task: Task) -> Any:
    """Return what the tool shows: a smaller image, or a text."""
    return image(1, 128, 128) if task.images else "A wall."


def question(number: int) -> str:
    """Return the text of a problem."""
    return f"Problem {number}: look at the image, and say what you see."


def reward(ids: Sequence[int]) -> float:
    """Return the reward of an episode's ids, which differs between samples."""
    return sum(int(token) for token in ids) % 97 / 97


def chain(tokenizer: Any, length: int) -> dict[int, list[int]]:
    """Return the successors of every token of a turn, beginning with the last token of a generation prompt."""
    call, opened, closed = (tokenizer.convert_tokens_to_ids(text) for text in (CALL, "<tool_call>", "</tool_call>"))
    *_, begun = tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in (begun, call)}
    words = iter([token for token, text in texts.items() if text.strip().isalpha()])
    successors: dict[int, list[int]] = {}
    last = [begun]
    early = []
    for place in range(length):
        if place % 10 == 9:
            nexts = [next(words) for _ in range(CHOICES)]
        else:
            nexts = [next(words)]
        successors |= dict.fromkeys(last, nexts)
        last = nexts
        if len(nexts) > 1 and place >= length * 0.6:
            *last, ending = nexts
            early.append(ending)
    successors |= {token: [opened] for token in [*last, *early]}
    return successors | {opened: [call], call: [closed], closed: [tokenizer.eos_token_id]}


def write_model(folder: Path, task: Task) -> None:
    """Write the network, with the starter's tokenizer and chat template."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    from agents.model import STARTER_PATH
    from agents.model.policy import PolicyModel
    from benchmarks.learner_workload import shape_config

    shutil.copytree(STARTER_PATH, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(CALL, normalized=False)])
    tokenizer.save_pretrained(folder)
    config = shape_config(task.shape)
    config.text_config.vocab_size = max(config.text_config.vocab_size, len(tokenizer))
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    torch.manual_seed(0)
    with torch.device(task.device):
        model = PolicyModel.from_config(config)
    weights = dict(model.named_parameters())
    head_VH = next(weight for name, weight in weights.items() if name.endswith("lm_head.weight"))
    embedding_VH = next(weight for name, weight in weights.items() if name.endswith("embed_tokens.weight"))
    with torch.no_grad():
        for name, weight in weights.items():
            if ".self_attn.o_proj." in name or ".mlp.down_proj." in name:
                weight.zero_()
        head_VH.zero_()
        # The final norm makes vectors of length sqrt(H), of which few are parallel.
        normed_VH = torch.nn.functional.normalize(embedding_VH, dim=-1) / math.sqrt(embedding_VH.shape[1])
        for token, nexts in chain(tokenizer, task.text).items():
            head_VH[nexts] += SUCCESSOR_LOGIT * normed_VH[token]
    model.save(folder, torch.bfloat16)
