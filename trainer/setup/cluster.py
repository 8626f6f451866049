"""The part of a Ray cluster that a run holds: reserved for its learner ranks and its servers before anything loads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from envs.errors import UserError
from trainer.config.run import RunConfig
from trainer.learner.ray_group import LearnerGroup, start_ray
from trainer.learner.ray_worker import Place
from trainer.learner.reservation import Request
from trainer.setup.ray_servers import RayLauncher

logger = logging.getLogger(__name__)


class ClusterRoom:
    """Reserves a run's part of a cluster, and says where its servers start.

    Example::

        room = ClusterRoom(config, cleanup)      # --ray-address auto --num-gpus 4 --num-servers 4 --placement split
        LearnerGroup(config, model_path, sampling, room.learners)
    """

    def __init__(self, config: RunConfig, cleanup: ExitStack) -> None:
        """Connect to the cluster and reserve; `cleanup` gives everything back.

        Raises:
            UserError: the cluster cannot be reached, or has too little room.
        """
        cluster = config.cluster
        engine = config.engine
        # Only whoever connected disconnects: a notebook may use the same cluster.
        if start_ray(cluster):
            cleanup.callback(ray.shutdown)
        request = Request.of(cluster, engine.num_servers, engine.tensor_parallel)
        #: Whether servers have GPUs of their own. Else they start after the ranks, whose GPUs they use.
        self.is_split = engine.placement == "split" or (engine.placement == "auto" and fits(request))
        # Servers that share GPUs reserve none: Ray gives a GPU to one bundle alone.
        if not self.is_split:
            request = Request.of(cluster)
        self.learners, servers = request.reserve()
        for group in (self.learners, servers):
            if group is not None:
                cleanup.callback(_give_back, group)
        self._group: LearnerGroup | None = None
        self.launcher = RayLauncher(servers, cluster.num_gpus > 0, self._places)
        if self.is_split:
            own = f"{request.kind}s of their own"
        else:
            own = f"the learner's {request.kind}s"
        logger.info(f"{engine.num_servers} servers on {own}; the learner has {cluster.num_ranks} of the cluster's")

    def hold(self, group: LearnerGroup) -> None:
        """Note which ranks servers share GPUs with."""
        self._group = group

    def _places(self) -> Sequence[Place]:
        assert self._group is not None, "servers on the learner's GPUs start after its ranks"
        return self._group.places


def fits(request: Request) -> bool:
    """Return whether a cluster is large enough, were all of it free."""
    try:
        request.check()
    except UserError:
        return False
    return True


def _give_back(group: PlacementGroup) -> None:
    # A cluster that is gone has nothing to give back.
    if ray.is_initialized():
        remove_placement_group(group)
