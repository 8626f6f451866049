"""All settings of supervised fine-tuning. It shares sections with reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from envs.config.settings import Section
from envs.datasets.conversations import ANSWER, ANSWER_FORMAT, ConversationOptions
from envs.problems import RowsConfig
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.inputs import NUM_HELD_OUT, NUM_TRAIN, ModelConfig
from trainer.config.learner import AdamWConfig, ClusterConfig, LearnerConfig, OptimConfig
from trainer.config.run import CheckpointConfig, RunConfig, RunDirConfig

#: With advantage 1, this is the negative log-likelihood, averaged over the tokens of an update.
LIKELIHOOD = AlgorithmConfig(policy_loss="likelihood", aggregation="token-mean", correction="none")


class ConversationsConfig(RowsConfig):
    """Conversations: rows with messages, or problems with their answers."""

    messages_key: str = Field(default="messages", description="column of a conversation's messages")
    tools_key: str = Field(default="tools", description="column of the schemas of a conversation's tools")
    # In the words that the environment's grader reads.
    answer_format: str = Field(
        default=ANSWER_FORMAT,
        description=f"the assistant's message for a problem without a conversation; {ANSWER} stands for the answer",
    )
    eval_data: str = Field(
        default="", description="held-out conversations, as --data; empty: the environment's own, when --data is empty"
    )
    system_prompt: str = Field(default="", description="system prompt; empty: the row's own, else the environment's")
    # Strict by default: a silent tenth of the rows missing is a fault of the file.
    max_bad_frac: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="largest share of invalid conversations to leave out; more of them are an error",
    )
    train_size: int | None = Field(
        default=None,
        ge=1,
        description="number of conversations to learn from, the first ones of --data; empty: all of them, or "
        f"{NUM_TRAIN} of the environment's own problems",
    )
    eval_size: int | None = Field(
        default=None,
        ge=0,
        description="number of held-out conversations, the first ones of --eval-data; empty: all of them, or "
        f"{NUM_HELD_OUT} of the environment's own problems; 0: none",
    )

    @field_validator("answer_format")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        # Otherwise every problem would be taught the same text.
        if ANSWER not in value:
            raise ValueError(f"must hold the word {ANSWER}, in whose place the answer is put")
        return value

    def options(self, system_prompt: str = "") -> ConversationOptions:
        """Return the options for reading rows; `system_prompt` is the environment's."""
        return ConversationOptions(
            messages_key=self.messages_key,
            tools_key=self.tools_key,
            keys=self.keys,
            answer_format=self.answer_format,
            system_prompt=self.system_prompt,
            default_system_prompt=system_prompt,
            allow_outside_images=self.allow_outside_images,
        )


class SftOptimConfig(AdamWConfig):
    """Optimizer, with one update per step."""

    # Larger than in reinforcement: the target is the same in every epoch.
    lr: float = Field(default=1e-4, gt=0, description="learning rate")
    schedule: Literal["constant", "cosine"] = Field(
        default="cosine", description="learning rate over all steps, multiplied by the warm-up"
    )
    warmup_steps: int = Field(default=4, ge=0, description="steps of linear warm-up")


class SftConfig(Section):
    """Supervised fine-tuning."""

    epochs: int = Field(default=1, ge=1, description="passes over the conversations")
    # Given steps win over epochs, so a short trial needs no smaller file.
    steps: int = Field(default=0, ge=0, description="training steps; 0: those of --epochs")
    batch_size: int = Field(default=32, ge=1, description="conversations per step; a step is one update")
    eval_every: int = Field(
        default=0,
        ge=0,
        description="steps between evaluations on held-out conversations; 0: only before and after training",
    )
    seed: int = Field(default=0, ge=0, description="seed of the order of conversations, and of new adapters")
    show: int = Field(
        default=0, ge=0, description="print this many conversations, with the learned text in [[ ]], and exit"
    )
    env: str = Field(
        default="",
        description="environment whose system prompt and tools complete conversations without them, and whose own "
        "problems are the data without --data; empty: none",
    )
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    data: ConversationsConfig = ConversationsConfig()
    model: ModelConfig = ModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    optim: SftOptimConfig = SftOptimConfig()
    learner: LearnerConfig = LearnerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: RunDirConfig = RunDirConfig()

    def num_steps(self, num_conversations: int) -> int:
        """Return the number of steps of a run.

        >>> SftConfig(epochs=3, batch_size=32).num_steps(100)   # the last batch has 12
        10
        """
        # Rounded up: the last batch may be a smaller one.
        return self.steps or -(-self.epochs * num_conversations // self.batch_size)

    def plan(self, num_steps: int) -> RunConfig:
        """Return the settings that start the learner: those of a run with one update per step."""
        return RunConfig(
            steps=num_steps,
            seed=self.seed,
            model=self.model,
            cluster=self.cluster,
            optim=OptimConfig(**self.optim.model_dump()),
            learner=self.learner,
            algorithm=LIKELIHOOD,
        )
