"""JAX on the plugin: values are NumPy's or those of JAX's CPU back end."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install 'torch_hlo[jax]'")
jnp = jax.numpy
A = np.array([[4.0, 1, 2], [1, 3, 0], [2, 0, 5]], np.float32)


def on_cpu(f, *arguments):
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(f)(*arguments)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.tanh(x) @ x.T + 1,
        lambda x: (x * 2, x.sum(0)),
        lambda x: jax.grad(lambda w: jnp.sum(jax.nn.softmax(x @ w) ** 2))(x),
        lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x),
        lambda x: jax.lax.top_k(x, 2),
        lambda x: jnp.linalg.eigh(x)[0],
        lambda x: jnp.linalg.inv(x),
        lambda x: jnp.fft.fft(x),
        lambda x: jax.random.normal(jax.random.key(0), (5,)),
        lambda x: x.astype(jnp.bfloat16) * 2,
        lambda x: x.astype(jnp.int4) + 1,
        lambda x: (x > 1, x[:, ::2]),
    ],
)
def test_values_are_those_of_the_cpu(f):
    for got, want in zip(
        jax.tree.leaves(jax.jit(f)(A)), jax.tree.leaves(on_cpu(f, A)), strict=True
    ):
        assert next(iter(got.devices())).platform == "hlo"
        assert got.dtype == want.dtype
        kind = complex if np.iscomplexobj(want) else float
        np.testing.assert_allclose(
            np.asarray(got).astype(kind), np.asarray(want).astype(kind), rtol=2e-5, atol=1e-6
        )


def test_text_of_a_program_is_made_when_somebody_asks(monkeypatch):
    from torch_hlo.pjrt.executables import LoadedExecutable

    asked = []
    text = LoadedExecutable.stablehlo.func
    monkeypatch.setattr(
        LoadedExecutable, "stablehlo", property(lambda found: asked.append(1) or text(found))
    )
    program = jax.jit(lambda x: jnp.tanh(x) * 3).lower(A).compile()
    np.testing.assert_allclose(program(A), np.tanh(A) * 3, rtol=1e-6)
    assert not asked
    assert "tanh" in program.as_text() and asked


@pytest.mark.parametrize(
    "value",
    [
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::-1],
        np.float32(3),
        np.zeros((0, 3)),
        np.arange(10, dtype=np.int8)[::-3],
        np.broadcast_to(np.float32(2), (3, 4)),
    ],
)
def test_arrays_come_back(value):
    np.testing.assert_array_equal(jax.device_put(value), value.astype(jnp.asarray(value).dtype))


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_unused_bits_of_narrow_integers(dtype):
    x = np.array([[1, -2, 13], [4, -8, 7]]).astype(dtype)
    for given in (x, x.T):
        np.testing.assert_array_equal(jnp.asarray(given).astype(int), given.astype(int))
    same = jax.pure_callback(lambda: x, jax.ShapeDtypeStruct(x.shape, x.dtype))
    np.testing.assert_array_equal(same.astype(int), x.astype(int))


def test_donated_memory_is_written_to():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1000)
    where = x.unsafe_buffer_pointer()
    y = step(x)
    assert x.is_deleted() and y.unsafe_buffer_pointer() == where
    with pytest.raises(RuntimeError, match="deleted"):
        x + 1


def busy(x, turns=60):
    return jax.lax.fori_loop(0, turns, lambda i, y: jnp.tanh(y @ y), x)


def test_python_goes_on_while_a_program_runs():
    f = jax.jit(busy)
    x = jnp.full((500, 500), 0.1)
    f(x).block_until_ready()
    counted = [0]

    def count():
        while not y.is_ready():
            counted[0] += 1

    y = f(x)
    assert not y.is_ready()
    thread = threading.Thread(target=count)
    thread.start()
    y.block_until_ready()
    thread.join()
    assert counted[0] > 1000
    np.testing.assert_allclose(y, on_cpu(busy, np.full((500, 500), 0.1, np.float32)), rtol=1e-5)


def test_programs_in_flight_run_in_order():
    """More than may be in flight; donated arrays, copies and reads between them."""
    step = jax.jit(lambda x, y: (x + y, jnp.flip(y) + 1), donate_argnums=(0, 1))
    x, y = jnp.zeros(1 << 18), jnp.ones(1 << 18)
    jax.block_until_ready(step(x + 0, y + 0))
    seen = []
    for i in range(30):
        x, y = step(x, y)
        if i % 7 == 0:
            seen.append((i, np.asarray(x), jax.device_put(x, jax.devices("cpu")[0])))
    assert float(y[0]) == 31 and float(x[-1]) == sum(range(1, 31))
    for i, *views in seen:
        assert all((np.asarray(v) == sum(range(1, i + 2))).all() for v in views)


def test_donated_memory_that_is_looked_at_is_not():
    x = jnp.zeros(1000)
    seen = np.asarray(x)
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert seen.sum() == 0 and np.asarray(y).sum() == 1000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_arrays_are_shared_with_pytorch(dtype):
    """In both directions, without a copy."""
    torch = pytest.importorskip("torch")
    import torch_hlo

    x = jnp.arange(12).reshape(3, 4).astype(dtype)
    where = x.unsafe_buffer_pointer()
    on_cpu, on_device = torch.from_dlpack(x), torch_hlo.from_dlpack(x)
    assert on_cpu.data_ptr() == where and on_device.device.type == "hlo"
    assert torch.equal(on_cpu, on_device.cpu())
    y = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)).to("hlo")
    z = jax.dlpack.from_dlpack(y)
    assert z.devices() == x.devices() and z.dtype == x.dtype
    assert torch.from_dlpack(z).data_ptr() == torch.from_dlpack(y).data_ptr()
    np.testing.assert_array_equal(z, x)


def test_shared_arrays_outlive_their_first_owner_and_are_not_donated_away():
    torch = pytest.importorskip("torch")
    x = jnp.ones(1000)
    t = torch.from_dlpack(x)
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    del x
    assert t.sum() == 1000 and y.sum() == 2000
    z = jax.dlpack.from_dlpack(torch.arange(1000.0))  # of nobody else
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(z)
    assert float(y[999]) == 1000


def test_programs_read_transposed_tensors_as_they_are():
    torch = pytest.importorskip("torch")
    value = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    for options in ({}, {"donate_argnums": 0}):
        x = jax.dlpack.from_dlpack(value)
        np.testing.assert_array_equal(jax.jit(lambda x: x + 1, **options)(x), value + 1)


def test_dlpack_of_the_cpu_and_copies():
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(np.from_dlpack(x), x)
    there = jax.device_put(x, jax.devices("cpu")[0])
    np.testing.assert_array_equal(np.from_dlpack(there), x)
    assert there.__dlpack__(dl_device=(1, 0)) and x.__dlpack__(dl_device=(1, 0), copy=True)
    with pytest.raises(BufferError, match="int4"):
        x.astype(jnp.int4).__dlpack__()
    value = np.arange(5.0, dtype=np.float32)
    copy, view = (jnp.from_dlpack(value, copy=c) for c in (True, False))
    value[:] = 7
    np.testing.assert_array_equal(copy, np.arange(5))
    np.testing.assert_array_equal(view, value)
    from jax._src.dlpack import _jax

    unpacked = _jax.dlpack_managed_tensor_to_buffer(value.__dlpack__(), jax.devices()[0], None)
    assert unpacked.shape == (5,)


def test_kernels_of_pallas_are_interpreted():
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    from jax.experimental.pallas import mosaic_gpu as gpu

    def double(x, y):
        y[...] = x[...] * 2

    x = jnp.arange(128.0).reshape(16, 8)
    f = gpu.kernel(
        double, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=InterpretGPUParams()
    )
    np.testing.assert_array_equal(jax.jit(f)(x), x * 2)


def test_callbacks():
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    x = jnp.arange(3, dtype=jnp.float32)
    f = jax.jit(lambda x: jax.pure_callback(np.sin, shape, x) * 2)
    np.testing.assert_allclose(f(x), 2 * np.sin(np.arange(3)), rtol=1e-6)
    seen = []

    @jax.jit
    def loop(x):
        def body(i, x):
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return x + 1

        return jax.lax.fori_loop(0, 4, body, x)

    jax.block_until_ready(loop(x))
    assert seen == [0, 1, 2, 3]


def test_effects_without_results(capfd):
    """Of programs, branches and functions without results, in order where JAX asks for it, and
    each of equal calls."""
    show = functools.partial(jax.debug.print, ordered=True)

    @jax.jit
    def called(x):
        jax.debug.print("called {}", x)

    def f(x):
        show("first {}", x)
        jax.lax.fori_loop(0, 2, lambda i, y: (show("turn {}", i), y)[1], x)
        show("last")

    def g(x):
        jax.lax.cond(x > 0, lambda: jax.debug.print("branch"), lambda: None)
        called(x)
        called(x)

    assert jax.jit(f)(1) is None and jax.jit(g)(2) is None
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert lines[:4] == ["first 1", "turn 0", "turn 1", "last"]
    assert sorted(lines[4:]) == ["branch", "called 2", "called 2"]


def test_callbacks_may_return_literals():
    for value, dtype in ((42, np.int32), (1.5, np.float32), (np.float64(2.5), np.float32)):
        shape = jax.ShapeDtypeStruct((), dtype)
        assert jax.jit(functools.partial(jax.pure_callback, lambda v=value: v, shape))() == value


def test_lowerings_emit_callbacks_by_their_public_name():
    from jax.experimental.sparse.linalg import spsolve

    values, columns, rows = jnp.ones(3) * 2, jnp.arange(3), jnp.arange(4)
    solved = spsolve(values, columns, rows, jnp.arange(3.0))
    np.testing.assert_allclose(solved, [0, 0.5, 1])


def test_an_order_for_the_scheduler_is_no_operation():
    from jax.experimental.control_deps import schedule

    @jax.jit
    def f(x):
        a, b = jnp.sin(x), jnp.cos(x)
        schedule([b, a])
        return a + b

    np.testing.assert_allclose(f(1.0), np.sin(1.0) + np.cos(1.0), rtol=1e-6)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_callback_is_reported(kind):
    def fail(x):
        raise kind("no such thing")

    f = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((3,), np.float32), x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such thing"):
        f(jnp.ones(3))


def test_a_check_that_fails_while_a_program_runs():
    from jax._src.config import xla_runtime_errors
    from jax.experimental import checkify

    f = jax.jit(lambda x: (checkify.check(x > 0, "{} is not positive", x), x * 2)[1])
    with xla_runtime_errors(True):
        assert f(1.0) == 2
        with pytest.raises(jax.errors.JaxRuntimeError, match="-1.0 is not positive"):
            jax.block_until_ready(f(-1.0))


def test_functions_that_write_into_arrays():
    from jax.experimental.buffer_callback import buffer_callback

    def add(ctx, out, x, y):
        assert out.writeable and not x.writeable
        np.asarray(out)[...] = np.asarray(x) + np.asarray(y)

    def double(ctx, out, x):
        np.asarray(out)[...] *= 2

    x = jnp.arange(3.0)
    like = jax.ShapeDtypeStruct.like(x)
    f = buffer_callback(add, like, vmap_method="broadcast_all")
    assert jax.jit(f)(x, x).tolist() == [0, 2, 4]
    assert jax.vmap(buffer_callback(add, like, vmap_method="sequential"))(
        x[None], x[None]
    ).tolist() == [[0, 2, 4]]
    assert buffer_callback(double, like, input_output_aliases={0: 0})(x).tolist() == [0, 2, 4]
    with pytest.raises(jax.errors.JaxRuntimeError, match="must not return"):
        buffer_callback(lambda ctx, out, x: 1, like)(x).block_until_ready()


@pytest.mark.parametrize("options", [{}, {"aggregate_to_topk": False}])
def test_approximate_maxima_are_the_exact_ones(options):
    x = np.random.default_rng(0).permutation(512).astype(np.float32)
    find = jax.jit(functools.partial(jax.lax.approx_max_k, k=3, **options))
    values, indices = find(x)
    assert np.array_equal(values[:3], [511, 510, 509])
    assert np.array_equal(x[np.asarray(indices)], values)


def test_devices_are_named_as_jax_names_its_own():
    device = jax.devices("hlo")[0]
    assert (str(device), repr(device)) == ("hlo:0", "HloDevice(id=0)")


def test_the_compiler_leaves_no_garbage():
    x = jnp.arange(7.0)
    jax.block_until_ready(jax.jit(jnp.cos)(x))  # what is imported leaves some, once
    gc.collect()
    gc.disable()
    try:
        jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) / x.sum())(x))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [x for x in gc.garbage if type(x).__module__.startswith("torch_hlo")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found


def test_what_cannot_be_compiled_names_the_call():
    call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((3,), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED: .*no_such_target"):
        jax.jit(call)(jnp.ones(3))


def test_compiler_options_that_do_not_exist_are_errors():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(compiler_options={"xla_embed_ir_in_executable": True})
    for name, wrong in (("no_option", "No such"), ("xla_embed_ir_in_executable", "valid bool")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=wrong):
            lowered.compile(compiler_options={name: "wrong"})


def test_what_the_compiler_makes_is_written_where_xla_would(tmp_path):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (found,) = tmp_path.rglob("00_input.hlo")
    assert "f32[] add" in found.read_text()


def test_what_is_for_the_cpu_is_for_us():
    chosen = jax.jit(lambda x: jax.lax.platform_dependent(x, tpu=jnp.cos, cpu=jnp.sin))
    assert chosen(1.0) == jnp.sin(1.0)
    others = jax.jit(lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos))
    assert others(1.0) == jnp.cos(1.0)


def test_every_function_has_an_entry():
    from torch_hlo.device.pjrt.pjrt_structs import FUNCTIONS, HEAD
    from torch_hlo.pjrt.functions import table

    words = table().words
    assert all(words[HEAD // 8 + i] for i in range(len(FUNCTIONS)))
    assert words[0] == ctypes.sizeof(words)


def test_programs_are_serialized():
    from jax.experimental.serialize_executable import deserialize_and_load, serialize

    x = jnp.arange(6.0).reshape(2, 3)
    compiled = jax.jit(lambda x: (jnp.sin(x) @ x.T, x + 1)).lower(x).compile()
    again = deserialize_and_load(*serialize(compiled), backend="hlo")
    for got, want in zip(again(x), compiled(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_compiled_programs_are_kept_between_processes(tmp_path):
    """In JAX's own cache. A program that calls Python is not."""
    code = """
import jax, jax.numpy as jnp, warnings
from jax._src import monitoring
warnings.simplefilter("ignore")
found = []
monitoring.register_event_listener(lambda name, **_: found.append(name.rpartition("/")[2]))
shape = jax.ShapeDtypeStruct((3,), jnp.float32)
x = jnp.arange(3.0)
print(jax.jit(lambda x: jnp.tanh(x) @ x)(x))
print(jax.jit(lambda x: jax.pure_callback(lambda v: 2 * v, shape, x))(x))
print(found.count("cache_hits") > 1, found.count("cache_misses") > 1)
"""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = (run_on_hlo(code, **kept).splitlines() for _ in range(2))
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == ("False True", "True False")


