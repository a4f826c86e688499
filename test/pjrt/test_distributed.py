"""jax.distributed: several processes, each with one or more devices of the mesh."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("jax", reason="needs JAX: pip install 'torch_hlo[jax]'")

SCRIPT = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

rank, count, port = map(int, sys.argv[1:])
jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
assert (jax.process_index(), jax.process_count(), jax.device_count()) == (rank, count, count)
(device,) = jax.local_devices()
assert (device.platform, device.id, device.process_index) == ("hlo", rank, rank)
mesh = jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,))
cut, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
x = np.arange(64, dtype=np.float32).reshape(8, 8)
y = jax.make_array_from_callback(x.shape, cut, lambda at: x[at])

place = jax.pmap(lambda x: x + jax.lax.axis_index("d"), axis_name="d")(np.zeros(1, int))
assert np.asarray(place.addressable_shards[0].data) == rank   # though nothing is exchanged

z = jax.jit(lambda x: x @ x.T)(y)                     # shardings are propagated
assert z.sharding.spec == P("d"), z.sharding
for shard in z.addressable_shards:
    np.testing.assert_allclose(shard.data, (x @ x.T)[shard.index])

def mapped(f, out=P()):
    return np.asarray(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=out, check_vma=False))(y))

parts = x.reshape(count, -1, 8)
np.testing.assert_allclose(mapped(lambda x: jax.lax.psum(x, "d")), parts.sum(0))
np.testing.assert_allclose(mapped(lambda x: jax.lax.all_gather(x, "d", tiled=True)), x)
turned = mapped(lambda x: jax.lax.all_gather(jax.lax.ppermute(x, "d", [(i, (i + 1) % count) for i in range(count)]), "d"))
np.testing.assert_allclose(turned, np.roll(parts, 1, 0))
scattered = mapped(lambda x: jax.lax.all_gather(jax.lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True), "d", axis=1, tiled=True))
np.testing.assert_allclose(scattered, parts.sum(0))
np.testing.assert_allclose(multihost_utils.process_allgather(np.float32(rank)), range(count))

# training, data parallel: weights everywhere, the batch is cut
r = np.random.RandomState(0)
data, labels = r.randn(8, 5).astype("f"), r.randn(8, 1).astype("f")
start = {"a": r.randn(5, 16).astype("f") / 2, "b": r.randn(16, 1).astype("f") / 2}

def step(w, x, y):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)
    value, g = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), value

def train(step, w, x, y):
    seen = []
    for _ in range(5):
        w, value = step(w, x, y)
        seen.append(float(value))
    return seen

with jax.default_device(jax.local_devices(backend="cpu")[0]):
    want = train(jax.jit(step), start, data, labels)
put = lambda s: lambda a: jax.make_array_from_callback(a.shape, s, lambda at: a[at])
got = train(jax.jit(step, out_shardings=whole), jax.tree.map(put(whole), start), put(cut)(data), put(cut)(labels))
np.testing.assert_allclose(got, want, rtol=1e-5)
assert got[-1] < got[0]
multihost_utils.sync_global_devices("end")
print("fine")
"""


def start(count: int, script: str = SCRIPT, **environment: str) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "hlo", **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(count), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        ended = [p.communicate(timeout=280) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, *text) for p, text in zip(processes, ended, strict=True)]


def test_two_processes():
    for status, output, errors in start(2):
        assert (status, output.split()[-1:]) == (0, ["fine"]), errors


PLACES = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, count, port = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", rank + 1)
jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
owners = [d.process_index for d in jax.devices()]
assert owners == [0, 1, 1], owners
assert [d.id for d in jax.local_devices()] == [[0], [1, 2]][rank]

def same(array, want):
    for shard in array.addressable_shards:
        np.testing.assert_allclose(shard.data, want[shard.index])

def held(devices):
    mesh = Mesh(np.array(devices), "d")
    cut, n = NamedSharding(mesh, P("d")), len(devices)
    # a program that asks for its place only
    same(jax.jit(lambda: 2 * jnp.arange(4 * n), out_shardings=cut)(), 2 * np.arange(4 * n))
    x = np.arange(4 * n, dtype=np.float32)
    y = jax.make_array_from_callback(x.shape, cut, lambda at: x[at])
    def mapped(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False))(y)
    same(mapped(lambda v: jax.lax.all_gather(v, "d", tiled=True)), x)
    same(mapped(lambda v: jax.lax.psum(v, "d")), x.reshape(n, -1).sum(0))
    turn = [(i, (i + 1) % n) for i in range(n)]
    turned = mapped(lambda v: jax.lax.all_gather(jax.lax.ppermute(v, "d", turn), "d", tiled=True))
    same(turned, np.roll(x.reshape(n, -1), 1, 0).ravel())

everybody = jax.devices()
for devices in everybody, everybody[::-1], [everybody[2], everybody[0]], jax.local_devices():
    held(devices)
held(jax.local_devices()[-1:])

def placed(devices):
    return NamedSharding(Mesh(np.array(devices), "d"), P("d"))

x = np.arange(8).astype("bfloat16")
for source, target in ([0, 1], [1, 2]), ([2, 1], [0, 1]), ([1], [0]):   # from process to process
    source, target = (placed([everybody[i] for i in some]) for some in (source, target))
    y = jax.make_array_from_callback(x.shape, source, lambda at: x[at], dtype=x.dtype)
    y = jax.device_put(y, target)
    assert y.sharding == target and len(y.addressable_shards) == len(target.addressable_devices)
    same(y, x)
print("fine")
"""


def test_several_devices_in_each_process():
    """Meshes in any order, of some of the devices, and of one process."""
    for status, output, errors in start(2, PLACES):
        assert (status, output.split()[-1:]) == (0, ["fine"]), errors
