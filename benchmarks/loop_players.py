"""How each trainer of `benchmarks.loop_peers` plays episodes: its own loop, with an engine that answers at once.

A function takes a model folder, for its tokenizer, and the ids of the model's turns; it returns a function that plays
an episode of each sample, all at once, and returns their token streams. Eight samples in a row are one problem's, or
there is one. The packages of only one trainer are there.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from benchmarks.agent_loop import ARGS, GROUP_SIZE, TEXTS, ScoreEnv, build_episode, make_samples
from benchmarks.exactness_peers import bare
from envs.types import Sample

#: Plays all episodes of the samples at once, and returns their streams.
Play = Callable[[Sequence[Sample]], list[list[int]]]
Turns = Sequence[Sequence[int]]
Turn = TypeVar("Turn")


def calc_score(answer: str) -> str:
    """Return the score of an answer.

    Args:
        answer: the answer
    """
    return "Score 1.0" if answer == "68" else "Score 0.0"


class Script(Generic[Turn]):
    """The turns of the model, by the id of an episode."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.played: Counter[str] = Counter()

    async def next(self, episode: str) -> Turn:
        """Let other episodes go on, then return the episode's next turn."""
        await asyncio.sleep(0)
        self.played[episode] += 1
        return self.turns[self.played[episode] - 1]


def messages(sample: Sample) -> list[dict[str, Any]]:
    """Return a prompt of its own for each episode, since some trainers extend it in place."""
    return [dict(message) for message in sample.prompt]


def trueturn(model: str, turns: Turns, isolation: str = "inline") -> Play:
    """Play with our agent loop."""
    from agents.rendering.renderer import Renderer
    from agents.rollout.manager import rollout_groups

    episode = build_episode(Renderer.from_checkpoint(model), isolation)
    runner = asyncio.Runner()

    def play(samples: Sequence[Sample]) -> list[list[int]]:
        group_size = min(GROUP_SIZE, len(samples))
        groups = runner.run(rollout_groups(episode, samples[::group_size], ScoreEnv, ARGS, group_size, seed=0))
        return [each.ids_T.tolist() for group in groups for each in group.trajectories]

    return play


def skyrl(model: str, turns: Turns) -> Play:
    """Play with the generator of SkyRL-Gym."""
    import typing_extensions

    # Pydantic refuses the other one before Python 3.12.
    typing.TypedDict = typing_extensions.TypedDict
    import skyrl_gym
    from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

    class Engine:
        weight_version = 0
        script = Script(turns)

        async def generate(self, given: Any, **_: Any) -> dict[str, Any]:
            ids = list(await self.script.next(given["session_ids"][0]))
            return {
                "responses": [tokenizer.decode(ids, skip_special_tokens=True)],
                "response_ids": [ids],
                "stop_reasons": ["stop"],
                "response_logprobs": [[-1.0] * len(ids)],
            }

        async def finish_session(self, episode: str) -> None: ...

    skyrl_gym.register(id="score", entry_point=_skyrl_env())
    tokenizer = load_tokenizer(model)
    config = GeneratorConfig(max_turns=len(TEXTS), max_input_length=10**6)
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), Engine(), tokenizer)
    # It shows no schemas of tools: its prompts have them as text.
    shown = tokenizer.apply_chat_template(messages(make_samples(1)[0]), tools=[schema()], tokenize=False)
    system = {"role": "system", "content": shown.split("system\n", 1)[1].split("<|im_end|>", 1)[0]}
    runner = asyncio.Runner()

    def play(samples: Sequence[Sample]) -> list[list[int]]:
        given = {
            "prompts": [[system, *messages(sample)] for sample in samples],
            "env_classes": ["score"] * len(samples),
            "env_extras": [{} for _ in samples],
        }
        found = runner.run(generator.generate(given, disable_tqdm=True))
        return [[*p, *r] for p, r in zip(found["prompt_token_ids"], found["response_ids"], strict=True)]

    return play


def _skyrl_env() -> Callable[..., Any]:
    """Return the environment for SkyRL, which reads the calls itself, as those of SkyRL do."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv
    from skyrl_gym.tools.core import ToolGroup, tool

    class Scores(ToolGroup):
        def __init__(self) -> None:
            super().__init__("scores")

        @tool
        def calc_score(self, answer: str) -> str:
            return calc_score(answer)

    class ScoreEnv(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()
            self.init_tool_groups([Scores()])

        def step(self, action: str) -> Any:
            found = re.search(r"<tool_call>(.*?)</tool_call>", action, re.DOTALL)
            if not found:
                return {"observations": [], "reward": float("boxed{68}" in action), "done": True, "metadata": {}}
            call = json.loads(found[1])
            reply = self._execute_tool("scores", call["name"], list(call["arguments"].values()))
            told = [{"role": "tool", "content": reply}]
            return {"observations": told, "reward": 0.0, "done": False, "metadata": {}}

    return ScoreEnv


def trl(model: str, turns: Turns) -> Play:
    """Play with `GRPOTrainer`, whose model is not asked: the next turn of all episodes is there at once."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.chat_template_utils import qwen3_template
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = load_tokenizer(model)
    tokenizer.response_template = qwen3_template
    script: list[Any] = []

    def unused_reward(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [0.0] * len(completions)

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            ids = next(script[-1])
            return [list(ids) for _ in prompt_ids], None

    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, max_position_embeddings=4096
    )
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none", max_completion_length=1024
    )
    data = Dataset.from_dict({"prompt": [messages(sample) for sample in make_samples(8)]})
    network = Qwen3ForCausalLM(shape)
    trainer = Trainer(network, unused_reward, args, data, processing_class=tokenizer, tools=[calc_score])

    def play(samples: Sequence[Sample]) -> list[list[int]]:
        script[:] = [iter(turns)]
        trainer._sync_tool_dicts = [{"calc_score": calc_score} for _ in samples]
        trainer._async_tool_dicts = [{} for _ in samples]
        prompt_ids, completion_ids, *_ = trainer._generate([messages(sample) for sample in samples])
        return [[*p, *c] for p, c in zip(prompt_ids, completion_ids, strict=True)]

    return play