def test_costs():
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    assert compiled.cost_analysis()["flops"] == 2 * 8**3
    assert compiled.memory_analysis().argument_size_in_bytes == 256


DEVICES = """
import jax, numpy as np, torch_hlo.pjrt
torch_hlo.pjrt.initialize()
from jax.experimental.control_deps import schedule
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
x = np.arange(64, dtype=np.float32).reshape(8, 8)
y = jax.device_put(x, NamedSharding(mesh, P("d")))
z = jax.jit(lambda x: x @ x.T)(y)
assert z.sharding.spec == P("d"), z.sharding
np.testing.assert_allclose(z, x @ x.T)
z = jax.jit(lambda x: x.reshape(2, 32))(y)  # half of an axis is no axis
assert z.sharding.spec == P(), z.sharding
np.testing.assert_array_equal(z, x.reshape(2, 32))
jax.jit(lambda x: jax.debug.print("{}", x.sum()))(y)
jax.effects_barrier()
calls = []
double = lambda v: calls.append(v.shape) or 2 * v
z = jax.jit(lambda x: jax.pure_callback(double, jax.ShapeDtypeStruct((8, 8), "f"), x))(y)
np.testing.assert_allclose(z, 2 * x)
assert calls == [(8, 8)], calls
seen = []
jax.jit(lambda x: jax.debug.inspect_array_sharding(x.T + 1, callback=seen.append))(y)
assert seen[0].is_equivalent_to(NamedSharding(mesh, P(None, "d")), 2)
z = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P(None, "d")), donate_argnums=0)(y)
assert z.sharding.spec == P(None, "d")
np.testing.assert_allclose(z, x * 2)
f = jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P(None, "d"), out_specs=P())
np.testing.assert_allclose(jax.jit(f)(z), 2 * x.reshape(8, 4, 2).sum(1))
with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)):
    a, b = jax.device_put(x, P("a", "b")), jax.device_put(x, P("b"))
    dot = jax.jit(lambda a, b: jax.numpy.einsum("ij,jk", a, b, out_sharding=P("a", unreduced={"b"})))
    s = dot(a, b)
    assert s.sharding.spec == P("a", None, unreduced={"b"}), s.sharding
    assert "all-reduce(" not in dot.lower(a, b).compile().as_text()
    np.testing.assert_allclose(s.addressable_shards[0].data, x[:4, :4] @ x[:4])
    np.testing.assert_allclose(jax.jit(lambda s: jax.reshard(s + s, P()))(s), 2 * x @ x)
    zero = lambda: jax.reshard(jax.numpy.zeros((8, 8)), P("a", unreduced={"b"}))
    turns = lambda a, b: jax.lax.fori_loop(0, 3, lambda i, s: s + dot(a, b), zero())
    total = jax.jit(lambda a, b: jax.reshard(turns(a, b), P("a")))
    np.testing.assert_allclose(total(a, b), 3 * x @ x)
    assert total.lower(a, b).compile().as_text().count("all-reduce(") == 1
    half = lambda a, b: dot(a.astype("bfloat16"), b.astype("bfloat16")).astype("float32")
    turns = lambda a, b: jax.lax.fori_loop(0, 3, lambda i, s: s + half(a, b), zero())
    total = jax.jit(lambda a, b: jax.reshard(turns(a, b), P("a")))
    np.testing.assert_allclose(total(a, b), 3 * x @ x, rtol=0.01)
    assert total.lower(a, b).compile().as_text().count("all-reduce(") == 1
    place = jax.jit(lambda x: jax.reshard(x, P(unreduced={"a", "b"})))
    assert sum((np.asarray(p.data) != 0).sum() for p in place(a).addressable_shards) == 63
    np.testing.assert_allclose(jax.reshard(place(a), P()), x)
    def turn(x):
        future = jax._src.lax.parallel.ppermute_start(x, "a", [(0, 1), (1, 0)])
        y = x + 1
        schedule([future.x, y])   # a call that takes a future
        return future.done()
    turned = jax.shard_map(turn, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False)
    c = jax.jit(turned)(a)
    np.testing.assert_allclose(c, np.roll(x, 4, 0))
g = jax.pmap(lambda x: jax.lax.all_gather(x, "i"), axis_name="i")(x[:4])
np.testing.assert_array_equal(g, np.broadcast_to(x[:4], (4, 4, 8)))
"""


