"""Builds the objects of a supervised run from its configuration; every user error is raised before step 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.rendering.renderer import Renderer
from agents.rollout.conversation import ConversationRenderer
from agents.types import SamplingParams
from envs.datasets.conversations import AnsweredSamples, ConversationSource, open_conversations
from envs.datasets.rows import open_rows
from envs.datasets.samples import RowSamples
from envs.errors import UserError
from envs.execution.load import load_env
from envs.images import ImageAccess
from envs.problems import checked_problems
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.tool_calls import ToolFormat, detect_format
from envs.types import SampleSource
from trainer.checkpoint.checkpointer import Checkpoint
from trainer.config.inputs import NUM_HELD_OUT, NUM_TRAIN, EnvConfig
from trainer.config.sft import SftConfig
from trainer.learner.protocol import Learner
from trainer.setup.backend import check_learner
from trainer.setup.model_source import open_model
from trainer.setup.problems import NUM_PROBED, check_command, check_eval_size, probe_tools
from trainer.setup.resumed_inputs import changed_data
from trainer.setup.run_context import begin_or_resume, open_run
from trainer.sft.data import ConversationSet, check_conversations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SftData:
    """The conversations of a run and the model that learns from them; no process is started yet.

    Example: `load_data(SftConfig(...)).train.streams([0])` is the stream of the first conversation.
    """

    model_path: Path | str
    renderer: Renderer
    train: ConversationSet
    evaluation: ConversationSet | None


@dataclass(frozen=True, eq=False)
class SftContext:
    """The checked and ready objects of a run; `cleanup` stops the processes started for it."""

    config: SftConfig
    folder: Path
    data: SftData
    num_steps: int
    learner: Learner
    checkpoint: Checkpoint | None
    cleanup: ExitStack


def load_data(config: SftConfig) -> SftData:
    """Read tokenizer, template and conversations, and check them all.

    Raises:
        UserError: environment, data or model cannot be used, or too many conversations are bad.
    """
    model = open_model(config.model)
    renderer = model.renderer
    tool_format: ToolFormat = detect_format(renderer.chat_template)
    if config.env:
        spec = get_spec(config.env, *config.registry)
    else:
        spec = None
    if spec is not None:
        tool_format = spec.args(tool_format=tool_format).tool_format
    # Only opened here; `checked` reads them whole.
    train, evaluation = _sources(config, spec, tool_format)
    # As in an episode: an environment may keep thoughts from being read as calls.
    thinking = spec.thinking if spec else "auto"
    conversations = ConversationRenderer(renderer, config.model.context_length, tool_format, thinking=thinking)

    def checked(source: ConversationSource) -> ConversationSet:
        return check_conversations(source, conversations, model.facts, config.data.max_bad_frac)

    return SftData(model.path, renderer, checked(train), checked(evaluation) if evaluation else None)


def prepare(config: SftConfig, data: SftData) -> SftContext:
    """Start the learner and make or find the run folder.

    Raises:
        UserError: the processes cannot start, device or folder cannot be used, or the network cannot be trained.
    """
    count = len(data.train)
    if not count:
        raise UserError("conversations", "must be at least one", 0, "give --data, or fix the environment's data set")
    if config.batch_size > count:
        rule = f"must be at most the {count} conversations that there are"
        raise UserError("--batch-size", rule, config.batch_size, "give less, or more conversations")
    # Known only now: bad conversations are left out first.
    num_steps = config.num_steps(count)
    check_learner(config, data.model_path)
    # No token is suppressed, as an engine would: the model learns not to write it.
    sampling = SamplingParams(stop_ids=data.renderer.stop_ids)
    with ExitStack() as cleanup:
        opened = open_run(config, f"sft-seed{config.seed}", cleanup)
        plan = config.plan(num_steps)
        learner = begin_or_resume(config, plan, opened, data.model_path, sampling, cleanup)
        folder = opened.folder
        for change in changed_data(folder, {"--data": config.data.data, "--eval-data": config.data.eval_data}):
            logger.warning(f"not as when the run began: {change}")
        return SftContext(config, folder, data, num_steps, learner.learner, opened.checkpoint, cleanup.pop_all())


def _sources(
    config: SftConfig, spec: EnvSpec | None, tool_format: ToolFormat
) -> tuple[ConversationSource, ConversationSource | None]:
    """Return the training conversations, and held-out ones if there are any."""
    data = config.data
    if spec is None and not data.data:
        fix = "give a file with --data, or an environment with --env"
        raise UserError("--data", "must name conversations", "nothing", fix)
    prompt = (spec.load_system_prompt() if spec else None) or ""
    options = data.options(prompt)
    if spec is not None:
        options = replace(options, default_tools=_tools(config, spec, tool_format))

    def own(split: str, size: int, seed: int) -> ConversationSource:
        assert spec is not None, "only an environment has problems of its own"
        samples = checked_problems(spec, split, size, seed, data.system_prompt or prompt)
        return AnsweredSamples(samples, data.answer_format, options.default_tools)

    if data.data:
        train: ConversationSource = open_conversations(data.data, options, data.train_size)
    else:
        train = own("train", data.train_size or NUM_TRAIN, config.seed)
    if data.eval_size == 0:
        return train, None
    if data.eval_data:
        return train, open_conversations(data.eval_data, options, data.eval_size)
    # Seed 0 for every run, so that runs can be compared.
    if not data.data:
        return train, own("heldout", data.eval_size or NUM_HELD_OUT, 0)
    # A data set of one's own is never split: what is held out must be named.
    check_eval_size(data.eval_size)
    return train, None


def _tools(config: SftConfig, spec: EnvSpec, tool_format: ToolFormat) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of an environment's tools, which are known once it is built for a problem.

    The problem is one of the environment's own, else a row's; without either there are no tools.
    """
    if spec.dataset:
        samples: SampleSource = checked_problems(spec, "train", NUM_PROBED, config.seed)
    else:
        rows = open_rows(config.data.data, "train")
        # Rows of conversations, from which no environment can be built.
        if config.data.prompt_key not in rows.rows[0]:
            return ()
        access = ImageAccess(rows.root, config.data.allow_outside_images)
        samples = RowSamples(rows, config.data.keys, None, access, min(NUM_PROBED, len(rows.rows)))
    see = check_command(EnvConfig(env=(config.env,), registry=config.registry), config.data)
    return tuple(probe_tools(spec, load_env(spec), tool_format, samples, see)[spec.id])
