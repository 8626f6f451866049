"""How ranks share one network: the sizes of Megatron's parallel groups."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.learner import LayoutConfig


@dataclass(frozen=True)
class Layout:
    """How many ranks share the parts of one network and of one stream. A size of 1 means: not shared.

    `tensor` and `pipeline` cut the network, `context` cuts the stream. The experts of a mixture are cut on their own:
    `expert` shares them out whole, `expert_tensor` cuts each. With `sequence`, the ranks of a tensor group also share
    the tokens between its matrices.

    Example::

        >>> layout = Layout(tensor=2, pipeline=2)
        >>> layout.model_parallel, layout.data_parallel(8)
        (4, 2)
        >>> Layout(tensor=4, expert=8, expert_tensor=1).expert_data_parallel(16)
        2
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    sequence: bool = False

    @classmethod
    def of(cls, config: LayoutConfig) -> Layout:
        """Return the layout of the flags `--tp` to `--sp`."""
        return cls(config.tp, config.pp, config.ep, config.etp, config.cp, config.sp)

    def flags(self) -> str:
        """Return the flags of `trainer.run` for it.

        >>> Layout(tensor=4, sequence=True).flags()
        '--backend megatron --tp 4 --sp'
        """
        sizes = {
            "tp": self.tensor,
            "pp": self.pipeline,
            "ep": self.expert,
            "etp": self.expert_tensor,
            "cp": self.context,
        }
        # Sizes of 1 are the defaults: a command shows what is shared alone.
        words = [f"--{name} {size}" for name, size in sizes.items() if size > 1]
        return " ".join(["--backend megatron", *words, *(["--sp"] if self.sequence else [])])

    @property
    def model_parallel(self) -> int:
        """The number of ranks that compute one stream together."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_parallel(self) -> int:
        """The number of ranks that hold the experts of the whole network once."""
        return self.expert * self.expert_tensor * self.pipeline

    def data_parallel(self, num_ranks: int) -> int:
        """Return how many groups of `num_ranks` ranks compute different streams at once."""
        return _share(num_ranks, self.model_parallel)

    def data_rank(self, rank: int, num_ranks: int) -> int:
        """Return which share of the samples a rank takes; Megatron numbers ranks by tensor, context, data, pipeline.

        >>> [Layout(tensor=2, pipeline=2).data_rank(rank, 8) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        # Ranks of one tensor group talk the most, so Megatron makes them neighbours, on one node.
        return rank // (self.tensor * self.context) % self.data_parallel(num_ranks)

    def first_of_last_stage(self, num_ranks: int) -> int:
        """Return the first rank of the last pipeline stage, which knows log-probs.

        >>> Layout(tensor=2, pipeline=2).first_of_last_stage(8)
        4
        """
        # The stage is the outermost part of a rank's number.
        return num_ranks // self.pipeline * (self.pipeline - 1)

    def expert_data_parallel(self, num_ranks: int) -> int:
        """Return how many of `num_ranks` ranks hold the same experts."""
        return _share(num_ranks, self.expert_parallel)


def _share(num_ranks: int, size: int) -> int:
    # `check_layout` refuses it for a user: here it would be a fault of ours.
    assert num_ranks % size == 0, f"{num_ranks} ranks, groups of {size}"
    return num_ranks // size