@pytest.mark.parametrize("name", ["TORCH_HLO_CPU_DEVICES", "JAX_NUM_CPU_DEVICES"])
def test_shardings_on_virtual_devices(name):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", DEVICES],
        env={**os.environ, name: "4"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2016.0\n"  # one device prints


def test_the_process_ends_cleanly():
    text = (
        "import jax, torch_hlo.pjrt; torch_hlo.pjrt.initialize()\n"
        "x = jax.jit(lambda x: x + 1)(1.0); print(x, x.devices())\n"
        "y = jax.numpy.full((400, 400), 0.1)\n"
        "z = jax.jit(lambda y: jax.lax.fori_loop(0, 99, lambda i, y: y @ y * y, y))(y)  # runs on"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "JAX_PLATFORMS": "hlo"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "2.0 {HloDevice(id=0)}\n"), done.stderr


@pytest.mark.parametrize("platforms, loaded", [("", False), ("cpu", False), ("hlo", True)])
def test_only_who_asks_for_the_platform_loads_the_plugin(platforms, loaded):
    script = "import sys, jax; print(jax.devices()[0].platform, 'torch_hlo' in sys.modules)"
    environment = {**os.environ, "JAX_PLATFORMS": platforms}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["hlo" if loaded else "cpu", str(loaded)]


WITHOUT_PYTORCH = """
import sys, jax, jax.numpy as jnp, numpy as np
f = jax.jit(lambda x: jax.nn.softmax(jnp.tanh(x) @ x.T) + jnp.linalg.eigh(x @ x.T)[0])
print(float(f(np.ones((4, 4), np.float32)).sum()), jax.devices()[0].platform, "torch" in sys.modules)
"""
LATER = {
    "import torch": "import torch, torch_hlo",
    "the package first": "import torch_hlo, torch",
    "a function": "import torch_hlo; torch_hlo.sync(); import torch",
    "a name": "from torch_hlo import pad_to_bucket; import torch; assert pad_to_bucket(torch.ones(3))",
    "a device": "import torch_hlo; assert torch_hlo.device().type == 'hlo'; import torch",
    "a submodule": "import torch_hlo; torch_hlo.export; torch_hlo.debug; import torch",
    "an inner one": "import torch_hlo.lazy.record.session; import torch",
}


def run_on_hlo(text: str, **more: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "JAX_PLATFORMS": "hlo", **more},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_jax_needs_no_pytorch():
    assert run_on_hlo(WITHOUT_PYTORCH).split()[1:] == ["hlo", "False"]


@pytest.mark.parametrize("how", LATER)
def test_pytorch_may_come_after_jax(how):
    text = (
        f"{WITHOUT_PYTORCH}\n{LATER[how]}\nx = torch.ones(3).to('hlo'); print((x + x).sum().item())"
    )
    assert run_on_hlo(text).split()[2:] == ["False", "6.0"]


def test_programs_exported_for_the_cpu_run_here():
    from jax import export

    made = export.export(jax.jit(jnp.linalg.eigvalsh), platforms=("tpu", "cpu"))(A)
    got = jax.jit(made.call)(A)
    assert next(iter(got.devices())).platform == "hlo"
    np.testing.assert_allclose(got, np.linalg.eigvalsh(A), rtol=1e-5)


TOPOLOGY = """
import jax, numpy as np
from jax.experimental import serialize_executable, topologies
devices = np.array(topologies.get_topology_desc(platform="hlo").devices)
split = jax.NamedSharding(jax.sharding.Mesh(devices, ("x",)), jax.P("x"))
wanted = jax.ShapeDtypeStruct((8,), "float32", sharding=split)
made = jax.jit(lambda x: (x * 2).sum()).lower(wanted).compile()
run = serialize_executable.deserialize_and_load(*serialize_executable.serialize(made))
assert run(np.arange(8.0, dtype="float32")) == 56
"""


def test_programs_for_the_devices_of_a_topology():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "hlo"}
    subprocess.run([sys.executable, "-c", TOPOLOGY], check=True, env=environment, timeout=120)


