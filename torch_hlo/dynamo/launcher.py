"""How a recording is launched that only computes results and takes next to no time: by a function
written for it, which runs the program where it is called.

    launch = launcher.write(recording)
    results = launch(args)      # None: not for these arguments, or not now

Giving such a program to the stream takes longer than running it. What has run here is over when the
call returns: nothing is bound before it, undone, or waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_hlo.lazy.record import Array, Storage, session
from torch_hlo.lazy.record.tensor import in_inference_mode
from torch_hlo.lazy.run.launch import number_buffers

from .recording import Recording


def write(recording: Recording) -> Callable[[Sequence], list | None] | None:
    """The function; None for a recording that writes to something, depends on more than tensors, or
    has other results."""
    known = recording.programs.last
    count = recording.count
    if (
        known is None
        or known.compiled.aliases
        or not known.compiled.program.plain
        or recording.stepped
        or recording.later
        or recording.varying
        or recording.random
        or recording.written
        or recording.distinct < count
        or sorted(recording.output_at) != [*range(count, count + len(recording.new))]
        or recording.signature.moved
        or recording.signature.floats
        or recording.key[1] is not None
        or not {"made", "argument"}.issuperset([kind for kind, *_ in recording.results])
    ):
        return None
    scope = {
        "Array": Array,
        "Storage": Storage,
        "inference": in_inference_mode,
        "start": session.engine().base().start,
        "compiled": known.compiled,
        "numbers": number_buffers(recording.graph.numbers),
    }
    exec("\n    ".join(_lines(recording, scope)), scope)
    return scope["launch"]


def _lines(recording: Recording, scope: dict[str, Any]) -> Iterator[str]:
    def constant(value: object) -> str:
        scope[name := f"c{len(scope)}"] = value
        return name

    signature, (metas, _, whole, inference) = recording.signature, recording.key
    tensors = signature.tensors
    stored = range(recording.count)
    tests = [f"a{i}._meta is {constant(m)} and a{i}._view is None" for i, m in zip(tensors, metas)]
    tests += [f"a{i} == {value!r}" for i, value in zip(signature.whole, whole)]
    yield "def launch(args):"
    yield f"[{', '.join(f'a{i}' for i in range(signature.count))}] = args"
    yield f"if not ({' and '.join([*tests, f'inference() is {inference}'])}): return None"
    for i, a in enumerate(
        [f"a{i}._storage" for i in tensors] + [*map(constant, signature.constants)]
    ):
        yield f"s{i} = {a}"
    yield f"if len({{{', '.join(f's{i}' for i in stored)}}}) < {len(stored)}: return None"
    for i, j in recording.shared:
        yield f"if s{i}.value is not s{j}.value: return None"
    for at, storage in enumerate(recording.constants, recording.count + len(recording.new)):
        yield f"s{at} = {constant(storage)}"
    leaves = [f"s{at}.value" for at in recording.leaf_at]
    yield f"found = start(compiled, [{', '.join(leaves)}], numbers, {len(recording.graph.nodes)})"
    yield "if found is None: return None"
    for place, shape in enumerate(recording.programs.last.compiled.outputs):
        yield f"x{place} = Array({constant(shape)}, found[{place}])"
    for at, place in zip(recording.output_at, recording.output_of):
        yield f"s{at} = Storage(x{place}, {constant(recording.new[at - recording.count])})"
    results = []
    for kind, at, *how in recording.results:
        if kind == "made":
            meta, view, finish = how
            made = f"{constant(finish)}({constant(meta)}, s{at}, {constant(view)})"
        results.append(made if kind == "made" else f"a{at}")
    yield f"return [{', '.join(results)}]"
