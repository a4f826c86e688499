"""Functions become object code while others are still being written."""

from __future__ import annotations

import platform
import threading

import pytest

from torch_hlo import config
from torch_hlo.compiler.llvm import machine_code
from torch_hlo.compiler.llvm.machine_code import Objects
from torch_hlo.compiler.llvm.target import host, platform_target
from torch_hlo.device.cpu.engine import engine


def function(name: str, calls: str = "", lines: int = 40) -> str:
    body = "\n".join(f"  %v{i + 1} = add i64 %v{i}, {i}" for i in range(lines))
    call = f"  %v{lines + 1} = call i64 @{calls}(i64 %v{lines})\n" if calls else ""
    return (
        f"define i64 @{name}(i64 %v0) {{\nentry:\n{body}\n{call}  ret i64"
        f" %v{lines + bool(calls)}\n}}\n"
    )


def test_modules_are_compiled_before_the_last_function_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_code, "FIRST_MODULE_BYTES", 2000)
    monkeypatch.setattr(machine_code, "MODULE_BYTES", 4000)
    started, go_on = threading.Event(), threading.Event()
    compile_one = machine_code.machine_code

    def watched(*args):
        started.set()
        assert go_on.wait(60)
        return compile_one(*args)

    monkeypatch.setattr(machine_code, "machine_code", watched)
    with Objects(host()) as objects:
        for i in range(20):
            objects.add(f"f{i}", function(f"f{i}", f"f{i - 1}" if i else ""))
        assert started.wait(60)  # and nothing waits for it
        go_on.set()
        codes = objects.finish()
    assert len(codes) == len(objects.texts) > 2
    engine([code for code, _ in codes], host())  # every reference is found


def test_at_exit_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter refuses them: what TORCH_HLO_PROFILE measures then could not be compiled."""
    monkeypatch.setattr(machine_code, "MODULE_BYTES", 1000)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False, raising=False)
    monkeypatch.setattr(machine_code, "ThreadPoolExecutor", None)
    with Objects(host()) as objects:
        for i in range(6):
            objects.add(f"f{i}", function(f"f{i}"))
        assert len(objects.finish()) > 1


def test_a_reference_to_a_later_function_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_code, "MODULE_BYTES", 1000)
    with Objects(host()) as objects:
        objects.add("first", function("first", "last"))
        objects.add("second", function("second", "first"))
        assert not objects.texts
        objects.add("last", function("last"))
        assert len(objects.texts) == 1
        assert len(objects.finish()) == 1


LOOP = """define {kind} @{name}(ptr %p, i64 %n) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  {work}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret {kind} {value}
}}
"""


@pytest.mark.parametrize(
    ("name", "kind", "value", "work", "level"),
    [
        ("f", "void", "", "call void @kernel(ptr %p, i64 %i)", 0),  # what it calls does the work
        ("f", "void", "", "store i64 %i, ptr %p", 2),
        ("f", "i64", "%i", "call void @kernel(ptr %p, i64 %i)", 2),  # of an element, maybe
        ("entry", "void", "", "call void @kernel(ptr %p, i64 %i)", 2),  # the program's own loop
    ],
)
def test_what_only_calls_kernels_is_not_optimised(
    name: str, kind: str, value: str, work: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = []
    monkeypatch.setattr(machine_code, "machine_code", lambda *given: levels.append(given[-1]))
    with Objects(host()) as objects:
        objects.add(name, LOOP.format(name=name, kind=kind, value=value, work=work))
        objects.finish()
    assert levels == [level]


def test_the_last_functions_are_shared_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "FIRST_MODULE_BYTES", 2500)
    with Objects(host()) as objects:
        objects.add("first", function("first", lines=200))
        objects.add("second", function("second", lines=300))
        for i in range(6):  # less than the third module may have
            objects.add(f"f{i}", function(f"f{i}", f"f{i - 1}" if i else ""))
        assert len(objects.texts) == 2
        codes = objects.finish()
    assert len(codes) == 4
    engine([code for code, _ in codes], host())


def test_what_is_not_a_function_is_named() -> None:
    with (
        Objects(host()) as objects,
        pytest.raises(ValueError, match="function f is not defined by its text"),
    ):
        objects.add("f", function("g"))


def test_strength_reduction_is_left_out_while_any_program_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(machine_code.llvm, "set_option", lambda name, option: asked.append(option))
    x86 = platform_target("x86_64-linux-gnu")
    with Objects(x86), Objects(x86):
        pass
    with Objects(platform_target("wasm32")):  # has no addressing modes to speak of
        pass
    names = ("lsr", "select-optimize")
    assert asked == [f"-disable-{name}={on}" for on in ("true", "false") for name in names]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names sets of x86")
@pytest.mark.parametrize("isa, absent", [("avx2", ("avx512", "amx")), ("avx512", ("amx",))])
def test_an_older_instruction_set(isa, absent):
    """The target of TORCH_HLO_ISA has nothing newer."""
    host.cache_clear()
    try:
        with config.override(ISA=isa):
            found = host()
    finally:
        host.cache_clear()
    on = [f[1:] for f in found.features.split(",") if f.startswith("+")]
    assert not [f for f in on if f.startswith(absent)]
    assert found.vector_bytes <= (32 if isa == "avx2" else 64)
