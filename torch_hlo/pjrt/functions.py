"""The table of functions that JAX calls.

Functions that only read a property of an object are machine code: they need no interpreter, and
work when Python has ended. The others are Python functions under `@implements`:

    @implements("Client_LookupDevice")
    def lookup(args): args.device = …
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch_hlo.compiler.llvm import system
from torch_hlo.device.cpu.engine import loaded
from torch_hlo.device.pjrt.pjrt_structs import (
    FUNCTIONS,
    HEAD,
    LAYOUTS,
    LAYOUTS_EXTENSION,
    MINOR,
    STRUCTURES,
)
from torch_hlo.tables import entry

from .objects import GETTERS, WORDS, Object, PluginError, error, outputs_of

Function = Callable[[Any], int | None]
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
IMPLEMENTED: dict[str, Function] = {}
_INTS = {ctypes.c_int: "i32", ctypes.c_bool: "i8", ctypes.c_void_p: "i64"}
# Functions for which there is nothing to do. Clients and topologies stay with the process, contexts
# are shared, a program's description is the loaded one, and layouts are kept.
_EMPTY = (
    "Plugin_Initialize Event_Error Client_UpdateGlobalProcessInfo Client_Destroy"
    " TopologyDescription_Destroy Executable_Destroy ExecuteContext_Destroy"
    " Layouts_MemoryLayout_Destroy"
)


def implements(*names: str) -> Callable[[Function], Function]:
    """Decorator: the Python function that stands in the table under these names."""
    assert STRUCTURES.keys() >= set(names), names
    return entry(IMPLEMENTED, names)


def _getter(kind: str, function: str) -> str:
    """Copies words of the object to fields."""
    structure = STRUCTURES[function]
    types = dict(structure._fields_)
    lines = [
        f"define ptr @{function}(ptr %a) {{",
        "%where = getelementptr i8, ptr %a, i64 16",
        "%object = load ptr, ptr %where",
    ]
    for i, field in enumerate(outputs_of(function)):
        to = getattr(structure, field).offset
        lines += [
            f"%f{i} = getelementptr i8, ptr %object, i64 {8 * WORDS[kind][field]}",
            f"%v{i} = load {_INTS[types[field]]}, ptr %f{i}",
            f"%t{i} = getelementptr i8, ptr %a, i64 {to}",
            f"store {_INTS[types[field]]} %v{i}, ptr %t{i}",
        ]
    return "\n".join([*lines, "ret ptr null", "}"])


# JAX destroys objects also while Python raises an exception, and when it has ended: machine code
# puts them on a list, which the next call in Python clears.
_DESTROY = """
define ptr @{name}(ptr %a) {{
  %f = getelementptr i8, ptr %a, i64 16
  %object = load ptr, ptr %f
  %none = icmp eq ptr %object, null
  br i1 %none, label %end, label %again
again:
  %first = load atomic ptr, ptr inttoptr (i64 {first} to ptr) acquire, align 8
  store ptr %first, ptr %object
  %pair = cmpxchg ptr inttoptr (i64 {first} to ptr), ptr %first, ptr %object acq_rel acquire
  %done = extractvalue {{ ptr, i1 }} %pair, 1
  br i1 %done, label %end, label %again
end:
  ret ptr null
}}
"""
_EVENT_FUNCTIONS = ("Event_Await", "Event_OnReady", "Event_Destroy", "Buffer_ReadyEvent")
_DESTROYERS = ("Error_Destroy", "Buffer_Destroy", "LoadedExecutable_Destroy")
# An event lives as long as somebody holds it. Its listeners are a list of (next, callback,
# argument), and 1 once it has happened: then they are called, by the thread that ran the program.
_EVENTS = """
declare ptr @calloc(i64, i64)
declare void @free(ptr)
{waiting}
define ptr @torch_hlo_event() {{
  %e = call ptr @calloc(i64 {words}, i64 8)
  call void @torch_hlo_hold(ptr %e, i64 1)
  ret ptr %e
}}
define void @torch_hlo_hold(ptr %e, i64 %count) {{
  %holders = getelementptr i64, ptr %e, i64 {holders}
  %was = atomicrmw add ptr %holders, i64 %count acq_rel
  %left = add i64 %was, %count
  %none = icmp eq i64 %left, 0
  br i1 %none, label %last, label %end
last:
  call void @free(ptr %e)
  br label %end
end:
  ret void
}}
define ptr @Event_Destroy(ptr %a) {{
  %f = getelementptr i8, ptr %a, i64 16
  %e = load ptr, ptr %f
  call void @torch_hlo_hold(ptr %e, i64 -1)
  ret ptr null
}}
define ptr @Buffer_ReadyEvent(ptr %a) {{
  %f = getelementptr i8, ptr %a, i64 16
  %buffer = load ptr, ptr %f
  %word = getelementptr i64, ptr %buffer, i64 {event}
  %e = load ptr, ptr %word
  call void @torch_hlo_hold(ptr %e, i64 1)
  %to = getelementptr i8, ptr %a, i64 24
  store ptr %e, ptr %to
  ret ptr null
}}
define ptr @Event_Await(ptr %a) {{
  %f = getelementptr i8, ptr %a, i64 16
  %e = load ptr, ptr %f
  %ready = getelementptr i64, ptr %e, i64 {ready}
  br label %look
look:
  %is = load atomic i64, ptr %ready acquire, align 8
  %done = icmp ne i64 %is, 0
  br i1 %done, label %end, label %wait
wait:
  call void @sleep(ptr %ready, i32 0, ptr null)
  br label %look
end:
  ret ptr null
}}
define ptr @Event_OnReady(ptr %a) {{
  %f = getelementptr i8, ptr %a, i64 16
  %e = load ptr, ptr %f
  %g = getelementptr i8, ptr %a, i64 24
  %callback = load ptr, ptr %g
  %h = getelementptr i8, ptr %a, i64 32
  %argument = load ptr, ptr %h
  %listeners = getelementptr i64, ptr %e, i64 {listeners}
  %node = call ptr @calloc(i64 3, i64 8)
  %n1 = getelementptr i64, ptr %node, i64 1
  store ptr %callback, ptr %n1
  %n2 = getelementptr i64, ptr %node, i64 2
  store ptr %argument, ptr %n2
  br label %again
again:
  %first = load atomic ptr, ptr %listeners acquire, align 8
  %happened = icmp eq ptr %first, inttoptr (i64 1 to ptr)
  br i1 %happened, label %now, label %later
later:
  store ptr %first, ptr %node
  %pair = cmpxchg ptr %listeners, ptr %first, ptr %node acq_rel acquire
  %done = extractvalue {{ ptr, i1 }} %pair, 1
  br i1 %done, label %end, label %again
now:
  call void @free(ptr %node)
  call void %callback(ptr null, ptr %argument)
  br label %end
end:
  ret ptr null
}}
; a job of the stream: entry, its block, the event that it has run
define void @torch_hlo_run(ptr %job) {{
  %entry = load ptr, ptr %job
  %j1 = getelementptr i64, ptr %job, i64 1
  %block = load ptr, ptr %j1
  %j2 = getelementptr i64, ptr %job, i64 2
  %e = load ptr, ptr %j2
  call void %entry(ptr %block)
  %ready = getelementptr i64, ptr %e, i64 {ready}
  store atomic i64 1, ptr %ready seq_cst, align 8
  call void @wake(ptr %ready)
  %listeners = getelementptr i64, ptr %e, i64 {listeners}
  %first = atomicrmw xchg ptr %listeners, ptr inttoptr (i64 1 to ptr) acq_rel
  br label %look
look:
  %node = phi ptr [%first, %0], [%next, %tell]
  %none = icmp eq ptr %node, null
  br i1 %none, label %end, label %tell
tell:
  %next = load ptr, ptr %node
  %n1 = getelementptr i64, ptr %node, i64 1
  %callback = load ptr, ptr %n1
  %n2 = getelementptr i64, ptr %node, i64 2
  %argument = load ptr, ptr %n2
  call void @free(ptr %node)
  call void %callback(ptr null, ptr %argument)
  br label %look
end:
  call void @torch_hlo_hold(ptr %e, i64 -1)
  ret void
}}
"""
_REST = """
define ptr @torch_hlo_take() {{
  %first = atomicrmw xchg ptr inttoptr (i64 {first} to ptr), ptr null acq_rel
  ret ptr %first
}}
define ptr @torch_hlo_nothing(ptr %a) {{
  ret ptr null
}}
"""


def _events() -> str:
    words = WORDS["event"]
    return _EVENTS.format(
        waiting=system.waiting(),
        words=len(words) + 1,
        ready=words["is_ready"],
        listeners=words["listeners"],
        holders=words["holders"],
        event=WORDS["buffer"]["event"],
    )


class Table:
    """PJRT_Api. It stays until the process ends."""

    def __init__(self) -> None:
        self.words = (ctypes.c_uint64 * (HEAD // 8 + len(FUNCTIONS)))()
        self._layouts = (ctypes.c_uint64 * (3 + len(LAYOUTS)))(
            8 * (3 + len(LAYOUTS)), LAYOUTS_EXTENSION
        )
        self._callbacks: list[object] = []
        self.words[0] = ctypes.sizeof(self.words)
        self.words[1] = ctypes.addressof(self._layouts)
        self.words[2] = 24  # PJRT_Api_Version
        self.words[4] = MINOR << 32
        self._destroyed = ctypes.c_uint64()
        first = ctypes.addressof(self._destroyed)
        native = {fn: kind for kind, getters in GETTERS.items() for fn in getters.split()}
        del native["Buffer_ReadyEvent"]
        written = (*native, *_DESTROYERS, *_EVENT_FUNCTIONS)
        text = "\n".join(
            [
                _REST.format(first=first),
                _events(),
                *(_getter(kind, fn) for fn, kind in native.items()),
                *(_DESTROY.format(name=name, first=first) for name in _DESTROYERS),
            ]
        )
        code = loaded(text)
        at = code.get_function_address
        self.nothing = at("torch_hlo_nothing")  # for functions and deleters
        self._take = ctypes.PYFUNCTYPE(ctypes.c_void_p)(at("torch_hlo_take"))
        self.event = ctypes.PYFUNCTYPE(ctypes.c_int64)(at("torch_hlo_event"))
        kind = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
        self.hold = kind(at("torch_hlo_hold"))
        self.run = at("torch_hlo_run")  # what the stream is given
        for words, i, name in self._places():
            if name in written:
                words[i] = at(name)
            elif name in _EMPTY.split():
                words[i] = self.nothing
            else:
                words[i] = self._python(name)
        code.detach()
        # JAX calls some functions when Python has ended.
        for kept in (self.words, self._layouts, self._destroyed):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        atexit.register(self._leave)

    def _python(self, name: str) -> int:
        kind = STRUCTURES[name]
        fn = IMPLEMENTED.get(name)

        def call(address: int) -> int | None:
            try:
                if self._destroyed.value:
                    Object.forget(self._take())
                if fn is None:
                    return error(PluginError.UNIMPLEMENTED, f"PJRT_{name} is not implemented")
                return fn(kind.from_address(address))
            except PluginError as failure:
                return error(failure.code, str(failure))
            except MemoryError as failure:
                return error(PluginError.RESOURCE_EXHAUSTED, str(failure))
            except BaseException as failure:  # Ctrl-C, too: JAX has to be told
                return error(
                    PluginError.INTERNAL, f"{type(failure).__name__}: {failure} (PJRT_{name})"
                )

        callback = _CALLBACK(call)
        self._callbacks.append(callback)
        return ctypes.cast(callback, ctypes.c_void_p).value or 0

    def _places(self) -> Iterator[tuple[Any, int, str]]:
        """Where the address of each function belongs."""
        yield from ((self.words, HEAD // 8 + i, name) for i, name in enumerate(FUNCTIONS))
        yield from ((self._layouts, 3 + i, name) for i, name in enumerate(LAYOUTS))

    def _leave(self) -> None:
        for words, i, name in self._places():
            if name in IMPLEMENTED:
                words[i] = self.nothing

    def capsule(self) -> object:
        """What JAX takes: a capsule around the table's address."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.words), b"pjrt_c_api", None)


table = cache(Table)
