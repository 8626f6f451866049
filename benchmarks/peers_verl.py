"""verl's part of `benchmarks.peers`: its agent loop with a function tool, SGLang and FSDP on one GPU.

In: the folder with the task and the model. Out: `steps.jsonl` there, a line as verl logs a step. Weights and moments
are float32 and it computes in bfloat16, as ours. Attention is PyTorch's over padded rows: FlashAttention 2, with which
verl packs rows, is no part of SGLang's environment.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers_task import LR, TURNS, Steps, Task, prompt_images, question

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 768
#: A file of a tool and a reward, in which nothing of ours is imported: verl's workers load it.
PLUGIN = '''
from PIL import Image
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def look() -> ToolResponse:
    """Look at the image once more."""
    return ToolResponse(image=[Image.new("RGB", (128, 128), (37, 91, 151))])

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(solution_str.encode()) % 97 / 97
'''


def write_data(path: Path, task: Task) -> None:
    """Write the problems as verl reads them."""
    import pandas

    rows: list[dict[str, Any]] = []
    for number, images in enumerate(prompt_images(task)):
        encoded = io.BytesIO()
        images[0].save(encoded, "png")
        rows.append(
            {
                "data_source": "peers",
                "agent_name": "tool_agent",
                "prompt": [{"role": "user", "content": f"<image>{question(number)}"}],
                "images": [{"bytes": encoded.getvalue()}],
                "reward_model": {"style": "rule", "ground_truth": "1"},
                "extra_info": {"index": number},
            }
        )
    pandas.DataFrame(rows).to_parquet(path)


def overrides(folder: Path, task: Task) -> dict[str, Any]:
    """Return verl's settings that differ from its defaults."""
    actor, rollout, model = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
    data, plugin = folder / "verl.parquet", folder / "verl_plugin.py"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": task.problems,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": RESPONSE_TOKENS,
        "data.image_patch_size": 16,
        "data.dataloader_num_workers": 2,
        f"{model}.path": folder / "model",
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.optim.lr": LR,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.ppo_mini_batch_size": task.problems,
        f"{actor}.ppo_micro_batch_size_per_gpu": max(1, task.batch // 2),
        f"{rollout}.name": "sglang",
        f"{rollout}.n": task.group,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": 0.35,
        f"{rollout}.max_model_len": 4096,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": task.batch,
        f"{rollout}.agent.num_workers": 4,
        f"{rollout}.multi_turn.enable": True,
        f"{rollout}.multi_turn.max_assistant_turns": TURNS,
        f"{rollout}.multi_turn.format": "hermes",
        f"{rollout}.multi_turn.function_tool_path": plugin,
        # The kernels of FlashAttention 3 are no part of the environment, as for ours.
        f"+{rollout}.engine_kwargs.sglang.attention_backend": "triton",
        f"+{rollout}.engine_kwargs.sglang.mm_attention_backend": "sdpa",
        f"+{rollout}.engine_kwargs.sglang.sampling_backend": "pytorch",
        f"+{rollout}.engine_kwargs.sglang.grammar_backend": "none",
        f"+{rollout}.engine_kwargs.sglang.cuda_graph_max_bs_decode": 128,
        # Ray counts its actors as a core each, however little they do.
        "ray_kwargs.ray_init.num_cpus": 64,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        # The probabilities of the rollout are the old ones, so that no pass recomputes them; ours does so too.
        "algorithm.rollout_correction.bypass_mode": True,
        "reward.custom_reward_function.path": plugin,
        "reward.num_workers": 2,
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.total_training_steps": task.steps,
        "trainer.default_local_dir": folder / "verl",
    }


def main() -> None:
    """Run verl's command, and write a line whenever it logs a step."""
    folder = Path(sys.argv[2])
    task = Task.read(folder)
    steps = Steps(folder)
    (folder / "verl_plugin.py").write_text(PLUGIN)
    write_data(folder / "verl.parquet", task)
    metrics = folder / "verl_metrics.jsonl"
    metrics.unlink(missing_ok=True)
    flags = [f"{name}={value}" for name, value in overrides(folder, task).items()]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)}
    process = subprocess.Popen([sys.executable, "-m", "verl.trainer.main_ppo", *flags], env=environment)
    seen = 0
    while process.poll() is None or seen < lines_of(metrics):
        time.sleep(0.05)
        while seen < lines_of(metrics):
            row = json.loads(metrics.read_text().splitlines()[seen])["data"]
            seen += 1
            tokens = row["perf/total_num_tokens"]
            # Of the old log-probs, which are the rollout's, against those of the update.
            kl = {"kl": abs(row["actor/ppo_kl"])} if "actor/ppo_kl" in row else {}
            # What the tool said is a part of verl's response: two images and what frames them.
            written = row.get("response_length/mean", 0.0) * task.samples
            steps.end(written, tokens, **kl)
    sys.exit(process.returncode)


def lines_of(path: Path) -> int:
    """Return the whole lines of a file, which may not be there yet."""
    return path.read_text().count("\n") if path.exists() else 0


if __name__ == "__main__":
    main()
