"""Builds training streams of given conversations by the code of one trainer; `benchmarks.exactness` starts it.

Each function here has the conversations and a model's tokenizer and image processor, and returns for each conversation
the ids and the mask of its training stream and digests of the image patches that go with it, or the error that its
trainer raised. What a trainer needs of the rest of itself (servers, configuration) is left out or stands still.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

Conversation = Mapping[str, Any]


class _Processor(Qwen3VLProcessor):
    """The model's processor without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        """Take what is given."""


def load_processor(model: Path) -> Any:
    """Return a processor of Qwen3-VL with the tokenizer and the chat template of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    images = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 1024 * 32 * 32},
    )
    return _Processor(images, tokenizer, None, chat_template=tokenizer.chat_template)


def opened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with images in place of their paths."""
    return [
        {
            **message,
            "content": [
                {**part, "image": Image.open(part["image"])} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the images of messages, in order."""
    return [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]


def digests(pixels_PD: Any, grids: Any) -> list[str]:
    """Return a digest of each image's patches."""
    from benchmarks.exactness import digest

    pixels_PD = np.asarray(pixels_PD)
    ends = np.cumsum([int(np.prod(np.asarray(grid))) for grid in grids])
    return [digest(part) for part in np.split(pixels_PD, ends[:-1])] if len(ends) else []


def processed(processor: Any, images: Sequence[Any]) -> list[str]:
    """Return the digests of images that a trainer processes at once, when it trains."""
    if not images:
        return []
    found = processor.image_processor(images=list(images), return_tensors="np")
    return digests(found["pixel_values"], found["image_grid_thw"])


def bare(name: str, folder: Path | None = None, **contents: Any) -> None:
    """Put a package into place that imports nothing of itself; `contents` are its names."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = [str(folder)] if folder else []
    vars(module).update(contents)
    sys.modules[name] = module


def trueturn(conversation: Conversation, processor: Any) -> dict[str, Any]:
    """Play the conversation with our agent loop and a recorded engine."""
    from agents.rendering.images import ImageStore
    from agents.rendering.renderer import Renderer
    from agents.replaying.recorded_engine import RecordedEngine
    from agents.rollout.episode import Episode, Limits
    from agents.types import Completion, SamplingParams
    from envs.env import Env
    from envs.types import Sample

    class Answers(Env):
        def __init__(self) -> None:
            self.tools = conversation["tools"]
            self.answers = iter(conversation["answers"])

        def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
            return {}, {}

        def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
            answer = next(self.answers, None)
            if answer is None:
                return {}, True, {}
            return opened(answer)[0], False, {}

        def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
            return observation

        def reward(self, final_text: str) -> float:
            return 0.0

    store = ImageStore(processor.image_processor, processor.image_processor.merge_size)
    # Both stop tokens, as in the model's generation_config.json.
    stop_ids = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    renderer = Renderer(processor.tokenizer, store, stop_ids=stop_ids)
    turns = [Completion(tuple(ids), (-1.0,) * len(ids), "stop", 0, ((0, len(ids)),)) for ids in conversation["turns"]]
    sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)
    limits = Limits(len(turns), 10**6, check_template_every=0)
    episode = Episode(RecordedEngine([turns], 10**7), renderer, limits, sampling)
    sample = Sample("0", tuple(opened(conversation["prompt"])))
    t = asyncio.run(episode.run(sample, Answers, seed=0))
    if t.error:
        return {"error": t.error.strip().splitlines()[-1]}
    images = [image for each in t.images for image in digests(each.pixels_PD, [each.grid_thw])]
    return {"ids": t.ids_T.tolist(), "mask": t.mask_T.astype(int).tolist(), "images": images}


def slime(conversation: Conversation, processor: Any) -> dict[str, Any]:
    """Build it as the recipe `geo3k_vlm_multi_turn` does: `generate` of its rollout, with a server that answers."""
    tokenizer = processor.tokenizer
    recipe = _slime_recipe()
    from qwen_vl_utils import process_vision_info  # as slime's data set does for the prompt
    from slime.utils.types import Sample

    prompt = opened(conversation["prompt"])
    text = tokenizer.apply_chat_template(
        prompt, tools=conversation["tools"], tokenize=False, add_generation_prompt=True
    )
    images, videos = process_vision_info(prompt)
    sample = Sample(prompt=text, multimodal_inputs={"images": images, "videos": videos}, metadata={})
    answers = iter(conversation["answers"])
    turns = iter(conversation["turns"])

    class Answers:
        def reset(self) -> None: ...

        def close(self) -> None: ...

        def step(self, text: str) -> tuple[Any, bool, dict[str, Any]]:
            answer = next(answers, None)
            return answer, answer is None, {}

        def format_observation(self, answer: Any) -> dict[str, Any]:
            return opened(answer)[0]

    async def post(url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        ids = next(turns)
        logprobs = [(-1.0, each, None) for each in ids]
        info = {"output_token_logprobs": logprobs, "finish_reason": {"type": "stop"}}
        return {"text": tokenizer.decode(ids), "meta_info": info}

    config = {"max_turns": len(conversation["turns"])}
    state = SimpleNamespace(tokenizer=tokenizer, processor=processor)
    recipe._initialize_resources = lambda args, sample: (Answers(), None, config, state, "")
    recipe.post = post
    args = SimpleNamespace(
        partial_rollout=False,
        apply_chat_template=True,
        apply_chat_template_kwargs=None,
        rollout_max_context_len=None,
    )
    done = asyncio.run(recipe.generate(args, sample, {}))
    prompt_length = len(done.tokens) - len(done.loss_mask)
    given = done.multimodal_train_inputs or {}
    return {
        "ids": list(map(int, done.tokens)),
        "mask": [0] * prompt_length + list(map(int, done.loss_mask)),
        "images": digests(given.get("pixel_values", np.zeros((0, 1))), given.get("image_grid_thw", [])),
    }


def slime_mended(conversation: Conversation, processor: Any) -> dict[str, Any]:
    """Build it as `slime` does, without the log-probs of other tokens, which its own `Sample` refuses."""
    recipe = _slime_recipe()
    append = recipe._append_to_sample

    def append_without(sample: Any, response: Any, ids: Any, logprobs: Any, loss_mask_val: int, **rest: Any) -> None:
        append(sample, response, ids, logprobs if loss_mask_val else None, loss_mask_val, **rest)

    recipe._append_to_sample = append_without
    try:
        return slime(conversation, processor)
    finally:
        recipe._append_to_sample = append


def _slime_recipe() -> Any:
    name = "examples.geo3k_vlm_multi_turn.rollout"
    if name in sys.modules:
        return sys.modules[name]
    # Of these it takes a name each; they import the servers.
    bare("torchvision", io=None, transforms=None)
    bare("torchvision.transforms", InterpolationMode=SimpleNamespace(BICUBIC=None))
    bare("slime.rollout")
    bare("slime.rollout.sglang_rollout", GenerateState=None)
    return importlib.import_module(name)


def trl(conversation: Conversation, processor: Any) -> dict[str, Any]:
    """Run the tool loop of `GRPOTrainer` with a generation that answers."""
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        parse_response,
    )
    from trl.trainer.grpo_trainer import GRPOTrainer

    turns = iter(conversation["turns"])
    answers = iter(conversation["answers"])

    class Trainer(GRPOTrainer):
        def __init__(self) -> None:
            """Leave everything out that trains."""

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            return [next(turns) for _ in prompt_ids], None

    def look(part: int) -> Any:
        return opened(next(answers))[0]["content"]

    trainer = Trainer()
    trainer.processing_class = add_response_schema(processor)
    trainer._tokenizer = processor.tokenizer
    trainer._is_vlm = True
    trainer.tools = conversation["tools"]
    trainer.environment_factories = None
    trainer.chat_template = None
    if not is_chat_template_prefix_preserving(processor):
        trainer.chat_template = get_training_chat_template(processor)
    trainer.chat_template_kwargs = {}
    trainer._sync_tool_dicts = [{"look": look}]
    trainer._async_tool_dicts = [{}]
    trainer.max_tool_calling_iterations = len(conversation["turns"])
    trainer.max_completion_length = 10**6
    trainer.use_vllm = False
    config = SimpleNamespace(max_position_embeddings=10**6)
    trainer.model = SimpleNamespace(config=SimpleNamespace(text_config=config))
    vars(trainer)["args"] = SimpleNamespace(device="cpu", past_index=-1)
    trainer.is_deepspeed_enabled = False
    prompt = opened(conversation["prompt"])
    ids = processor.apply_chat_template(
        prompt,
        tools=conversation["tools"],
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )[0]
    ids = list(map(int, ids))
    first = next(turns)
    said = parse_response(processor.tokenizer, first, prefix=ids, tools=trainer.tools)
    images = images_of(prompt)
    found = trainer._tool_call_loop([prompt], [ids], [first], [[said]], None, [images] if images else None, {})
    tool_mask, _, completion_ids, _, _, _, late = found
    return {
        "ids": ids + completion_ids[0],
        "mask": [0] * len(ids) + tool_mask[0],
        "images": processed(processor, [*images, *late[0]]),
    }


def verl(conversation: Conversation, processor: Any) -> dict[str, Any]:
    """Build it with the builder of continuous tokens that its tool agent loop uses."""
    if "verl" not in sys.modules:
        folder = next(Path(path) / "verl" for path in sys.path if (Path(path) / "verl").is_dir())
        # Their own __init__ imports Ray and the trainer.
        bare("verl", folder)
        bare("verl.utils", folder / "utils")
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    tools = conversation["tools"]
    builder = create_continuous_token_builder(processor.tokenizer, hf_model_type="qwen3_vl", processor=processor)
    said = opened(conversation["prompt"])
    images = images_of(said)
    ids = builder.build_initial_tokens(said, tools=tools, images=images or None)
    prompt_length = len(ids)
    mask: list[int] = []
    for number, turn in enumerate(conversation["turns"]):
        merged = builder.merge_assistant_tokens(ids, turn)
        mask, _ = builder.align_response_metadata(merged, mask, None)
        ids = merged.token_ids
        if number == len(conversation["answers"]):
            break
        said = [*said, {"role": "assistant", "content": processor.tokenizer.decode(turn[:-1])}]
        updated = [*said, *opened(conversation["answers"][number])]
        merged = builder.merge_context_tokens(said, updated, ids, tools=tools)
        mask, _ = builder.align_response_metadata(merged, mask, None)
        ids = merged.token_ids
        images += images_of(updated[len(said) :])
        said = updated
    return {
        "ids": list(map(int, ids)),
        "mask": [0] * prompt_length + list(map(int, mask)),
        "images": processed(processor, images),
    }


def renderers(conversation: Conversation, processor: Any) -> dict[str, Any]:
    """Extend each turn by `bridge_to_next_turn`, as prime-rl does."""
    from renderers.qwen3_vl import Qwen3VLRenderer

    renderer = Qwen3VLRenderer(processor.tokenizer, processor=processor)
    tools = conversation["tools"]
    prompt = renderer.render(opened(conversation["prompt"]), tools=tools, add_generation_prompt=True)
    mask = [0] * len(prompt.token_ids)
    ids: list[int] = []
    for number, turn in enumerate(conversation["turns"]):
        ids = [*prompt.token_ids, *turn]
        mask += [1] * len(turn)
        if number == len(conversation["answers"]):
            break
        answer = opened(conversation["answers"][number])
        before = prompt.multi_modal_data
        bridged = renderer.bridge_to_next_turn(
            prompt.token_ids, turn, answer, tools=tools, previous_multi_modal_data=before
        )
        if bridged is None:
            return {"error": "bridge_to_next_turn gives None: the conversation is rendered anew"}
        prompt = bridged
        mask += [0] * (len(prompt.token_ids) - len(mask))
    items = (prompt.multi_modal_data.mm_items if prompt.multi_modal_data else {}).get("image", [])
    images = [image for item in items for image in digests(item["pixel_values"], item["image_grid_thw"])]
    return {"ids": list(map(int, ids)), "mask": mask, "images": images}


TRAINERS: Mapping[str, Callable[[Conversation, Any], dict[str, Any]]] = {
    "TrueTurn": trueturn,
    "slime": slime,
    "slime, mended": slime_mended,
    "TRL": trl,
    "verl": verl,
    "renderers": renderers,
}


def main(name: str, given: str, out: str, model: str) -> None:
    """Build the streams of all conversations of a file."""
    processor = load_processor(Path(model))
    built: list[dict[str, Any]] = []
    for conversation in json.loads(Path(given).read_text()):
        try:
            built.append(TRAINERS[name](conversation, processor))
        except ImportError:  # not an error of one conversation
            raise
        except Exception as error:
            built.append({"error": f"{type(error).__name__}: {str(error)[:200]}"})
    Path(out).write_text(json.dumps(built))


if __name__ == "__main__":
    main(*sys.argv[1:])
