"""One training step on a laptop, ours beside TRL's: `python -m benchmarks.laptop_step`.

Both train one small text model on a CPU in float32: 8 problems with 8 samples each, one update. A step is everything
from one step's end to the next: rollout, rewards, training, new weights, logs, and for ours the recording. Each trainer
has a process of its own; they take turns, one step each, so that what else the machine does slows both. Prints a table
of medians, and writes `benchmarks/results/laptop_step.json`.

- `one turn`: a fresh network of 2.8 M parameters writes up to 62 tokens.
- `three turns`: the language model of the bundled starter, without its eyes, calls a tool in up to three turns; in TRL
  through `environment_factory`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import RESULTS, commit, markdown, write_result

PACKAGES = ("torch", "transformers", "trl", "numpy")
PROBLEMS, GROUP, LR = 8, 8, 1e-5
#: The reply of the tool `calc_score`.
REPLY = "Score 0.0: that is wrong. Try another way."
QUESTION = "A triangle has angles of {} and {} degrees. Find the third angle."


@dataclass(frozen=True)
class Workload:
    """What is played: the network, the number of model turns and the tokens that an episode may hold."""

    turns: int
    tokens: int


WORKLOADS: Mapping[str, Workload] = {"one turn": Workload(1, 62), "three turns": Workload(3, 192)}


def questions() -> list[str]:
    """Return the problems, of similar length."""
    return [QUESTION.format(20 + index, 40 + index) for index in range(64)]


def write_model(folder: Path, workload: Workload) -> None:
    """Write the network of a workload, with the starter's tokenizer and chat template."""
    import torch
    from transformers import Qwen3Config

    from agents.model import STARTER_PATH
    from agents.model.policy import PolicyModel

    torch.manual_seed(0)
    shutil.copytree(STARTER_PATH, folder)
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    heads = 8 if workload.turns == 1 else 4  # the starter's language model has four
    starter = json.loads((STARTER_PATH / "config.json").read_text())["text_config"]
    config = Qwen3Config(
        **{name: starter[name] for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")},
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    model = PolicyModel.from_config(config)
    if workload.turns > 1:
        weights = dict(PolicyModel.load(STARTER_PATH).named_parameters())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(weights[name.replace("backbone.model.", "backbone.model.language_model.")])
    model.save(folder, torch.float32)


class Gate:
    """Lets a trainer take its next step when the other has taken one, and reports how long it took."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._begun = connection, 0.0

    def wait(self) -> None:
        """Wait for the next step's turn, and start the clock."""
        self._connection.recv()
        self._begun = time.perf_counter()

    def report(self, tokens: float) -> None:
        """Report a step and the mean number of tokens that the model wrote in an episode."""
        self._connection.send((time.perf_counter() - self._begun, tokens))


def ours(connection: Connection, folder: Path, workload: Workload, steps: int) -> None:
    """Train with `trueturn.train`, with its defaults: the agent loop, every episode recorded, weights probed."""
    import trueturn as tt
    from envs.tool_env import ToolEnv
    from envs.tools import tool
    from trainer.callbacks import Callback

    gate = Gate(connection)

    class Game(ToolEnv):
        @tool
        def calc_score(self, answer: str) -> str:
            """Score an answer.

            Args:
                answer: the answer to score
            """
            return REPLY

    class Question(ToolEnv):
        """Without a tool, as TRL's in one turn: the description of one is most of a prompt."""

    class Steps(Callback):
        def on_begin(self, run: Any) -> None:
            gate.wait()

        def on_step_end(self, step: int, row: Mapping[str, float]) -> None:
            gate.report(row["tokens_per_episode"])
            gate.wait()

    rows = [{"problem": text, "answer": "1"} for text in questions()]
    played = Game if workload.turns > 1 else Question
    tt.train(
        tt.env(played, data=rows, max_turns=workload.turns, max_new_tokens=workload.tokens),
        model=str(folder),
        reward_funcs=[lambda trajectory: float(trajectory.ids_T[trajectory.mask_T].mean())],
        callbacks=[Steps()],
        steps=steps,
        problems_per_step=PROBLEMS,
        group_size=GROUP,
        lr=LR,
        eval_size=0,
        device="cpu",
        doctor="off",
        save_every=0,
        out=str(folder.parent / "runs"),
    )


def trl(connection: Connection, folder: Path, workload: Workload, steps: int) -> None:
    """Train with TRL's `GRPOTrainer`: one batch a step, without padding to a fixed length."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.chat_template_utils import qwen3_template
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    gate = Gate(connection)
    written: list[float] = []

    class Game:
        def reset(self, **_: Any) -> None:
            return None

        def calc_score(self, answer: str) -> str:
            """Score an answer.

            Args:
                answer: the answer to score
            """
            return REPLY

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.report(written[-1])
            gate.wait()

    class Counting(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            written.append(float(mask.sum()) / len(mask))
            return output

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [sum(ids) / len(ids) for ids in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {}
    if workload.turns > 1:
        tokenizer.response_template = qwen3_template
        options["environment_factory"] = Game
    args = GRPOConfig(
        output_dir=str(folder.parent / "trl"),
        per_device_train_batch_size=PROBLEMS * GROUP,
        num_generations=GROUP,
        max_completion_length=workload.tokens,
        max_tool_calling_iterations=workload.turns - 1,
        max_steps=steps,
        learning_rate=LR,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = [[{"role": "user", "content": text}] for text in questions()]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    data = Dataset.from_dict({"prompt": prompts})
    Counting(model, reward, args, data, processing_class=tokenizer, callbacks=[Steps()], **options).train()


TRAINERS: Mapping[str, Callable[[Connection, Path, Workload, int], None]] = {"TrueTurn": ours, "TRL": trl}


def quiet(trainer: str, connection: Connection, folder: Path, workload: Workload, steps: int, log: Path) -> None:
    """Run a trainer with its messages in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    TRAINERS[trainer](connection, folder, workload, steps)


def measure(workload: Workload, steps: int, warm_up: int) -> dict[str, Any]:
    """Return the seconds of each timed step and the tokens of an episode, by trainer; steps alternate."""
    context = multiprocessing.get_context("spawn")
    seconds: dict[str, list[float]] = {name: [] for name in TRAINERS}
    tokens: dict[str, list[float]] = {name: [] for name in TRAINERS}
    with tempfile.TemporaryDirectory(prefix="trueturn-") as temporary:
        folder = Path(temporary) / "model"
        write_model(folder, workload)
        here: dict[str, Connection] = {}
        processes = []
        for name in TRAINERS:
            here[name], there = context.Pipe()
            log = Path(temporary) / f"{name}.log"
            args = (name, there, folder, workload, warm_up + steps + 1, log)
            processes.append(context.Process(target=quiet, args=args, daemon=True))
            processes[-1].start()
            there.close()
        try:
            for _ in range(warm_up + steps):
                for name, connection in here.items():
                    connection.send("go")
                    took, length = connection.recv()
                    seconds[name].append(took)
                    tokens[name].append(length)
        except EOFError:
            for name in TRAINERS:
                print(f"{name}: {(Path(temporary) / f'{name}.log').read_text()[-3000:]}")
            raise
        finally:
            for process in processes:
                process.kill()  # a run takes SIGTERM as a wish to stop after the next step
                process.join()
    return {
        name: {"seconds": [round(s, 4) for s in seconds[name][warm_up:]], "tokens": median(tokens[name][warm_up:])}
        for name in TRAINERS
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table, one row a workload."""
    rows = []
    for name, result in results.items():
        mine, other = (median(result[trainer]["seconds"]) for trainer in TRAINERS)
        lengths = [f"{result[trainer]['tokens']:.0f}" for trainer in TRAINERS]
        rows.append((name, f"{mine:.2f}", f"{other:.2f}", f"{other / mine:.2f}", *lengths))
    return markdown(("step", "TrueTurn, s", "TRL, s", "ratio", "tokens an episode", "TRL"), rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each trainer")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--out", type=Path, default=RESULTS / "laptop_step.json")
    args = parser.parse_args()
    at, load = commit(), os.getloadavg()[0]
    results = {name: measure(WORKLOADS[name], args.steps, args.warm_up) for name in args.workloads}
    figures = {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "load": round(load, 2), "results": results}
    command = " ".join(["python -m benchmarks.laptop_step", *sys.argv[1:]])
    write_result(args.out, command, figures, at, PACKAGES)
    print(json.dumps({"load": figures["load"]}), table(results), sep="\n\n")


if __name__ == "__main__":
    main()