def on(kind: str):
    return jax.sharding.SingleDeviceSharding(jax.devices("hlo")[0], memory_kind=kind)


def test_kinds_of_memory():
    x = jax.device_put(A, on("pinned_host"))
    assert x.sharding.memory_kind == "pinned_host"
    y = jax.jit(lambda x: x + 1, out_shardings=on("unpinned_host"))(x)
    assert y.sharding.memory_kind == "unpinned_host"
    assert jax.device_put(y, on("device")).sharding.memory_kind == "device"
    np.testing.assert_array_equal(y, A + 1)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("sizes", [(2, 3, 4), (3, 3, 3)])
def test_layouts(sizes, order):
    from jax.experimental.layout import Format, Layout

    value = np.arange(np.prod(sizes), dtype=np.int16).reshape(sizes)
    own = Format(Layout(order), on("device"))
    x = jax.device_put(value, own)
    y = jax.jit(lambda x: x.T[1:], out_shardings=own)(x)
    z = jax.device_put(x, on("device"))
    assert x.format.layout.major_to_minor == y.format.layout.major_to_minor == order
    for got, want in ((x, value), (y, value.T[1:]), (z, value), (x + 1, value + 1)):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.from_dlpack(x), value)


def test_a_layout_that_may_be_chosen_makes_the_last_transpose_free():
    from jax.experimental.layout import Format, Layout

    made = jax.jit(jnp.transpose, out_shardings=Format(Layout.AUTO)).lower(np.zeros((2, 3, 4)))
    made = made.compile()
    assert made.output_formats.layout.major_to_minor == (2, 1, 0)
    value = np.arange(24.0, dtype="float32").reshape(2, 3, 4)
    np.testing.assert_array_equal(made(value), value.T)


