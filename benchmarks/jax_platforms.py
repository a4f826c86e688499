"""Twelve JAX workloads on our plugin and on XLA's CPU client: the same script, in turns.

    python -m benchmarks.jax_platforms
    python -m benchmarks.jax_platforms --workloads gpt_train,adam --dtypes bf16 --rounds 9

Each pair runs in a process of its own. Rounds go A B B A, so that a noisy machine hits both alike.
Ratios are of medians; above 1 the plugin is faster. "work" is the ratio of processor time, of all
threads, which a busy machine distorts less. The first call traces, compiles and runs, with empty
caches. Bars: a geometric mean of 1.5, no workload below 0.8, no first call below 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import write_bytecode

WORKLOADS = {}  # name: function of a dtype that gives (jitted step, its arguments)
PLATFORMS = ("hlo", "cpu")


def workload(make):
    WORKLOADS[make.__name__] = make
    return make


def normal(*dims, scale=None):
    """Reproducible values, made without JAX: no other program is compiled before the first call."""
    import numpy as np

    generator = np.random.default_rng(sum(dims) + len(dims))
    scale = 1 / math.sqrt(dims[0]) if scale is None else scale
    return (generator.standard_normal(dims) * scale).astype(np.float32)


def integers(high, *dims):
    import numpy as np

    return np.random.default_rng(high).integers(0, high, dims).astype(np.int32)


def training(loss, params, dtype, adam=False):
    """A step that updates donated float32 parameters; the model computes in `dtype`."""
    import jax
    import jax.numpy as jnp

    def computed(p, *batch):
        return loss(jax.tree.map(lambda x: x.astype(dtype), p), *batch).astype(jnp.float32)

    def sgd(state, *batch):
        value, g = jax.value_and_grad(computed)(state, *batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, g), value

    def with_moments(state, *batch):
        p, m, v, t = state
        value, g = jax.value_and_grad(computed)(p, *batch)
        return adam_update(p, m, v, t, g), value

    zeros = jax.tree.map(lambda x: 0 * x, params)
    state = (params, zeros, jax.tree.map(lambda x: 0 * x, params), 0.0) if adam else params
    return jax.jit(with_moments if adam else sgd, donate_argnums=0), jax.device_put(state)


def adam_update(p, m, v, t, g):
    """Optax's adamw, written out: this benchmark needs nothing but JAX."""
    import jax
    import jax.numpy as jnp

    t = t + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)

    def moved(p, m, v):
        step = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
        return p - 1e-3 * (step + 0.01 * p)

    return jax.tree.map(moved, p, m, v), m, v, t


def cross_entropy(logits, labels):
    import jax
    import jax.numpy as jnp

    rows = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(rows, labels[..., None], -1))


# -- training


@workload
def mlp_train(dtype):
    import jax

    def loss(p, x, y):
        for w, b in p[:-1]:
            x = jax.nn.relu(x @ w + b)
        return cross_entropy(x @ p[-1][0] + p[-1][1], y)

    sizes = (784, 512, 512, 10)
    params = [(normal(i, o), normal(o, scale=0.01)) for i, o in zip(sizes, sizes[1:])]
    step, state = training(loss, params, dtype)
    return step, state, jax.device_put((normal(128, 784, scale=1).astype(dtype), integers(10, 128)))


@workload
def cnn_train(dtype):
    import jax
    import numpy as np

    def loss(p, x, y):
        for w in p[:-1]:
            x, least = jax.nn.relu(conv(x, w, 1)), np.array(-np.inf, dtype)
            x = jax.lax.reduce_window(x, least, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(x.mean((1, 2)) @ p[-1], y)

    sizes = (3, 32, 64, 128)
    params = [normal(3, 3, i, o, scale=0.1) for i, o in zip(sizes, sizes[1:])] + [normal(128, 10)]
    step, state = training(loss, params, dtype)
    images = normal(32, 32, 32, 3, scale=1).astype(dtype)
    return step, state, jax.device_put((images, integers(10, 32)))


def conv(x, w, stride):
    import jax

    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def norm(x, scale):
    """Layer norm over the last axis, in float32."""
    import jax.numpy as jnp

    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def attend(q, k, v, mask):
    """Plain attention of [batch, time, heads, size]."""
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(mask, scores.astype(jnp.float32), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def block(p, x, heads, attention):
    import jax

    b, t, c = x.shape
    q, k, v = (y.reshape(b, t, heads, c // heads) for y in jax.numpy.split(
        norm(x, p["n1"]) @ p["qkv"], 3, axis=-1))  # fmt: skip
    out, kept = attention(q, k, v)
    x = x + out.reshape(b, t, c) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["n2"]) @ p["up"]) @ p["down"], kept


def transformer(layers, c, words, times):
    ones = normal(c, scale=0) + 1
    return {
        "words": normal(words, c, scale=0.02), "times": normal(times, c, scale=0.02), "n": ones,
        "blocks": [{
            "n1": ones + 0, "n2": ones + 0, "qkv": normal(c, 3 * c), "out": normal(c, c),
            "up": normal(c, 4 * c), "down": normal(4 * c, c),
        } for _ in range(layers)],
    }  # fmt: skip