def verl(model: str, turns: Turns) -> Play:
    """Play with the tool agent loop, built anew for each episode as its worker does."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl.workers.rollout.replica import TokenOutput

    class Scores(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            return ToolResponse(text=calc_score(**parameters)), 0.0, {}

    class Engine:
        script = Script(turns)

        async def generate(self, request_id: str, **_: Any) -> TokenOutput:
            ids = await self.script.next(request_id)
            return TokenOutput(token_ids=list(ids), log_probs=[-1.0] * len(ids), stop_reason="completed")

    multi_turn = {
        "max_user_turns": None,
        "max_assistant_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
    }
    rollout = {"multi_turn": multi_turn, "prompt_length": 1024, "response_length": 1024, "full_determinism": False}
    config = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))
    data = DictConfigWrap(OmegaConf.create({"apply_chat_template_kwargs": {}, "mm_processor_kwargs": {}}))
    tools = ToolListWrap([Scores({}, OpenAIFunctionToolSchema(**schema()))])
    tokenizer = load_tokenizer(model)
    engine = Engine()
    runner = asyncio.Runner()

    async def one(sample: Sample) -> list[int]:
        loop = ToolAgentLoop(config, engine, tokenizer, None, SimpleNamespace, data, hf_model_type="qwen3", tools=tools)
        found = await loop.run({}, raw_prompt=messages(sample))
        return [*found.prompt_ids, *found.response_ids]

    async def every(samples: Sequence[Sample]) -> list[list[int]]:
        return await asyncio.gather(*map(one, samples))

    return lambda samples: runner.run(every(samples))


def verifiers(model: str, turns: Turns) -> Play:
    """Play with `ToolEnv` and the client that renders tokens, as prime-rl trains; the server answers at once."""
    folder = next(Path(path) / "verifiers" for path in sys.path if (Path(path) / "verifiers").is_dir())
    # Its own __init__ imports sandboxes.
    bare("verifiers.legacy.envs", folder / "legacy" / "envs")
    # Theirs is openai-agents; only the schema of a tool is taken from it.
    tool = schema()["function"]
    found = SimpleNamespace(
        description=tool["description"], params_json_schema=tool["parameters"], strict_json_schema=False
    )
    bare("agents.function_schema", function_schema=lambda function: found)
    from datasets import Dataset
    from renderers.qwen3_vl import Qwen3VLRenderer
    from verifiers.legacy.clients.renderer_client import RendererClient
    from verifiers.legacy.envs.tool_env import ToolEnv
    from verifiers.legacy.rubrics.rubric import Rubric

    class Server:
        base_url = "http://localhost/v1"
        script = Script([_reply(ids) for ids in turns])

        async def get(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {}

        async def post(self, url: str, options: Any, **_: Any) -> Any:
            return await self.script.next(options["headers"]["episode"])

    def right(completion: Any, **_: Any) -> float:
        return float("boxed{68}" in (completion[-1].content or ""))

    client = RendererClient(Server(), renderer=Qwen3VLRenderer(load_tokenizer(model)))
    data = Dataset.from_dict({"prompt": [messages(sample) for sample in make_samples(1)]})
    env = ToolEnv(tools=[calc_score], dataset=data, rubric=Rubric(funcs=[right]), max_turns=len(TEXTS))
    runner = asyncio.Runner()
    episodes = iter(range(10**9))

    async def one(sample: Sample) -> list[int]:
        number = next(episodes)
        given = {"prompt": messages(sample), "example_id": number, "answer": "68"}
        sampling = {"extra_headers": {"episode": str(number)}}
        found = await env.run_rollout(given, client, "model", sampling, state_columns=["trajectory"])
        tokens = found["trajectory"][-1]["tokens"]
        return [*tokens["prompt_ids"], *tokens["completion_ids"]]

    async def every(samples: Sequence[Sample]) -> list[list[int]]:
        return await asyncio.gather(*map(one, samples))

    return lambda samples: runner.run(every(samples))


def _reply(ids: Sequence[int]) -> Any:
    """Return what a server of vLLM answers."""
    logprobs = {"content": [{"token": f"token_id:{each}", "logprob": -1.0} for each in ids]}
    choice = {"token_ids": list(ids), "finish_reason": "stop", "logprobs": logprobs}
    return SimpleNamespace(content=json.dumps({"choices": [choice]}).encode())


PEERS: Mapping[str, Callable[[str, Turns], Play]] = {
    "TrueTurn": trueturn,
    "TrueTurn, tools on threads": partial(trueturn, isolation="thread"),
    "SkyRL": skyrl,
    "TRL": trl,
    "verl": verl,
    "verifiers": verifiers,
}


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def schema() -> dict[str, Any]:
    """Return the schema of the tool."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = get_json_schema(calc_score)
    found["function"].pop("return", None)  # ours shows none
    return found
