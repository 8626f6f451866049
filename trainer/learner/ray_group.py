"""Drives all learner ranks as one `Learner`: each call goes to every rank, and the first rank that fails ends all."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from agents.engines.weight_servers import LOCAL_HOSTS, Adapter, GroupAddress, WeightMessage
from agents.types import ProcessedImage, SamplingParams
from envs.errors import UserError, first_line
from envs.workers.ray_worker import begin_ray
from trainer.config.learner import ClusterConfig, LearnerPlan
from trainer.learner.cuda_ipc import WeightHandles
from trainer.learner.layout import Layout
from trainer.learner.protocol import CheckpointFailed, LearnerLost
from trainer.learner.rank_split import light_images, shares
from trainer.learner.ray_worker import LearnerWorker, Place
from trainer.learner.reservation import Request, wait_for
from trainer.learner.weight_group import SHARED_VARIABLES
from trainer.learner.weight_sender import Sent
from trainer.types import StepStats, TrainingSample

#: How long to wait for the head of a cluster to answer.
ANSWER_S = 10.0
#: How long to wait, after a rank has failed, for another rank whose death caused that failure.
REASON_S = 3.0
#: How long to wait, when the group is closed, for a call of another thread to fail.
CLOSE_S = 15.0
#: What torch says where a rank does not fit, and what to do about it.
OUT_OF_MEMORY = "CUDA out of memory"
LESS_MEMORY = "give less --max-tokens-per-microbatch, or --recompute 1; python -m trainer.memory says what a run takes"


def end_of_traceback(text: str) -> str:
    """Return the last lines of a rank's traceback, as Ray gives it: what failed, and where."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if set(line) - set(" ^~")]
    end = " | ".join(f"{line:.250}" for line in lines[-4:])
    if OUT_OF_MEMORY in end:
        return f"{end}; {LESS_MEMORY}"
    return end