PARTITIONED = """
import jax, numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
double = custom_partitioning(lambda x: x * 2)
double.def_partition(lambda mesh, x, y: None, sharding_rule="i -> i")
split = jax.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P("x"))
y = jax.jit(double)(jax.device_put(np.arange(8.0), split))
assert (np.asarray(y) == 2 * np.arange(8)).all() and y.sharding.is_equivalent_to(split, 1)
"""


REORDERED = """
import jax, numpy as np
P = jax.P
order = np.array(jax.devices())
orders = order.reshape(2, 2), order[[0, 3, 1, 2]].reshape(2, 2)
meshes = [jax.sharding.Mesh(o, ("x", "y")) for o in orders]
value = np.arange(64.0).reshape(8, 8)
x = jax.device_put(value, jax.NamedSharding(meshes[0], P("x", "y")))
for spec in (P("x", "y"), P("y"), P(("y", "x")), P(None, "x"), P()):
    y = jax.device_put(x, jax.NamedSharding(meshes[1], spec))
    for z in (y, jax.device_put(y, x.sharding), jax.jit(lambda y: y.T)(y).T):
        for part in z.addressable_shards:
            np.testing.assert_array_equal(part.data, value[part.index])
"""

EVEN = """
import jax, numpy as np
split = jax.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), jax.P("x"))
f = jax.jit(lambda: jax.lax.with_sharding_constraint(jax.numpy.arange(10), split))
np.testing.assert_array_equal(f(), np.arange(10))
"""

GIVEN = """
import jax, numpy as np
mesh = jax.make_mesh((2,), ("x",))
put = lambda value, *spec: jax.device_put(value, jax.NamedSharding(mesh, jax.P(*spec)))
x, y = np.arange(16.0).reshape(16, 1), np.arange(16.0).reshape(2, 2, 4)
a, b = put(x, "x"), put(y, "x")
outs = tuple(jax.NamedSharding(mesh, jax.P(*spec)) for spec in (["x"], [None, "x"]))
f = jax.jit(lambda a, b: (a.reshape(16)[::-1], b + 1), out_shardings=outs, donate_argnums=(0, 1))
c, d = f(a, b)
assert a.is_deleted() and b.is_deleted()
np.testing.assert_array_equal(c, x.reshape(16)[::-1])
np.testing.assert_array_equal(d, y + 1)
"""


@pytest.mark.parametrize("script", [PARTITIONED, REORDERED, EVEN, GIVEN])
def test_several_devices(script):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "hlo"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