@workload
def gpt_train(dtype):
    import jax
    import jax.numpy as jnp

    def loss(p, ids, y):
        t = ids.shape[1]
        mask = jnp.tril(jnp.ones((t, t), bool))
        x = p["words"][ids] + p["times"][:t]
        for row in p["blocks"]:
            x, _ = block(row, x, 4, lambda q, k, v: (attend(q, k, v, mask), None))
        return cross_entropy(norm(x, p["n"]) @ p["words"].T, y)

    step, state = training(loss, transformer(4, 256, 1024, 128), dtype, adam=True)
    return step, state, jax.device_put((integers(1024, 8, 128), integers(1000, 8, 128)))


@workload
def lstm_train(dtype):
    import jax
    import jax.numpy as jnp

    def loss(p, xs, y):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((xs.shape[1], p["h"].shape[0]), xs.dtype)
        (h, _), _ = jax.lax.scan(cell, (zero, zero), xs)
        return cross_entropy(h @ p["y"], y)

    params = {"x": normal(64, 1024), "h": normal(256, 1024), "b": normal(1024, scale=0.01),
              "y": normal(256, 10)}  # fmt: skip
    step, state = training(loss, params, dtype)
    xs = normal(64, 32, 64, scale=1).astype(dtype)
    return step, state, jax.device_put((xs, integers(10, 32)))


@workload
def adam(dtype):
    import jax

    shapes = [(1024, 1024)] * 6 + [(1024,)] * 12
    p, m, g = (jax.device_put([normal(*s).astype(dtype) for s in shapes]) for _ in range(3))
    v = jax.device_put([abs(normal(*s)).astype(dtype) for s in shapes])

    def step(state, g):
        out = adam_update(*state, g)
        return out, out[3]

    return jax.jit(step, donate_argnums=0), (p, m, v, jax.device_put(0.0)), (g,)


# -- inference: the state stays


def inference(fn, state, *rest):
    import jax

    return jax.jit(lambda s, *r: (None, fn(s, *r))), jax.device_put(state), jax.device_put(rest)


@workload
def attention(dtype):
    import jax.numpy as jnp

    q, k, v = (normal(4, 512, 8, 64, scale=s).astype(dtype) for s in (1, 0.9, 0.8))
    return inference(lambda s, q: attend(q, *s, jnp.tril(jnp.ones((512, 512), bool))), (k, v), q)


@workload
def layernorm_gelu(dtype):
    import jax

    return inference(lambda s, x: jax.nn.gelu(norm(x, s)), normal(1024, scale=1).astype(dtype),
                     normal(4096, 1024, scale=1).astype(dtype))  # fmt: skip


@workload
def softmax(dtype):
    import jax

    return inference(lambda _, x: jax.nn.softmax(x), (), normal(4096, 1000, scale=1).astype(dtype))


@workload
def matmul_chain(dtype):
    def chain(weights, x):
        for w in weights:
            x = x @ w
        return x

    weights = [normal(768, 768).astype(dtype) for _ in range(4)]
    return inference(chain, weights, normal(512, 768, scale=1).astype(dtype))


@workload
def elementwise(dtype):
    import jax.numpy as jnp

    def chain(_, x, y):
        for _ in range(4):
            x = jnp.tanh(x * y + 0.5) - jnp.exp(-x * x)
        return x

    return inference(chain, (), *(normal(2048, 1024, scale=s).astype(dtype) for s in (1, 0.5)))


@workload
def resnet_infer(dtype):
    import jax

    def model(p, x):
        x = jax.nn.relu(conv(x, p["stem"], 2))
        for first, second, skip in p["blocks"]:
            stride = 1 if skip is None else 2
            y = conv(jax.nn.relu(conv(x, first, stride)), second, 1)
            x = jax.nn.relu(y + (x if skip is None else conv(x, skip, 2)))
        return x.mean((1, 2)) @ p["head"]

    blocks, last = [], 64
    for c in (64, 128, 256):
        skip = None if c == last else normal(1, 1, last, c)
        blocks.append((normal(3, 3, last, c, scale=0.03), normal(3, 3, c, c, scale=0.03), skip))
        blocks.append((normal(3, 3, c, c, scale=0.02), normal(3, 3, c, c, scale=0.02), None))
        last = c
    params = {"stem": normal(7, 7, 3, 64, scale=0.05), "blocks": blocks, "head": normal(256, 100)}
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    return inference(model, params, normal(4, 96, 96, 3, scale=1).astype(dtype))


