"""What is true of the process while tensors are recorded: one Session, whose fields are the state
of this room. Each belongs to the file that its comment names. What runs steps has its own state, in
the engine that hangs here."""

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch

from torch_hlo import config, log
from torch_hlo.lowering.core import RECORDING, Out
from torch_hlo.pytorch.operators import OpOverload

from .engine import Engine
from .meta import Meta


class Tracing:
    """A captured function is being traced: what is pending belongs to its call. So other threads
    wait before they record or cut a step, until it is over; if that takes longer than PATIENCE (it
    may be waiting for them), they go on and the trace is `disturbed`."""

    PATIENCE = 10.0  # seconds

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = threading.Event()
        self.disturbed = False

    def wait(self) -> bool:
        """Wait until it is over; False where this thread may go on at once."""
        # in the middle of an op that began before
        if threading.get_ident() == self.thread or self.disturbed or RECORDING._is_owned():
            return False
        # not of Python: autograd's, which runs functorch's backward passes for the call
        if isinstance(threading.current_thread(), threading._DummyThread):
            return False
        self.disturbed = not self.over.wait(self.PATIENCE)
        return True


class Here(threading.local):
    """What is true of one thread."""

    def __init__(self) -> None:
        self.engine: Engine | None = None  # in place of the process's
        self.nested = 0  # depth of decompositions
        self.started = False  # dynamo/step.py: a captured function runs
        # dynamo/device_graph.py: what the operation that a graph is at came from, and its module
        self.line = self.module = ""
        self.decomposing: set[OpOverload] = set()


class Session:
    """Fields change while RECORDING (lowering/core/tape.py) is held, but where a lock is named."""

    def __init__(self) -> None:
        self.here = Here()
        self.engine: Engine | None = None  # of threads that have none of their own; see `use`
        # aten/dispatch.py: how many values may be pending before the graph is cut
        self.limit: int = config.get("MAX_NODES")
        # recording.py: whether nodes know the line of the program that they come from
        self.sources = config.get("LOG") >= 1 or any(
            map(config.get, ("DUMP", "NAN", "CHECK_INDEX"))
        )
        # recording.py: operators with operands before an integer that varies
        self.varying: set[tuple] = set()
        # recording.py: says in which nn.Module an operation is, while a profile is recorded
        self.modules: Callable[[], str] | None = None
        # run/executor.py: what runs jobs, and what compiles; made anew in a forked child
        self.executor: Any = None
        self.compiler: Any = None
        # ops/optimizer_state.py: entries of an optimizer's state when last seen
        self.state_sizes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._storages()
        self._captures()
        self._tensors()
        self._meshes()

    def _storages(self) -> None:
        # storage.py. The lock protects "compare a storage's value, then replace it", and who owns
        # an array. It is taken last: any other may be held, and nothing is taken under it.
        self.values = threading.Lock()
        self.pending: deque[ref] = deque()  # storages that got a pending value, in that order
        self.viewed: deque[ref] = deque()  # storages with cached values of views
        self.effects: list[Out] = []  # what has to be computed though no tensor has it
        # filled.py: storages that began as one number everywhere in this step, and that value
        self.filled: list[tuple[ref, Out]] = []
        # conditions.py: values that are looked at when they are there, and how. Not locked: threads
        # append to one end and take from the other.
        self.expected: deque[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = deque()
        self.judges: set[int] = set()  # threads that look at them now

    def _captures(self) -> None:
        # tracing.py. The lock is held while a captured function is traced: one at a time. Taken
        # before RECORDING, never under it; whoever waits gives up after Tracing.PATIENCE.
        self.traced = threading.Lock()
        self.tracing: Tracing | None = None  # the trace under way

    def _meshes(self) -> None:
        # run/spmd.py: whether anything was ever annotated (steps of other programs pay nothing),
        # and the programs for several devices
        self.sharded = False
        # run/journal.py: what is recorded on the mesh, where every device has its own process
        self.journal: Any = None
        self.partitioned: WeakSet[Any] = WeakSet()

    def _tensors(self) -> None:
        # tensor.py: what was asked for since tensors were last made ahead, and what was made
        self.taken: deque[Meta] = deque(maxlen=4096)
        self.stocked: Counter[Meta] = Counter()
        self.proxies: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # generator.py: C++ hands a generator on as a new Python object; this is the user's
        self.generators: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # serialization.py: storages, their values, and weakly the copies that are being saved
        self.saved: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


_session = Session()


def current() -> Session:
    """The process's session."""
    return _session


def line() -> str:
    """The user's: of the operation of a graph that this thread is at, or of Python."""
    return _session.here.line or log.source()


def engine() -> Engine:
    """What evaluates in this thread."""
    found = _session.here.engine or _session.engine
    assert found is not None, "torch_hlo.lazy.install has not been run"
    return found


@contextlib.contextmanager
def use(new: Engine, everywhere: bool = True) -> Iterator[None]:
    """Evaluate with `new` within a `with` block, in all threads or in this one. Tensors made inside
    must not be used outside."""
    holder: Session | Here = _session if everywhere else _session.here
    before, holder.engine = holder.engine, new
    try:
        yield
    finally:
        holder.engine = before