class LearnerGroup:
    """N learner ranks in processes of their own.

    Example::

        group = LearnerGroup(config, model_path, sampling)      # --num-learners 2
        stats = group.step([samples])
        group.close()
    """

    def __init__(
        self,
        config: LearnerPlan,
        model_path: Path | str,
        sampling: SamplingParams,
        reserved: PlacementGroup | None = None,
    ) -> None:
        """Start Ray or connect to it, and start the ranks of `config.cluster`, in bundles of `reserved` if given.

        Raises:
            UserError: the cluster cannot be reached or has too few GPUs or CPUs, or a rank cannot start; says why.
        """
        cluster, self._on_gpu = config.cluster, config.cluster.num_gpus > 0
        self._layout = Layout.of(cluster)
        self.device = torch.device("cuda" if self._on_gpu else "cpu")
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.lock = threading.RLock()
        self.steps_done = 0
        self.workers: list[Any] = []
        self.places: list[Place] = []
        self._lost: LearnerLost | None = None
        self._is_joined = False
        self._reserved: PlacementGroup | None = None
        self._owns_ray = start_ray(cluster)
        try:
            self._place(cluster, self._on_gpu, reserved)
            self._join(config, model_path, sampling)
        except BaseException:
            self.close()
            raise

    def _place(self, cluster: ClusterConfig, on_gpu: bool, reserved: PlacementGroup | None) -> None:
        """Start a process per rank. Ranks on this host come first: rank 0 hands weights over and writes files."""
        wanted = cluster.num_ranks
        request = Request.of(cluster)
        if reserved is None:
            reserved = self._reserved = request.reserve()[0]
        try:
            wait_for([reserved])  # Ray finds other places for those of a node that is gone
        except GetTimeoutError:
            raise request.no_room() from None
        actor = ray.remote(LearnerWorker)
        for index in range(wanted):
            strategy = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=index)
            options = actor.options(
                num_cpus=int(not on_gpu), num_gpus=int(on_gpu), max_restarts=0, scheduling_strategy=strategy
            )
            self.workers.append(options.remote())
        places = self._call("place")
        here = ray.get_runtime_context().get_node_id()

        def order(rank: int) -> tuple[bool, str, list[str]]:
            place = places[rank]
            return place.node != here, place.node, [gpu.zfill(4) for gpu in place.gpus]

        ranks = sorted(range(wanted), key=order)
        self.workers = [self.workers[r] for r in ranks]
        self.places = [places[r] for r in ranks]

    def _join(self, config: LearnerPlan, model_path: Path | str, sampling: SamplingParams) -> None:
        """Let every rank load its part of the network, in one process group."""
        count = len(self.workers)
        # Ranks may have another working directory.
        if Path(model_path).exists():
            model_path = Path(model_path).absolute()
        [address, *_] = self._call("address")
        # Ranks of a node share its cores.
        on_node = [sum(other.node == place.node for other in self.places) for place in self.places]
        ranks = enumerate(on_node)
        # NCCL reads them once in a process, when it is first used.
        variables = {name: os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
        given = (config, model_path, sampling)
        self._call("join", *((*given, rank, count, num, address, variables) for rank, num in ranks))
        self._is_joined = True

    @property
    def _share_of_rank(self) -> list[int]:
        """The share of the samples that each rank trains on: ranks that share a network have the same."""
        count = len(self.workers)
        return [self._layout.data_rank(rank, count) for rank in range(count)]

    @property
    def is_here(self) -> bool:
        """Whether rank 0 runs on this host."""
        return self.places[0].node == ray.get_runtime_context().get_node_id()

    @property
    def gpus_here(self) -> tuple[int, ...]:
        """The GPUs of this host that ranks use, numbered as this process sees them."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if seen:
            names = seen.split(",")
        else:
            names = [str(number) for number in range(torch.cuda.device_count())]
        node = ray.get_runtime_context().get_node_id()
        own = [gpu for place in self.places if place.node == node for gpu in place.gpus]
        return tuple(sorted(names.index(gpu) for gpu in own if gpu in names))

    def step(self, minibatches: Sequence[Sequence[TrainingSample]]) -> StepStats:
        """Take a step, each rank on its share; raises `LearnerLost` if a rank fails."""
        with self.lock:
            # Put once: ranks that share a network read the same object.
            sent = [ray.put(share) for share in shares(minibatches, self._layout.data_parallel(len(self.workers)))]
            by_rank: list[StepStats] = self._call("learner.step", *((sent[number],) for number in self._share_of_rank))
            self.steps_done += 1
            return replace(by_rank[0], logprobs={key: own for s in by_rank for key, own in s.logprobs.items()})

    def free_memory(self) -> None:
        """Let every rank return its GPU memory that holds no data."""
        self._call("learner.free_memory")

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob, at temperature 1, of each id of a stream but the first, in nats."""
        return self._call("learner.score", (tuple(ids), light_images(images)))[0]

    def sum_logprobs(self, samples: Sequence[TrainingSample]) -> tuple[float, int]:
        """Return the sum of the log-probs of the samples' model tokens, in nats, and the number of these tokens."""
        dealt = shares([samples], self._layout.data_parallel(len(self.workers)))
        return self._call("learner.sum_logprobs", *((dealt[number][0],) for number in self._share_of_rank))[0]

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by parameter name, in float32 on the CPU. Do not write to them."""
        arrays = self._call("weights")[0]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def adapter(self) -> Adapter:
        """Return the low-rank updates alone."""
        return self._call("adapter")[0]

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Let rank 0 write a model folder. If rank 0 runs on another host, both hosts must see the folder."""
        self._call("learner.save", (folder.absolute(), dtype))

    def begin_checkpoint(self, folder: Path) -> None:
        """Let every rank write its shards in the background, into a folder that all hosts see."""
        self._call("learner.begin_checkpoint", (folder.absolute(),))

    def is_checkpoint_written(self, wait: bool) -> bool:
        """Return whether all ranks have written; raises `CheckpointFailed` if one could not."""
        return all(self._call("learner.is_checkpoint_written", (wait,)))

    def restore(self, folder: Path) -> None:
        """Let every rank read its shards; raises `UserError` for another network."""
        self.steps_done = self._call("restore", (folder.absolute(),))[0]

    @contextlib.contextmanager
    def share_weights(self) -> Iterator[WeightHandles]:
        """Lend rank 0's weights to processes on its host, as `trainer.learner.cuda_ipc.lend_weights` does."""
        shared = self._call("share_weights")[0]
        try:
            yield shared
        finally:
            if self._lost is None:
                self._call("take_back")

    def messages(self) -> Sequence[WeightMessage]:
        """Return what `send_weights` sends, in order."""
        return self._call("sender.messages")[0]

    def open_group(self, name: str, hosts: Sequence[str], num_receivers: int) -> GroupAddress:
        """Let rank 0 open a process group with servers on these hosts; return where they meet."""
        if self.is_here:
            here = "127.0.0.1"
        else:
            here = ray.util.get_node_ip_address()
        # What is local to the command may be another host to rank 0.
        hosts = [here if host in LOCAL_HOSTS else host for host in hosts]
        return self._call("sender.open_group", (name, hosts, num_receivers))[0]

    def join_group(self) -> str:
        """Let rank 0 join it; return why it failed, "" if it did not."""
        return self._call("sender.join_group")[0]

    def send_weights(self) -> Sent:
        """Let all ranks gather the weights, and rank 0 send them."""
        return self._call("sender.send_weights")[0]

    def close_group(self) -> None:
        """Let rank 0 leave the group, if there is one."""
        if self._lost is None:
            self._call("sender.close_group")

    def _call(self, method: str, *args: tuple[Any, ...]) -> list[Any]:
        """Call a method on every rank and return all results, in rank order.

        `args` holds the arguments of each rank, or one tuple that all ranks get.

        Raises:
            UserError: a rank could not start with what the user gave.
            CheckpointFailed: a rank could not write its part; all of them still work.
            LearnerLost: a rank died or failed. The others are ended, and every later call raises it too.
        """
        if len(args) == 1:
            given = args * len(self.workers)
        else:
            given = args or ((),) * len(self.workers)
        with self.lock:
            if self._lost is not None:
                raise self._lost
            refs = [w.call.remote(method, *own) for w, own in zip(self.workers, given, strict=True)]
            waiting = list(refs)
            # In the order in which they end: a rank that fails leaves the others waiting for it.
            while waiting:
                [done], waiting = ray.wait(waiting, num_returns=1)
                try:
                    ray.get(done)
                except RayError as error:
                    raise self._failure(method, refs, refs.index(done), error) from None
            return ray.get(refs)

    def _failure(self, method: str, refs: Sequence[Any], rank: int, error: RayError) -> Exception:
        """End all ranks and return the error to raise: it names the rank that died or, if none did, failed first."""
        if isinstance(error, RayTaskError):
            cause = error.cause
        else:
            cause = error
        if isinstance(cause, UserError | CheckpointFailed):
            return cause
        others = [ref for ref in refs if ref != refs[rank]]
        # When a rank dies, another rank loses its connection, and the call of that one may fail first.
        answered, waiting = ray.wait(others, num_returns=len(others), timeout=REASON_S) if others else ((), ())
        silent = [refs.index(ref) for ref in waiting]
        for ref in answered:
            try:
                ray.get(ref)
            except RayActorError as death:
                if not isinstance(error, RayActorError):
                    rank = refs.index(ref)
                    error = death
            except RayError:
                continue
        self._end_ranks()
        method = method.rpartition(".")[2]
        place = self.places[rank] if self.places else None
        if place:
            where = f" (process {place.pid} on {place.host})"
        else:
            where = ""
        name = f"learner rank {rank} of {len(self.workers)}{where}"
        if isinstance(error, RayActorError) and self.places:
            what = "died: it was killed, ran out of memory, or waited too long for another (learner_timeout_s)"
        else:
            what = f"failed in {method}: {end_of_traceback(str(error))}"
        # Until then it is the start that has failed, which a setting may have caused.
        if not self._is_joined:
            if self.device.type == "cuda":
                flag = "--num-gpus"
            else:
                flag = "--num-learners"
            return UserError(flag, "must start every learner process", name, what)
        if silent:
            what += f"; no answer from rank {', '.join(map(str, silent))}"
        self._lost = LearnerLost(f"{name} {what}")
        return self._lost

    def _end_ranks(self) -> None:
        """Kill all ranks and free their places; a call that waits for a rank, or for a place, fails."""
        for worker in self.workers:
            # A rank that waits in a collective would not answer a request to end.
            ray.kill(worker)
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None

    def close(self) -> None:
        """End all ranks, and Ray if it was started here."""
        if not ray.is_initialized():
            return
        self._lost = self._lost or LearnerLost("the learners were closed")
        self._end_ranks()
        if self._owns_ray:
            # Calls of other threads fail soon now that the ranks have ended. Ray must not go while one is in it.
            is_held = self.lock.acquire(timeout=CLOSE_S)
            try:
                ray.shutdown()
            finally:
                if is_held:
                    self.lock.release()


def start_ray(cluster: ClusterConfig, more_cpus: int = 0) -> bool:
    """Start Ray on this host, or connect to `--ray-address`; return False if this process is already connected.

    Ray on this host has a CPU for each rank, and `more_cpus` for environments.

    Raises:
        UserError: there is no cluster at the address.
    """
    if ray.is_initialized():
        return False
    # The group reports a failure once, by the rank's name: Ray would print those of the other ranks too.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if not cluster.ray_address:
        try:
            begin_ray("", num_cpus=cluster.num_ranks + more_cpus, num_gpus=cluster.num_gpus)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            if cluster.num_gpus:
                flag = "--num-gpus"
            else:
                flag = "--num-learners"
            fix = f"set RAY_TMPDIR to a short path that can be written to ({first_line(error):.120})"
            raise UserError(flag, "must be able to start Ray on this host", cluster.num_ranks, fix) from error
        return True
    try:
        host, _, port = cluster.ray_address.rpartition(":")
        if host and port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        begin_ray(cluster.ray_address)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        fix = "start one with `ray start --head`; a running cluster may need its token: RAY_AUTH_MODE=token"
        rule = "must be a running Ray cluster"
        raise UserError("--ray-address", rule, cluster.ray_address, f"{fix} ({first_line(error):.120})") from error
    return True