@workload
def decode(dtype):
    """A token with a cache of keys and values, which is donated."""
    import jax
    import jax.numpy as jnp

    layers, c, heads, times = 6, 512, 8, 256

    def step(state, p):
        caches, ids, at = state
        x, new = p["words"][ids] + p["times"][at], []
        mask = jnp.arange(times) <= at
        for row, (ks, vs) in zip(p["blocks"], caches):

            def cached(q, k, v, ks=ks, vs=vs):
                ks, vs = (jax.lax.dynamic_update_slice(a, b, (0, at, 0, 0))
                          for a, b in ((ks, k), (vs, v)))  # fmt: skip
                return attend(q, ks, vs, mask), (ks, vs)

            x, kept = block(row, x, heads, cached)
            new.append(kept)
        ids = jnp.argmax(norm(x, p["n"]) @ p["words"].T, -1).astype(jnp.int32)
        return (new, ids, (at + 1) % times), ids

    params = jax.tree.map(lambda x: x.astype(dtype), transformer(layers, c, 4096, times))
    empty = normal(1, times, heads, c // heads, scale=0).astype(dtype)
    state = ([(empty + 0, empty + 0) for _ in range(layers)], integers(9, 1, 1), integers(1)[()])
    return jax.jit(step, donate_argnums=0), jax.device_put(state), (jax.device_put(params),)


# -- one process


def serve(name: str, dtype: str) -> None:
    """benchmarks.worker's protocol."""
    out, sys.stdout = sys.stdout, sys.stderr
    import jax
    import jax.numpy as jnp

    jax.devices()
    step, state, rest = WORKLOADS[name]({"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype])
    jax.block_until_ready((state, rest))

    def once():
        nonlocal state
        new, value = step(state, *rest)
        jax.block_until_ready((new, value))
        state = state if new is None else new
        return value

    start = time.perf_counter()
    value = once()
    first = time.perf_counter() - start
    total = float(jnp.sum(jnp.abs(value).astype(jnp.float32)))
    print(json.dumps({"ready": True, "first": first, "value": total}), file=out, flush=True)
    for line in sys.stdin:
        command, *count = line.split()
        if command == "quit":
            break
        seconds = []
        for _ in range(int(count[0])):
            start, work = time.perf_counter(), time.process_time()
            once()
            seconds.append((time.perf_counter() - start, time.process_time() - work))
        print(json.dumps({"seconds": seconds}), file=out, flush=True)


class Worker:
    def __init__(self, platform: str, name: str, dtype: str, cache: str) -> None:
        env = dict(os.environ, JAX_PLATFORMS=platform, TORCH_HLO_CACHE=cache)
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "benchmarks.jax_platforms", "--serve", name, dtype]
        self.process = subprocess.Popen(
            command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.ready = self._read()
        self.seconds: list[list[float]] = []

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with {self.process.wait()}")
        return json.loads(line)

    def steps(self, count: int) -> list[list[float]]:
        self.process.stdin.write(f"steps {count}\n")
        self.process.stdin.flush()
        return self._read()["seconds"]

    def quit(self) -> None:
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait(30)


def measure(name: str, dtype: str, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        workers = [Worker(p, name, dtype, cache) for p in PLATFORMS]
        for w in workers:
            w.steps(3)
        counts = [max(1, min(500, int(args.slice / min(w.steps(2))[0]))) for w in workers]
        for round_ in range(args.rounds):
            turn = list(zip(workers, counts))
            for w, count in turn if round_ % 2 == 0 else turn[::-1]:
                w.seconds += w.steps(count)
        for w in workers:
            w.quit()
    ours, theirs = workers
    medians, work = (
        [statistics.median(s[i] for s in w.seconds) for w in workers] for i in range(2)
    )
    return {
        "ms": medians[0] * 1e3,
        "cpu_ms": medians[1] * 1e3,
        "ratio": medians[1] / medians[0],
        "work_ratio": work[1] / work[0],
        "first_s": ours.ready["first"],
        "cpu_first_s": theirs.ready["first"],
        "first_ratio": theirs.ready["first"] / ours.ready["first"],
        "difference": abs(1 - ours.ready["value"] / (theirs.ready["value"] or 1)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jax_platforms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slice", type=float, default=0.4, help="seconds per platform and round")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", nargs=2, metavar=("WORKLOAD", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return 0
    write_bytecode()
    results: dict[str, dict] = {}
    print(f"{'':24s}{'hlo ms':>10s}{'cpu ms':>10s}{'ratio':>8s}{'work':>8s}"
          f"{'first s':>10s}{'cpu':>8s}{'ratio':>8s}{'differ':>10s}")  # fmt: skip
    for dtype in args.dtypes.split(","):
        for name in args.workloads.split(","):
            r = results[f"{name} {dtype}"] = measure(name, dtype, args)
            print(f"{name + ' ' + dtype:24s}{r['ms']:10.3f}{r['cpu_ms']:10.3f}{r['ratio']:8.2f}"
                  f"{r['work_ratio']:8.2f}{r['first_s']:10.2f}{r['cpu_first_s']:8.2f}{r['first_ratio']:8.2f}"
                  f"{r['difference']:10.1e}", flush=True)  # fmt: skip
    for key in ("ratio", "work_ratio", "first_ratio"):
        values = [r[key] for r in results.values()]
        mean = math.exp(statistics.fmean(map(math.log, values)))
        print(f"{key}: geometric mean {mean:.2f}, lowest {min(values):.2f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(results, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
