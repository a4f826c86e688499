"""Several processes: torch_xla.launch, xmp.spawn, and torch.distributed's back end "xla"."""

import multiprocessing.spawn

import torch
import torch.distributed as dist

import torch_hlo
from torch_hlo import config


class _Launched:
    """What `spawn` told this process."""

    rank, size, port, groups = 0, 1, 0, 0


def place():
    """(rank, number) of this process among those that work together."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if _Launched.port:
        return _Launched.rank, _Launched.size
    return int(config.variable("RANK", 0)), int(config.variable("WORLD_SIZE", 1))


def join(alone=False):
    """Begin torch.distributed if several processes work together, or one is enough, and nobody has;
    their number."""
    if not dist.is_initialized() and (alone or place()[1] > 1):
        dist.init_process_group("xla", init_method="xla://")
    return place()[1]


def spawn(
    fn,
    args=(),
    nprocs=None,
    join=True,
    daemon=False,
    start_method="spawn",
):
    """Call `fn(rank, *args)` in `nprocs` processes, by default CPU_NUM_DEVICES; one is this
    one."""
    size = nprocs or int(config.variable("CPU_NUM_DEVICES", 1))
    if size == 1:
        return _child(0, 1, 0, fn, args)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (size, store.port, fn, args)
    context = torch.multiprocessing.start_processes(_child, given, size, join, daemon, start_method)
    if context is not None:
        context.store = store  # until the processes have ended
    return context


def _child(rank, size, port, fn, args):
    _Launched.rank = rank
    _Launched.size = size
    _Launched.port = port
    begun = dist.is_initialized()
    found = fn(rank, *args)
    if dist.is_initialized() and not begun:
        torch_hlo.mark_step(wait=True)  # others wait for what this one recorded
        dist.destroy_process_group()
    return found


def run_multiprocess(fn, *args, start_method="spawn", **kwargs):
    """What `fn` returns in each process, by rank."""
    with torch.multiprocessing.get_context(start_method).Manager() as manager:
        found = manager.dict()
        spawn(_returning, (found, fn, args, kwargs), start_method=start_method)
        return dict(found)


def _returning(rank, found, fn, args, kwargs):
    found[rank] = fn(*args, **kwargs)


def spawn_threads(fn, args=()):
    """The function: this process has one device."""
    fn(0, *args)


def launch(
    fn,
    args=(),
    start_method="spawn",
    debug_single_process=False,
):
    """`spawn`, or a call of `fn` in a process that torchrun has started."""
    if dist.is_torchelastic_launched():
        fn(int(config.variable("LOCAL_RANK", 0)), *args)
    else:
        spawn(fn, args, 1 if debug_single_process else None, start_method=start_method)


class MpSerialExecutor:
    """Runs a function in one process after another."""

    def __init__(self):
        self._lock = torch.multiprocessing.Lock()

    def run(self, fn):
        with self._lock:
            return fn()


class MpModelWrapper(MpSerialExecutor):
    """A model that the processes move to the device one after another."""

    def __init__(self, model):
        super().__init__()
        self._model = model

    def to(self, device):
        return self.run(lambda: self._model.to(device))


def _rendezvous(url, *args, **kwargs):
    """`init_method="xla://"`: the processes of `spawn`, or those of torchrun."""
    store, rank, size = dist.HashStore(), 0, 1
    if _Launched.port:
        store = dist.TCPStore("127.0.0.1", _Launched.port, is_master=False)
        rank, size = _Launched.rank, _Launched.size
    elif place()[1] > 1:
        store, rank, size = next(dist.rendezvous("env://", *args, **kwargs))
    _Launched.groups += 1  # those that have ended leave their addresses in the store
    yield dist.PrefixStore(str(_Launched.groups), store), rank, size


def _group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def install(first):
    """Register the back end "xla". New processes unpickle `first` before they import the script."""
    dist.Backend.register_backend("xla", _group, devices=["cpu", "xla"])
    dist.register_rendezvous_handler("xla", _rendezvous)
    original = multiprocessing.spawn.get_preparation_data

    def told(name):
        return {"torch_hlo": first, **original(name)}

    multiprocessing.spawn.get_preparation_data = told
