"""torch_xla.experimental.distributed_checkpoint: planners that write and read sharded tensors block
by block, and the checkpoints of a run."""

import collections
import shutil
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.utils import _pytree as pytree

from torch_hlo.distributed import checkpoint as checkpoints
from torch_hlo.lazy.record import HloTensor

from . import sharding_names
from .sharding_names import prime_optimizer

_CpuShards = checkpoints.Spread


def _is_sharded_tensor(x):
    """Whether a tensor has several blocks."""
    if isinstance(x, _CpuShards):
        return any(block.shape != x.shape for block in x.blocks.values())
    found = sharding_names.placement(x) if isinstance(x, HloTensor) else None
    return found is not None and not found.is_replicated


def _sharded_cpu_state_dict(state_dict):
    """The state with its tensors on the CPU, those that are sharded as their blocks."""
    return pytree.tree_map_only(torch.Tensor, checkpoints.to_write, state_dict)


class _Planner:
    @property
    def sharded_state_dict(self):
        return {k: x for k, x in self.state_dict.items() if _is_sharded_tensor(x)}

    @property
    def unsharded_state_dict(self):
        return {k: x for k, x in self.state_dict.items() if not _is_sharded_tensor(x)}


class SPMDSavePlanner(_Planner, DefaultSavePlanner):
    """Writes the blocks of sharded tensors, each once."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        state = _sharded_cpu_state_dict(state_dict)
        super().set_up_planner(state, storage_meta, is_coordinator)


class SPMDLoadPlanner(_Planner, DefaultLoadPlanner):
    """Reads what each block needs. A tensor changes when all of its blocks have been read."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        mine = {}
        checkpoints.flatten(state_dict, mine)
        read = {k: checkpoints.to_read(x) for k, x in mine.items()}
        self._targets = {k: (x, read[k]) for k, x in mine.items()}
        found = {id(x): read[k] for k, x in mine.items()}
        state = pytree.tree_map_only(torch.Tensor, lambda x: found[id(x)], state_dict)
        super().set_up_planner(state, metadata, is_coordinator)
        self.original_state_dict = state_dict

    def create_local_plan(self):
        plan = super().create_local_plan()
        self._left = collections.Counter(item.dest_index.fqn for item in plan.items)
        return plan

    def commit_tensor(self, read_item, tensor):
        name = read_item.dest_index.fqn
        self._left[name] -= 1
        if not self._left[name]:
            checkpoints.take(*self._targets[name])


class Preemption:
    """Whether somebody asks this process to end, which it does after its next checkpoint."""

    before, reached = None, False

    @classmethod
    def watch(cls):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "CheckpointManager: only the main thread notices SIGTERM; make it there, or with"
                " chkpt_on_preemption=False"
            )

        def noted(*args):
            cls.reached = True

        if cls.before is None:
            cls.before = signal.signal(signal.SIGTERM, noted)

    @classmethod
    def forget(cls):
        if cls.before is not None:
            signal.signal(signal.SIGTERM, cls.before)
        cls.before, cls.reached = None, False

    @classmethod
    def sync_point_reached(cls, step):
        """Whether any process has been asked. All of them call this."""
        if not checkpoints.many():
            return cls.reached
        asked = torch.tensor(int(cls.reached))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)


class CheckpointManager:
    """Checkpoints of a directory, one every `save_interval` steps and when the process is asked to
    end (SIGTERM); the `max_to_keep` that were written last stay (0: all)."""

    def __init__(
        self,
        path,
        save_interval,
        max_to_keep=0,
        async_queue_size=1,
        process_group=None,
        chkpt_on_preemption=True,
    ):
        assert save_interval > 0, "save_interval must be positive"
        self._path = str(path)
        self._interval = save_interval
        self._keep = max_to_keep
        self._writer = ThreadPoolExecutor(1)
        self._size = max(async_queue_size, 1)
        self._written: collections.deque[Future] = collections.deque()
        self._preemption = chkpt_on_preemption
        if chkpt_on_preemption:
            Preemption.watch()

    def reached_preemption(self, step):
        return self._preemption and Preemption.sync_point_reached(step)

    def should_save(self, step):
        return step % self._interval == 0 or self.reached_preemption(step)

    def save(self, step, state_dict, force=False):
        if wanted := force or self.should_save(step):
            self.join()
            self._save(step, state_dict)
        return wanted

    def save_async(self, step, state_dict, force=False):
        """`save` in the background, of the values that the tensors have now. Several processes have
        to meet for that, and wait."""
        if checkpoints.many():
            return self.save(step, state_dict, force)
        if not (force or self.should_save(step)):
            return False
        state = pytree.tree_map_only(
            torch.Tensor,
            lambda x: checkpoints.to_write(x) if isinstance(x, HloTensor) else x.clone(),
            state_dict,
        )
        while len(self._written) > self._size:
            self._written.popleft().result()
        self._written.append(self._writer.submit(self._save, step, state))
        return True

    def _save(self, step, state_dict):
        checkpoints.save(state_dict, self._path, step, keep=0)
        if self._keep and checkpoints.first():
            found = [checkpoints.at(self._path, n) for n in checkpoints.steps(self._path)]
            found.sort(key=lambda d: d.stat().st_mtime_ns)
            for stale in found[: -self._keep]:
                shutil.rmtree(stale)

    def restore(self, step, state_dict):
        self.join()
        path = checkpoints.at(self._path, step)
        state_dict.update(checkpoints.load(state_dict, path))

    def all_steps(self):
        return checkpoints.steps(self._path)

    def join(self):
        """Wait for what is being written. Raises what writing raised."""
        while self._written:
            self._written.popleft().result()


__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
