"""Whose token stream is the template's: ours beside those of other trainers, `python -m benchmarks.exactness`.

Random conversations of several turns, with images in the prompt and in what tools answer. The model's turns are ids
that were drawn beforehand, some of them split as no tokenizer would; each trainer builds its training stream of them by
its own code, in a process of its own (`benchmarks.exactness_peers`). The judge is here and shares no code with any of
them: it renders every boundary between two turns with the chat template by plain Transformers.

    python -m benchmarks.exactness --model FOLDER --slime CHECKOUT --sites FOLDER

`--model` has tokenizer.json and the official chat template of Qwen3-VL. `--sites` is where the other trainers are
installed (`pip install --no-deps --target`, versions pinned here) unless they are. Prints a table and writes
`benchmarks/results/exactness.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from benchmarks.exactness_peers import load_processor
from benchmarks.report import RESULTS, commit, markdown, run_beside, write_result

#: What each trainer needs beside our own packages.
NEEDS: Mapping[str, Sequence[str]] = {
    "TrueTurn": (),
    "slime": ("qwen-vl-utils==0.0.14",),
    "slime, mended": ("qwen-vl-utils==0.0.14",),
    "TRL": ("trl==1.16.0",),
    "verl": ("verl==0.9.1",),
    "renderers": (
        "renderers==0.1.12",
        "openai==3.57.0",
        "openai-harmony==0.0.8",
        "prime-pydantic-config==0.4.3",
        "tiktoken==0.14.0",
    ),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a part of the image.",
        "parameters": {"type": "object", "properties": {"part": {"type": "integer"}}, "required": ["part"]},
    },
}
WORDS = ("a", "tree", "", "über\tlines\n\nof", "3.14", "日本", "ok?", "{x}", "'tis", "\\boxed{7}", "naïve", "--", "end")
MARK = "\u2063boundary\u2063"


def conversations(number: int, seed: int, processor: Any, folder: Path) -> list[dict[str, Any]]:
    """Return conversations as JSON: messages, the ids of each turn of the model, and what tools answer."""
    random = Random(seed)
    made = []
    for index in range(number):
        prompt = [_message(random, "user", folder, f"{index}-p", random.random() < 0.8)]
        if random.random() < 0.3:
            prompt = [{"role": "system", "content": [{"type": "text", "text": _words(random)}]}, *prompt]
        answers = [
            [_message(random, "tool", folder, f"{index}-{turn}", random.random() < 0.6)]
            for turn in range(random.randint(1, 4))
        ]
        turns = [_turn(random, processor.tokenizer, calls=turn < len(answers)) for turn in range(len(answers) + 1)]
        made.append({"prompt": prompt, "tools": [TOOL], "turns": turns, "answers": answers})
    return made


def _words(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 12)))


def _message(random: Random, role: str, folder: Path, name: str, has_image: bool) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": _words(random)}]
    if has_image:
        size = (random.randint(40, 200), random.randint(40, 200))
        image = Image.frombytes("RGB", size, random.randbytes(3 * size[0] * size[1]))
        path = folder / f"{name}.png"
        image.save(path)
        parts.insert(0, {"type": "image", "image": str(path)})
    return {"role": role, "content": parts}


def _turn(random: Random, tokenizer: Any, calls: bool) -> list[int]:
    """Return the ids of a turn: words, half of them cut into single characters, a call unless it is the last, the end.

    One of ten ends with the model's other stop token.
    """
    ids: list[int] = []
    for word in random.choices(WORDS, k=random.randint(2, 10)):
        if random.random() < 0.5:
            ids += [each for letter in f" {word}" for each in tokenizer.encode(letter, add_special_tokens=False)]
        else:
            ids += tokenizer.encode(f" {word}", add_special_tokens=False)
    if calls:
        call = f'\n<tool_call>\n{{"name": "look", "arguments": {{"part": {random.randint(0, 9)}}}}}\n</tool_call>'
        ids += tokenizer.encode(call, add_special_tokens=False)
    stop = "<|im_end|>" if random.random() < 0.9 else "<|endoftext|>"
    return [*ids, tokenizer.convert_tokens_to_ids(stop)]


class Judge:
    """Renders conversations with the model's chat template, by plain Transformers."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer = processor.tokenizer
        self.images = processor.image_processor
        self.closer = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def expected(self, conversation: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
        """Return what stands before each turn, and a digest of each image's patches."""
        said = list(conversation["prompt"])
        pieces = [self._expanded(self._text(said, conversation["tools"]), said)]
        for ids, answers in zip(conversation["turns"], conversation["answers"], strict=False):
            marked = [*said, {"role": "assistant", "content": MARK}, *answers]
            after = self._text(marked, conversation["tools"]).partition(MARK)[2]
            # A turn that ends with the template's closing token has it already.
            if ids[-1] == self.closer:
                after = after.removeprefix("<|im_end|>")
            pieces.append(self._expanded(after, answers))
            said += [{"role": "assistant", "content": self.tokenizer.decode(ids[:-1])}, *answers]
        return pieces, [self._processed(image)[1] for image in _images(said)]

    def collapsed(self, ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder for each image."""
        pairs = zip([None, *ids], ids, strict=False)
        return [each for before, each in pairs if not before == each == self.pad]

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)

    def _expanded(self, text: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        images = iter(_images(messages))
        ids: list[int] = []
        for each in self.tokenizer.encode(text, add_special_tokens=False):
            count = self._processed(next(images))[0] if each == self.pad else 1
            ids += [each] * count
        return ids

    def _processed(self, path: str) -> tuple[int, str]:
        """Return the tokens of an image, and a digest of its patches."""
        found = self.images(images=[Image.open(path)], return_tensors="np")
        time, height, width = found["image_grid_thw"][0].tolist()
        return time * height * width // self.images.merge_size**2, digest(found["pixel_values"])


def digest(pixels_PD: Any) -> str:
    """Return a hash of an image's patches."""
    return blake2b(pixels_PD.astype("float32").tobytes(), digest_size=8).hexdigest()


def _images(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def compare(conversation: Mapping[str, Any], built: Mapping[str, Any], judge: Judge) -> dict[str, int]:
    """Return the counts of what differs between a stream that was built and the template's."""
    pieces, images = judge.expected(conversation)
    counts = {"episodes": 1, "boundaries": len(pieces), "turns": len(conversation["turns"])}
    if "error" in built:
        return counts | {"failed": 1}
    ids = built["ids"]
    found, turns = _split(ids, built["mask"])
    # Images are compared by themselves: one of another size has more or fewer placeholders.
    ids = judge.collapsed(ids)
    found = [judge.collapsed(piece) for piece in found]
    pieces = [judge.collapsed(piece) for piece in pieces]
    wanted = [each for pair in zip(pieces, conversation["turns"], strict=True) for part in pair for each in part]
    changes = SequenceMatcher(None, wanted, ids, autojunk=False).get_opcodes()
    return counts | {
        "other boundaries": sum(piece != other for piece, other in zip(pieces, found, strict=False))
        + abs(len(pieces) - len(found)),
        "other turns": sum(turn != other for turn, other in zip(conversation["turns"], turns, strict=False))
        + abs(len(conversation["turns"]) - len(turns)),
        "tokens lost": sum(to - start for kind, start, to, _, _ in changes if kind in ("delete", "replace")),
        "tokens added": sum(to - start for kind, _, _, start, to in changes if kind in ("insert", "replace")),
        "other images": sum(one != other for one, other in zip(images, built["images"], strict=False))
        + abs(len(images) - len(built["images"])),
        "images": len(images),
        "exact": int(ids == wanted and found == pieces and images == built["images"]),
    }


def _split(ids: Sequence[int], mask: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the runs of tokens that the model did not write, and those that it wrote."""
    runs: dict[int, list[list[int]]] = {0: [], 1: []}
    before = None
    for each, is_written in zip(ids, mask, strict=True):
        if is_written != before:
            runs[is_written].append([])
        runs[is_written][-1].append(each)
        before = is_written
    return runs[0], runs[1]


def build(name: str, conversations: Path, out: Path, args: argparse.Namespace) -> str:
    """Let a trainer build the streams in a process of its own; return why it could not, if so."""
    arguments = [name, str(conversations), str(out), str(args.model)]
    checkout = [args.slime] if name.startswith("slime") else []
    return run_beside([args.sites / name, *checkout], NEEDS[name], "benchmarks.exactness_peers", arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slime", type=Path)
    parser.add_argument("--sites", type=Path, default=Path("/tmp/exactness-sites"))
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "exactness.json")
    args = parser.parse_args()
    at = commit()
    processor = load_processor(args.model)
    judge = Judge(processor)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = conversations(args.episodes, args.seed, processor, folder)
        (folder / "given.json").write_text(json.dumps(given))
        rows = []
        for trainer in NEEDS:
            out = folder / f"{trainer}.json"
            why = build(trainer, folder / "given.json", out, args)
            if why:
                rows.append({"trainer": trainer, "why": why})
                continue
            built = json.loads(out.read_text())
            total: dict[str, Any] = {"trainer": trainer, "errors": sorted({b["error"] for b in built if "error" in b})}
            for conversation, stream in zip(given, built, strict=True):
                for key, count in compare(conversation, stream, judge).items():
                    total[key] = total.get(key, 0) + count
            rows.append(total)
    command = f"python -m benchmarks.exactness --episodes {args.episodes} --seed {args.seed}"
    write_result(args.out, command, {"trainers": rows}, at, ("transformers", "tokenizers"))
    columns = ("exact", "failed", "other boundaries", "boundaries", "other turns", "tokens lost", "tokens added")
    images = ("other images", "images")
    print(markdown(("trainer", *columns, *images), [_cells(row, (*columns, *images)) for row in rows]))


def _cells(row: Mapping[str, Any], columns: Sequence[str]) -> list[object]:
    if "why" in row:
        return [row["trainer"], row["why"], *[""] * (len(columns) - 1)]
    return [row["trainer"], *(row.get(column, 0) for column in columns)]


if __name__ == "__main__":
    main()
