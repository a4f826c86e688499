"""Annotated programs for the partitioning sweep, see partition.py. Needs JAX; runs without this
project.

    python test/sweeps/partition_cases.py OUT.pickle [NAME…] [--varied COUNT SEED]
writes {name: {"stablehlo": text, "hlo": text, "xla": text, "inputs": [array], "outputs": [array]}}:
the program with Shardy annotations, the same with XLA's (absent where JAX cannot write it), the
program for one of 8 devices that XLA makes of the former, and the values that one device computes.
With --varied, COUNT of the programs under random annotations instead.
"""

from __future__ import annotations

import os
import pickle
import sys
from functools import partial

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn, random
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

RNG = np.random.default_rng(0)
MESHES = {
    "8": ((8,), ("x",)),
    "2x4": ((2, 4), ("x", "y")),
    "4x2": ((4, 2), ("x", "y")),
    "2x2x2": ((2, 2, 2), ("x", "y", "z")),
}
CASES: dict[str, tuple] = {}


def mesh_of(name: str):
    sizes, axes = MESHES[name]
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))


def case(name: str, mesh: str, fn, args: tuple, specs: tuple, outs=None) -> None:
    """`specs`: per argument (a tree like it) a PartitionSpec, None for not annotated. `fn` may take
    the keyword `to` (value, spec) -> value."""
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    CASES[name] = (mesh, fn, args, specs, outs)


def normal(*dims: int, scale: float = 1.0, dtype="float32") -> np.ndarray:
    return (scale * RNG.standard_normal(dims)).astype(dtype)


def ints(low: int, high: int, *dims: int) -> np.ndarray:
    return RNG.integers(low, high, dims).astype(np.int32)


# Models


def mlp(x, w1, w2):
    return nn.gelu(x @ w1) @ w2


def mlp_step(x, y, w1, w2):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((mlp(x, *w) - y) ** 2))((w1, w2))
    return loss, *(w - 0.1 * g for w, g in zip((w1, w2), grads))


def norm(x, g):
    return g * (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(x, wq, wk, wv, wo, heads: int, causal: bool = True):
    b, s, d = x.shape
    q, k, v = ((x @ w).reshape(b, s, heads, -1).transpose(0, 2, 1, 3) for w in (wq, wk, wv))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9)
    return (nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(b, s, -1) @ wo


def block(p, x, heads: int, to=lambda v, spec: v, stream=None):
    """A pre-norm transformer block; `stream`: the sharding of activations between sublayers."""
    x = to(x, stream)
    x = to(
        x + attention(norm(x, p["g1"]), p["wq"], p["wk"], p["wv"], p["wo"], heads),
        stream,
    )
    return to(x + nn.gelu(norm(x, p["g2"]) @ p["w1"]) @ p["w2"], stream)


def block_params(d: int, hidden: int) -> dict:
    w = {name: normal(d, d, scale=d**-0.5) for name in ("wq", "wk", "wv", "wo")}
    return {
        **w,
        "g1": np.ones(d, np.float32),
        "g2": np.ones(d, np.float32),
        "w1": normal(d, hidden, scale=d**-0.5),
        "w2": normal(hidden, d, scale=hidden**-0.5),
    }


def block_specs(row, column) -> dict:
    """Megatron: `column` splits the outputs of the first matrix of a pair and the inputs of the
    second; `row` (FSDP) the other dimension."""
    first, second = P(row, column), P(column, row)
    return {
        "wq": first,
        "wk": first,
        "wv": first,
        "wo": second,
        "g1": P(None),
        "g2": P(None),
        "w1": first,
        "w2": second,
    }


def gpt(p, tokens, heads: int, to=lambda v, spec: v, stream=None):
    x = p["embed"][tokens] + p["position"][: tokens.shape[1]]
    for layer in p["layers"]:
        x = block(layer, x, heads, to, stream)
    return norm(x, p["g"]) @ p["head"]


def gpt_loss(p, tokens, labels, heads: int, to, stream):
    logp = nn.log_softmax(gpt(p, tokens, heads, to, stream))
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()


def gpt_step(heads: int, stream=None, adam: bool = False):
    def sgd(p, tokens, labels, to):
        loss, grads = jax.value_and_grad(gpt_loss)(p, tokens, labels, heads, to, stream)
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    def adamw(p, m, v, tokens, labels, to):
        loss, grads = jax.value_and_grad(gpt_loss)(p, tokens, labels, heads, to, stream)
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
        v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g * g, v, grads)
        return (
            loss,
            jax.tree.map(lambda w, a, b: w - 0.01 * a / (jnp.sqrt(b) + 1e-6), p, m, v),
            m,
            v,
        )

    return adamw if adam else sgd


def gpt_params(layers: int, d: int, hidden: int, vocabulary: int, length: int) -> dict:
    return {
        "embed": normal(vocabulary, d),
        "position": normal(length, d, scale=0.1),
        "layers": [block_params(d, hidden) for _ in range(layers)],
        "g": np.ones(d, np.float32),
        "head": normal(d, vocabulary, scale=d**-0.5),
    }


def gpt_specs(layers: int, row, column, vocabulary=None) -> dict:
    return {
        "embed": P(vocabulary, row),
        "position": P(None, None),
        "layers": [block_specs(row, column) for _ in range(layers)],
        "g": P(None),
        "head": P(row, vocabulary),
    }


def moe(x, router, w1, w2, capacity: int):
    """Top-1 routing with one-hot dispatch, as in GShard. x: (groups, tokens, d); w1: (experts, d,
    hidden)."""
    experts = w1.shape[0]
    gates = nn.softmax(jnp.einsum("gsd,de->gse", x, router))
    best = jnp.argmax(gates, -1)
    mask = nn.one_hot(best, experts)
    place = (jnp.cumsum(mask, 1) - 1) * mask
    mask = mask * (place < capacity)
    dispatch = mask[..., None] * nn.one_hot(place.astype(jnp.int32), capacity)
    combine = dispatch * (gates * mask).sum(-1)[..., None, None]
    inside = jnp.einsum("gsec,gsd->egcd", dispatch, x)
    hidden = nn.relu(jnp.einsum("egcd,edh->egch", inside, w1))
    return jnp.einsum("gsec,egcd->gsd", combine, jnp.einsum("egch,ehd->egcd", hidden, w2))


def dense_cases() -> None:
    x, y, w1, w2 = (
        normal(32, 64),
        normal(32, 64),
        normal(64, 128, scale=0.1),
        normal(128, 64, scale=0.1),
    )
    case("mlp_megatron_8", "8", mlp, (x, w1, w2), (P(), P(None, "x"), P("x", None)))
    case(
        "mlp_megatron_2x4",
        "2x4",
        mlp,
        (x, w1, w2),
        (P("x", None), P(None, "y"), P("y", None)),
    )
    case(
        "mlp_megatron_out_sharded",
        "2x4",
        mlp,
        (x, w1, w2),
        (P("x", None), P(None, "y"), P("y", None)),
        P("x", "y"),
    )
    case("mlp_data_parallel", "8", mlp, (x, w1, w2), (P("x", None), P(), P()))
    case(
        "mlp_fsdp_forward",
        "8",
        mlp,
        (x, w1, w2),
        (P("x", None), P("x", None), P("x", None)),
    )
    case(
        "mlp_2d",
        "2x4",
        mlp,
        (x, w1, w2),
        (P("x", "y"), P("y", "x"), P("x", "y")),
        P("x", "y"),
    )
    case("mlp_only_input", "8", mlp, (x, w1, w2), (P("x", None), None, None))
    case("mlp_only_weight", "8", mlp, (x, w1, w2), (None, P(None, "x"), None))
    case("mlp_only_output", "8", mlp, (x, w1, w2), (None, None, None), P("x", None))
    case(
        "mlp_conflict",
        "8",
        mlp,
        (x, w1, w2),
        (P("x", None), P(None, "x"), P("x", None)),
    )
    case(
        "mlp_conflict_2",
        "2x4",
        mlp,
        (x, w1, w2),
        (P("x", "y"), P("x", "y"), P("x", "y")),
        P("y", "x"),
    )
    case(
        "mlp_step_dp",
        "8",
        mlp_step,
        (x, y, w1, w2),
        (P("x", None), P("x", None), P(), P()),
        (P(), P(), P()),
    )
    case(
        "mlp_step_fsdp",
        "8",
        mlp_step,
        (x, y, w1, w2),
        (P("x", None), P("x", None), P("x", None), P("x", None)),
        (P(), P("x", None), P("x", None)),
    )
    case(
        "mlp_step_tp",
        "8",
        mlp_step,
        (x, y, w1, w2),
        (P(), P(), P(None, "x"), P("x", None)),
        (P(), P(None, "x"), P("x", None)),
    )
    case(
        "mlp_step_dp_tp",
        "2x4",
        mlp_step,
        (x, y, w1, w2),
        (P("x", None), P("x", None), P(None, "y"), P("y", None)),
        (P(), P(None, "y"), P("y", None)),
    )
    case(
        "mlp_step_fsdp_tp",
        "2x4",
        mlp_step,
        (x, y, w1, w2),
        (P("x", None), P("x", None), P("x", "y"), P("y", "x")),
        (P(), P("x", "y"), P("y", "x")),
    )
    case(
        "mlp_step_few",
        "2x4",
        mlp_step,
        (x, y, w1, w2),
        (P("x", None), None, P(None, "y"), None),
    )
    case(
        "mlp_step_3d",
        "2x2x2",
        mlp_step,
        (x, y, w1, w2),
        (P(("x", "y"), None), P(("x", "y"), None), P("x", "z"), P("z", "y")),
    )
    for name, spec in (
        ("batch", P("x", None, None)),
        ("rows", P(None, "x", None)),
        ("contracting", P(None, None, "x")),
    ):
        case(
            f"matmul_batched_{name}",
            "8",
            jnp.matmul,
            (normal(8, 16, 24), normal(8, 24, 32)),
            (spec, P("x", None, None) if name == "batch" else None),
        )
    case(
        "matmul_both_contracting",
        "8",
        jnp.matmul,
        (x, w1),
        (P(None, "x"), P("x", None)),
    )
    case(
        "matmul_both_contracting_scatter",
        "8",
        jnp.matmul,
        (x, w1),
        (P(None, "x"), P("x", None)),
        P("x", None),
    )
    case(
        "matmul_outer",
        "2x4",
        jnp.matmul,
        (x, w1),
        (P("x", None), P(None, "y")),
        P("x", "y"),
    )
    case(
        "matmul_transposed",
        "2x4",
        lambda a, b: (a @ b).T,
        (x, w1),
        (P("x", "y"), P("y", None)),
        P(None, "x"),
    )
    case(
        "matmul_mixed_axes",
        "2x2x2",
        jnp.matmul,
        (x, w1),
        (P("x", ("y", "z")), P(("y", "z"), None)),
        P(("x", "y"), "z"),
    )
    case("matmul_swap_axes", "2x4", lambda a: a * 2, (x,), (P("x", "y"),), P("y", "x"))
    case(
        "einsum_chain",
        "2x2x2",
        lambda a, b, c: jnp.einsum("bij,bjk,bkl->bil", a, b, c),
        (normal(4, 8, 8), normal(4, 8, 16), normal(4, 16, 8)),
        (P("x", "y", None), P("x", None, "z"), P("x", "z", None)),
        P("x", "y", None),
    )
    case(
        "linear_bias_relu",
        "2x4",
        lambda a, w, b: nn.relu(a @ w + b),
        (x, w1, normal(128)),
        (P("x", None), P(None, "y"), P("y")),
    )
    case(
        "deep_mlp_tp",
        "8",
        lambda a, *ws: _deep(a, ws),
        (x, *(normal(64, 64, scale=0.1) for _ in range(4))),
        (P(), P(None, "x"), P("x", None), P(None, "x"), P("x", None)),
    )
    case(
        "lora",
        "2x4",
        lambda a, w, u, v: a @ w + (a @ u) @ v,
        (x, w1, normal(64, 4), normal(4, 128)),
        (P("x", None), P(None, "y"), P(), P(None, "y")),
    )
    case(
        "quadratic_form",
        "8",
        lambda a, m: jnp.einsum("bi,ij,bj->b", a, m, a),
        (x, normal(64, 64)),
        (P("x", None), P(None, "x")),
    )
    case(
        "bf16_mlp",
        "2x4",
        lambda a, b, c: mlp(
            a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), c.astype(jnp.bfloat16)
        ).astype(jnp.float32),
        (x, w1, w2),
        (P("x", None), P("x", "y"), P("y", "x")),
    )


def _deep(x, ws):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def transformer_cases() -> None:
    d, heads = 32, 8
    x, ws = normal(8, 16, d), [normal(d, d, scale=d**-0.5) for _ in range(4)]
    run = lambda x, *w: attention(x, *w, heads)
    column, row = P(None, "y"), P("y", None)
    case("attention_dp", "8", run, (x, *ws), (P("x"), P(), P(), P(), P()))
    case(
        "attention_heads",
        "8",
        run,
        (x, *ws),
        (P(), P(None, "x"), P(None, "x"), P(None, "x"), P("x", None)),
    )
    case(
        "attention_dp_heads",
        "2x4",
        run,
        (x, *ws),
        (P("x"), column, column, column, row),
    )
    case("attention_sequence", "8", run, (x, *ws), (P(None, "x"), P(), P(), P(), P()))
    case(
        "attention_dp_sequence",
        "2x4",
        run,
        (x, *ws),
        (P("x", "y"), P(), P(), P(), P()),
        P("x", "y"),
    )
    case("attention_fsdp", "8", run, (x, *ws), (P("x"), *[P("x", None)] * 4))
    case("attention_only_x", "2x4", run, (x, *ws), (P("x"), None, None, None, None))
    case("attention_only_w", "2x4", run, (x, *ws), (None, column, None, None, None))
    case(
        "attention_features",
        "8",
        run,
        (x, *ws),
        (P(None, None, "x"), P(), P(), P(), P()),
    )

    def backward(x, *w):
        return jax.grad(lambda w: (attention(x, *w, heads) ** 2).sum())(w)

    case("attention_grad_dp", "8", backward, (x, *ws), (P("x"), P(), P(), P(), P()))
    case(
        "attention_grad_tp",
        "2x4",
        backward,
        (x, *ws),
        (P("x"), column, column, column, row),
        (column, column, column, row),
    )
    case(
        "attention_grad_fsdp",
        "8",
        backward,
        (x, *ws),
        (P("x"), *[P("x", None)] * 4),
        (P("x", None),) * 4,
    )
    p = block_params(d, 64)
    for name, mesh, xs, ps in (
        ("dp", "8", P("x"), block_specs(None, None)),
        ("tp", "8", P(), block_specs(None, "x")),
        ("fsdp", "8", P("x"), block_specs("x", None)),
        ("dp_tp", "2x4", P("x"), block_specs(None, "y")),
        ("fsdp_tp", "2x4", P("x"), block_specs("x", "y")),
        ("fsdp_tp_4x2", "4x2", P("x"), block_specs("x", "y")),
        ("3d", "2x2x2", P("x", "y"), block_specs("x", "z")),
    ):
        case(f"block_{name}", mesh, lambda p, x: block(p, x, heads), (p, x), (ps, xs), xs)
        case(
            f"block_grad_{name}",
            mesh,
            jax.grad(lambda p, x: (block(p, x, heads) ** 2).mean()),
            (p, x),
            (ps, xs),
            ps,
        )
    case(
        "block_sequence_parallel",
        "2x4",
        lambda p, x, to: block(p, x, heads, to, P("x", "y", None)),
        (p, x),
        (block_specs(None, "y"), P("x")),
        P("x", "y"),
    )
    case(
        "block_grad_sequence_parallel",
        "2x4",
        lambda p, x, to: jax.grad(
            lambda p: (block(p, x, heads, to, P("x", "y", None)) ** 2).mean()
        )(p),
        (p, x),
        (block_specs(None, "y"), P("x")),
        block_specs(None, "y"),
    )
    layers, vocabulary, length = 2, 64, 16
    params = gpt_params(layers, d, 64, vocabulary, length)
    tokens, labels = ints(0, vocabulary, 8, length), ints(0, vocabulary, 8, length)
    batch = P("x", None)
    for name, mesh, specs in (
        ("dp", "8", gpt_specs(layers, None, None)),
        ("fsdp", "8", gpt_specs(layers, "x", None)),
        ("dp_tp", "2x4", gpt_specs(layers, None, "y")),
        ("fsdp_tp", "2x4", gpt_specs(layers, "x", "y")),
        ("fsdp_tp_vocabulary", "2x4", gpt_specs(layers, "x", "y", "y")),
    ):
        case(
            f"gpt_step_{name}",
            mesh,
            gpt_step(heads),
            (params, tokens, labels),
            (specs, batch, batch),
            (P(), specs),
        )
    specs = gpt_specs(layers, None, "y")
    case(
        "gpt_step_sequence_parallel",
        "2x4",
        gpt_step(heads, P("x", "y", None)),
        (params, tokens, labels),
        (specs, batch, batch),
        (P(), specs),
    )
    specs = gpt_specs(layers, "x", "y")
    zeros = jax.tree.map(np.zeros_like, params)
    case(
        "gpt_adam_fsdp_tp",
        "2x4",
        gpt_step(heads, adam=True),
        (params, zeros, zeros, tokens, labels),
        (specs, specs, specs, batch, batch),
        (P(), specs, specs, specs),
    )
    replicated = gpt_specs(layers, None, None)
    case(
        "gpt_adam_zero1",
        "8",
        gpt_step(heads, adam=True),
        (params, zeros, zeros, tokens, labels),
        (
            replicated,
            gpt_specs(layers, "x", None),
            gpt_specs(layers, "x", None),
            batch,
            batch,
        ),
        (P(), replicated, gpt_specs(layers, "x", None), gpt_specs(layers, "x", None)),
    )
    case(
        "gpt_only_batch",
        "8",
        gpt_step(heads),
        (params, tokens, labels),
        (None, batch, None),
    )
    case(
        "gpt_forward_tp",
        "8",
        lambda p, t: gpt(p, t, heads),
        (params, tokens),
        (gpt_specs(layers, None, "x", "x"), P()),
    )


def moe_cases() -> None:
    x, router, w1, w2 = (
        normal(8, 16, 16),
        normal(16, 8),
        normal(8, 16, 32, scale=0.2),
        normal(8, 32, 16, scale=0.2),
    )
    run = lambda *a: moe(*a, 4)
    case(
        "moe_experts",
        "8",
        run,
        (x, router, w1, w2),
        (P("x"), P(), P("x"), P("x")),
        P("x"),
    )
    case(
        "moe_replicated_groups",
        "8",
        run,
        (x, router, w1, w2),
        (P(), P(), P("x"), P("x")),
    )
    case("moe_2d", "2x4", run, (x, router, w1, w2), (P("x"), P(), P("y"), P("y")), P("x"))
    case(
        "moe_expert_tensor",
        "2x4",
        run,
        (x, router, w1, w2),
        (P("x"), P(), P("x", None, "y"), P("x", "y", None)),
        P("x"),
    )
    case("moe_dp", "8", run, (x, router, w1, w2), (P("x"), P(), P(), P()))
    case(
        "moe_grad",
        "8",
        jax.grad(lambda w, x, r: (moe(x, r, *w, 4) ** 2).sum()),
        ((w1, w2), x, router),
        ((P("x"), P("x")), P("x"), P()),
        (P("x"), P("x")),
    )

    def exchange(x, w, to):
        y = to(jnp.einsum("gsd,de->gse", x, w), P("x", None, None))
        return to(y.transpose(1, 0, 2), P("x", None, None)) * 2

    case(
        "all_to_all_transposed",
        "8",
        exchange,
        (normal(8, 8, 16), normal(16, 16)),
        (P("x"), P()),
        P("x"),
    )


def convolution_cases() -> None:
    def conv(x, w, stride=1, padding="SAME", groups=1):
        return lax.conv_general_dilated(x, w, (stride, stride), padding, feature_group_count=groups)

    x, w = normal(8, 8, 16, 16), normal(16, 8, 3, 3, scale=0.2)
    case("conv_batch", "8", conv, (x, w), (P("x"), P()))
    case("conv_out_features", "8", conv, (x, w), (P(), P("x")))
    case("conv_in_features", "8", conv, (x, w), (P(None, "x"), P(None, "x")))
    case("conv_spatial", "8", conv, (x, w), (P(None, None, "x"), P()), P(None, None, "x"))
    case(
        "conv_spatial_2d",
        "2x4",
        conv,
        (x, w),
        (P(None, None, "x", "y"), P()),
        P(None, None, "x", "y"),
    )
    case(
        "conv_spatial_5",
        "8",
        conv,
        (x, normal(16, 8, 5, 5, scale=0.1)),
        (P(None, None, "x"), P()),
        P(None, None, "x"),
    )
    case(
        "conv_spatial_stride",
        "4x2",
        lambda x, w: conv(x, w, 2),
        (x, w),
        (P("y", None, "x"), P()),
        P("y", None, "x"),
    )
    case(
        "conv_spatial_valid",
        "4x2",
        lambda x, w: conv(x, w, 1, "VALID"),
        (normal(2, 4, 18, 18), normal(8, 4, 3, 3)),
        (P("y", None, None, None), P()),
        P("y"),
    )
    case("conv_dp_features", "2x4", conv, (x, w), (P("x"), P("y")))
    case(
        "conv_depthwise",
        "8",
        lambda x, w: conv(x, w, groups=8),
        (x, normal(8, 1, 3, 3)),
        (P(None, "x"), P("x")),
    )
    case(
        "conv_grouped_batch",
        "8",
        lambda x, w: conv(x, w, groups=2),
        (x, normal(16, 4, 3, 3)),
        (P("x"), P()),
    )

    def grads(x, w):
        return jax.grad(lambda x, w: (nn.relu(conv(x, w)) ** 2).sum(), (0, 1))(x, w)

    case("conv_grad_batch", "8", grads, (x, w), (P("x"), P()), (P("x"), P()))
    case("conv_grad_features", "2x4", grads, (x, w), (P("x"), P("y")), (P("x"), P("y")))
    case(
        "conv_grad_spatial",
        "8",
        grads,
        (x, w),
        (P(None, None, "x"), P()),
        (P(None, None, "x"), P()),
    )

    def resnet(x, w1, w2, g):
        h = nn.relu(norm(conv(x, w1), g))
        return lax.reduce_window(
            x + conv(h, w2), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
        ).mean((2, 3))

    case(
        "resnet_block",
        "8",
        resnet,
        (x, normal(8, 8, 3, 3), normal(8, 8, 3, 3), np.ones(16, np.float32)),
        (P("x"), P(), P(), P()),
    )
    pool = lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    case("pool_batch", "8", pool, (x,), (P("x"),))
    case("pool_spatial", "8", pool, (x,), (P(None, None, "x"),), P(None, None, "x"))
    case(
        "pool_overlapping",
        "8",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 1, 1), "SAME"),
        (x,),
        (P(None, None, "x"),),
        P(None, None, "x"),
    )
    case(
        "pool_grad",
        "8",
        jax.grad(
            lambda x: (
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") ** 2
            ).sum()
        ),
        (x,),
        (P("x"),),
        P("x"),
    )
    case(
        "batch_norm",
        "8",
        lambda x, g: (
            (x - x.mean((0, 2, 3), keepdims=True))
            * lax.rsqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
            * g[:, None, None]
        ),
        (x, np.ones(8, np.float32)),
        (P("x"), P()),
    )
    case(
        "group_norm",
        "2x4",
        lambda x: ((y := x.reshape(8, 2, 4, 16, 16)) - y.mean((2, 3, 4), keepdims=True)).reshape(
            x.shape
        ),
        (x,),
        (P("x"),),
    )


def index_cases() -> None:
    table, ids = normal(64, 32), ints(0, 64, 8, 16)
    look = lambda t, i: t[i]
    case("embedding_ids", "8", look, (table, ids), (P(), P("x")))
    case("embedding_vocabulary", "8", look, (table, ids), (P("x", None), P()))
    case("embedding_features", "8", look, (table, ids), (P(None, "x"), P()))
    case("embedding_both", "2x4", look, (table, ids), (P("y", None), P("x", None)))
    case(
        "embedding_one_hot",
        "8",
        lambda t, i: nn.one_hot(i, 64) @ t,
        (table, ids),
        (P("x", None), P()),
    )
    gradient = lambda t, i: jax.grad(lambda t: (t[i] ** 2).sum())(t)
    case("embedding_grad_ids", "8", gradient, (table, ids), (P(), P("x")), P())
    case(
        "embedding_grad_vocabulary",
        "8",
        gradient,
        (table, ids),
        (P("x", None), P()),
        P("x", None),
    )
    case(
        "embedding_grad_features",
        "2x4",
        gradient,
        (table, ids),
        (P(None, "y"), P("x")),
        P(None, "y"),
    )
    case(
        "gather_rows",
        "8",
        lambda x, i: jnp.take_along_axis(x, i, 1),
        (normal(16, 32), ints(0, 32, 16, 4)),
        (P("x"), P("x")),
    )
    case(
        "gather_batched",
        "8",
        jax.vmap(lambda x, i: x[i]),
        (normal(8, 32, 4), ints(0, 32, 8, 6)),
        (P("x"), P("x")),
    )
    case(
        "scatter_set",
        "8",
        lambda x, i, u: x.at[i].set(u),
        (normal(32, 16), RNG.permutation(32)[:8].astype(np.int32), normal(8, 16)),
        (P(None, "x"), P(), P(None, "x")),
    )
    case(
        "scatter_add_rows",
        "8",
        lambda x, i, u: x.at[i].add(u),
        (normal(32, 16), ints(0, 32, 24), normal(24, 16)),
        (P("x"), P(), P()),
    )
    case(
        "scatter_add_updates",
        "8",
        lambda x, i, u: x.at[i].add(u),
        (normal(32, 16), ints(0, 32, 24), normal(24, 16)),
        (P(), P("x"), P("x")),
    )
    case(
        "scatter_max",
        "8",
        lambda x, i, u: x.at[i].max(u),
        (normal(32, 16), ints(0, 32, 24), normal(24, 16)),
        (P(), P("x"), P("x")),
    )
    case(
        "segment_sum",
        "8",
        lambda x, i: jax.ops.segment_sum(x, i, 16),
        (normal(64, 8), ints(0, 16, 64)),
        (P("x"), P("x")),
    )
    case(
        "cross_entropy_vocabulary",
        "2x4",
        lambda z, y: -jnp.take_along_axis(nn.log_softmax(z), y[:, None], 1).mean(),
        (normal(16, 64), ints(0, 64, 16)),
        (P("x", "y"), P("x")),
    )
    case("sort_batch", "8", lambda x: jnp.sort(x, 1), (normal(16, 32),), (P("x"),))
    case(
        "sort_sharded_dim",
        "8",
        lambda x: jnp.sort(x, 1),
        (normal(16, 32),),
        (P(None, "x"),),
        P(None, "x"),
    )
    case("sort_1d", "8", jnp.sort, (normal(64),), (P("x"),), P("x"))
    case("argsort", "2x4", jnp.argsort, (normal(16, 32),), (P("x", "y"),))
    case("top_k", "8", lambda x: lax.top_k(x, 4), (normal(16, 32),), (P("x"),))
    case(
        "top_k_sharded",
        "8",
        lambda x: lax.top_k(x, 4),
        (normal(16, 64),),
        (P(None, "x"),),
    )
    case(
        "argmax_sharded",
        "8",
        lambda x: jnp.argmax(x, -1),
        (normal(16, 64),),
        (P(None, "x"),),
    )
    case(
        "argmax_batch",
        "8",
        lambda x: (jnp.argmax(x, -1), x.max(-1)),
        (normal(16, 64),),
        (P("x"),),
    )
    case(
        "dynamic_slice",
        "8",
        lambda x, i: lax.dynamic_slice(x, (0, i), (16, 8)),
        (normal(16, 32), np.int32(5)),
        (P("x"), P()),
    )
    case(
        "dynamic_slice_sharded",
        "8",
        lambda x, i: lax.dynamic_index_in_dim(x, i, 1, False),
        (normal(16, 32), np.int32(13)),
        (P(None, "x"), P()),
    )
    case(
        "kv_cache",
        "2x4",
        lambda c, u, i: lax.dynamic_update_slice(c, u, (0, i, 0, 0)),
        (normal(4, 32, 8, 4), normal(4, 1, 8, 4), np.int32(7)),
        (P("x", None, "y"), P("x", None, "y"), P()),
        P("x", None, "y"),
    )
    case(
        "kv_cache_sequence",
        "8",
        lambda c, u, i: lax.dynamic_update_slice(c, u, (0, i, 0)),
        (normal(4, 32, 8), normal(4, 1, 8), np.int32(7)),
        (P(None, "x"), P(), P()),
        P(None, "x"),
    )
    case("cumsum_batch", "8", lambda x: jnp.cumsum(x, 1), (normal(16, 32),), (P("x"),))
    case(
        "cumsum_sharded",
        "8",
        lambda x: jnp.cumsum(x, 1),
        (normal(16, 32),),
        (P(None, "x"),),
        P(None, "x"),
    )
    case(
        "cummax_sharded",
        "8",
        lambda x: lax.cummax(x, 0),
        (normal(64, 4),),
        (P("x"),),
        P("x"),
    )


def move_cases() -> None:
    x = normal(16, 64)
    case("reshape_split", "8", lambda x: x.reshape(16, 8, 8) * 2, (x,), (P(None, "x"),))
    case(
        "reshape_merge",
        "2x4",
        lambda x: x.reshape(16, 64) * 2,
        (normal(16, 8, 8),),
        (P("x", "y"),),
    )
    case(
        "reshape_merge_minor",
        "8",
        lambda x: x.reshape(16, 64) * 2,
        (normal(16, 8, 8),),
        (P(None, None, "x"),),
    )
    case(
        "reshape_split_2d",
        "2x4",
        lambda x: x.reshape(4, 4, 8, 8).transpose(0, 2, 1, 3),
        (x,),
        (P("x", "y"),),
    )
    case("reshape_subaxes", "8", lambda x: x.reshape(4, 4, 64) + 1, (x,), (P("x", None),))
    case(
        "reshape_odd",
        "8",
        lambda x: x.reshape(24, 40) + 1,
        (normal(48, 20),),
        (P("x", None),),
    )
    case(
        "flatten",
        "2x4",
        lambda x: x.reshape(-1) * 3,
        (x,),
        (P("x", "y"),),
        P(("x", "y")),
    )
    case(
        "transpose",
        "2x4",
        lambda x: x.transpose(1, 0, 2),
        (normal(8, 16, 4),),
        (P("x", "y"),),
    )
    case("transpose_to_other", "8", lambda x: x.T, (x,), (P("x", None),), P("x", None))
    case(
        "broadcast",
        "2x4",
        lambda a, b: a[:, None] * b[None, :],
        (normal(16), normal(32)),
        (P("x"), P("y")),
    )
    case(
        "concatenate_other",
        "8",
        lambda a, b: jnp.concatenate([a, b], 0),
        (x, x),
        (P(None, "x"), P(None, "x")),
    )
    case(
        "concatenate_same",
        "8",
        lambda a, b: jnp.concatenate([a, b], 1),
        (x, x),
        (P(None, "x"), P(None, "x")),
        P(None, "x"),
    )
    case("slice_other", "8", lambda a: a[3:11] * 2, (x,), (P(None, "x"),))
    case("slice_same", "8", lambda a: a[:, 8:56] * 2, (x,), (P(None, "x"),), P(None, "x"))
    case(
        "slice_half",
        "8",
        lambda a: a[:, :32] * a[:, 32:],
        (x,),
        (P(None, "x"),),
        P(None, "x"),
    )
    case("strided", "8", lambda a: a[:, ::2] * 2, (x,), (P(None, "x"),), P(None, "x"))
    case(
        "shift",
        "8",
        lambda a: a[:, 1:] - a[:, :-1],
        (normal(4, 65),),
        (P(),),
        P(None, None),
    )
    case(
        "roll",
        "8",
        lambda a: jnp.roll(a, 3, 1) + a,
        (x,),
        (P(None, "x"),),
        P(None, "x"),
    )
    case("pad_other", "8", lambda a: jnp.pad(a, ((2, 2), (0, 0))), (x,), (P(None, "x"),))
    case(
        "pad_same",
        "8",
        lambda a: jnp.pad(a, ((0, 0), (4, 4))),
        (normal(16, 56),),
        (P(None, "x"),),
        P(None, "x"),
    )
    case("reverse_other", "8", lambda a: a[::-1], (x,), (P(None, "x"),))
    case("reverse_same", "8", lambda a: a[:, ::-1], (x,), (P(None, "x"),), P(None, "x"))
    case(
        "stencil",
        "8",
        lambda a: (
            a
            + 0.1
            * (
                jnp.roll(a, 1, 0)
                + jnp.roll(a, -1, 0)
                + jnp.roll(a, 1, 1)
                + jnp.roll(a, -1, 1)
                - 4 * a
            )
        ),
        (normal(32, 32),),
        (P("x"),),
        P("x"),
    )
    case(
        "split_qkv",
        "2x4",
        lambda x, w: tuple(v * 2 for v in jnp.split(x @ w, 3, -1)),
        (x, normal(64, 96)),
        (P("x", None), P(None, "y")),
    )
    case(
        "rotary",
        "2x4",
        lambda x: jnp.concatenate([-x[..., 8:], x[..., :8]], -1) * 2 + x,
        (normal(4, 8, 4, 16),),
        (P("x", None, "y"),),
    )
    case("tile", "8", lambda x: jnp.tile(x, (1, 2)), (x,), (P("x"),))
    case(
        "repeat_kv",
        "2x4",
        lambda x: jnp.repeat(x, 2, 1),
        (normal(4, 8, 16),),
        (P("x", "y"),),
    )
    case(
        "one_axis_everything",
        "8",
        lambda x: nn.softmax(x, -1) @ x.T,
        (x,),
        (P("x", None),),
    )


def reduction_cases() -> None:
    x = normal(16, 64)
    case("sum_sharded", "8", lambda x: x.sum(1), (x,), (P(None, "x"),))
    case("sum_all", "2x4", jnp.sum, (x,), (P("x", "y"),))
    case("sum_scatter", "8", lambda x: x.sum(0), (normal(8, 16, 8),), (P("x"),), P("x"))
    case("max_sharded", "8", lambda x: x.max(1), (x,), (P(None, "x"),))
    case(
        "product_any",
        "8",
        lambda x: (jnp.prod(x, 1), (x > 1).any(1), (x > -4).all(1)),
        (x,),
        (P(None, "x"),),
    )
    case("mean_var", "2x4", lambda x: (x.mean(0), x.var(1)), (x,), (P("x", "y"),))
    case("softmax_sharded", "8", nn.softmax, (x,), (P(None, "x"),))
    case("softmax_batch", "8", nn.softmax, (x,), (P("x"),))
    case("logsumexp", "2x4", lambda x: nn.logsumexp(x, 1), (x,), (P("x", "y"),))
    case(
        "layer_norm_features",
        "8",
        lambda x, g: norm(x, g),
        (x, np.ones(64, np.float32)),
        (P(None, "x"), P("x")),
    )
    case(
        "layer_norm_grad",
        "2x4",
        jax.grad(lambda g, x: (norm(x, g) ** 2).sum()),
        (np.ones(64, np.float32), x),
        (P(), P("x")),
    )
    case(
        "two_partial_sums",
        "8",
        lambda a, b, c, d: a @ b + c @ d,
        (x, x.T.copy(), x, x.T.copy()),
        (P(None, "x"), P("x"), P(None, "x"), P("x")),
    )
    case(
        "elementwise_mixed",
        "2x4",
        lambda a, b: jnp.sin(a) * b + a,
        (x, x),
        (P("x", None), P(None, "y")),
    )
    case(
        "elementwise_conflict",
        "8",
        lambda a, b: a + b,
        (x, x),
        (P("x", None), P(None, "x")),
    )
    case(
        "norms",
        "2x4",
        lambda *ws: sum((w**2).sum() for w in ws) ** 0.5,
        (x, x.T.copy(), normal(8)),
        (P("x", "y"), P("y", None), P("x")),
    )


def loop_cases() -> None:
    x, w = normal(16, 32), normal(32, 32, scale=0.1)
    power = lambda x, w: lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c @ w), x)
    case("loop_dp", "8", power, (x, w), (P("x"), P()))
    case(
        "loop_tp",
        "8",
        lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) @ w.T, x),
        (x, w),
        (P(), P(None, "x")),
    )
    case("loop_fsdp", "8", power, (x, w), (P("x"), P("x")))
    case(
        "loop_annotated_inside",
        "2x4",
        lambda x, w, to: lax.fori_loop(0, 3, lambda i, c: to(jnp.tanh(c @ w), P("x", "y")), x),
        (x, w),
        (None, None),
    )
    case("loop_changing", "2x4", power, (x, w), (P("x", "y"), P("x", "y")), P("x", "y"))
    stack = normal(4, 32, 32, scale=0.1)
    scanned = lambda x, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws)
    case("scan_layers_dp", "8", scanned, (x, stack), (P("x"), P()))
    case("scan_layers_fsdp", "8", scanned, (x, stack), (P("x"), P(None, "x")))
    case(
        "scan_layers_tp",
        "2x4",
        lambda x, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w) @ w.T, None), x, ws)[0],
        (x, stack),
        (P("x"), P(None, None, "y")),
    )
    case(
        "scan_grad",
        "8",
        lambda x, ws: jax.grad(lambda ws: (scanned(x, ws)[0] ** 2).sum())(ws),
        (x, stack),
        (P("x"), P(None, "x")),
        P(None, "x"),
    )
    case(
        "scan_time",
        "8",
        lambda x: lax.scan(lambda c, v: (0.9 * c + v, c), jnp.zeros(16), x)[1],
        (normal(12, 16),),
        (P(None, "x"),),
    )
    case(
        "while_norm",
        "8",
        lambda x: lax.while_loop(lambda c: (c**2).sum() > 1.0, lambda c: c * 0.5, x),
        (x,),
        (P("x"),),
    )
    case(
        "cond",
        "8",
        lambda p, x, w: lax.cond(p, lambda x: x @ w, lambda x: x * 2, x),
        (np.bool_(True), x, w),
        (P(), P("x"), P()),
    )
    case(
        "cond_tp",
        "8",
        lambda p, x, w: lax.cond(p, lambda x: x @ w @ w.T, lambda x: jnp.tanh(x), x),
        (np.bool_(True), x, w),
        (P(), P(), P(None, "x")),
    )
    case(
        "remat",
        "8",
        jax.grad(
            lambda w, x: (jax.checkpoint(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w))(w) ** 2).sum()
        ),
        (w, x),
        (P(), P("x")),
    )
    case(
        "rnn",
        "2x4",
        lambda h, xs, w, u: lax.scan(lambda h, v: (jnp.tanh(h @ w + v @ u), None), h, xs)[0],
        (x, normal(5, 16, 32), w, w),
        (P("x"), P(None, "x"), P(None, "y"), P(None, "y")),
    )


def random_cases() -> None:
    key = np.array([7, 42], np.uint32)
    case(
        "random_uniform",
        "8",
        lambda k, to: to(random.uniform(k, (16, 32)), P("x")),
        (key,),
        (P(),),
        P("x"),
    )
    case(
        "random_normal",
        "2x4",
        lambda k, to: to(random.normal(k, (16, 32)), P("x", "y")),
        (key,),
        (P(),),
        P("x", "y"),
    )
    case(
        "dropout",
        "8",
        lambda k, x: jnp.where(random.bernoulli(k, 0.5, x.shape), x * 2, 0),
        (key, normal(16, 32)),
        (P(), P("x")),
    )
    case(
        "random_bits",
        "8",
        lambda k, x: (
            x + lax.rng_bit_generator(k, (16, 32), jnp.uint32)[1].astype(jnp.float32) * 1e-9
        ),
        (np.array([1, 2, 3, 4], np.uint32), normal(16, 32)),
        (P(), P("x")),
    )
    case(
        "iota_mask",
        "2x4",
        lambda x: jnp.where(
            lax.broadcasted_iota(jnp.int32, x.shape, 0)
            >= lax.broadcasted_iota(jnp.int32, x.shape, 1),
            x,
            0,
        ),
        (normal(32, 32),),
        (P("x", "y"),),
    )


def uneven_cases() -> None:
    """Sizes that the mesh does not divide: JAX refuses them for arguments, so constraints inside
    say them."""
    x, w1, w2 = normal(10, 30), normal(30, 50, scale=0.1), normal(50, 30, scale=0.1)
    case(
        "uneven_mlp",
        "8",
        lambda x, a, b, to: to(to(nn.gelu(to(x, P("x")) @ a), P("x")) @ b, P("x")),
        (x, w1, w2),
        (None, None, None),
    )
    case(
        "uneven_mlp_tp",
        "8",
        lambda x, a, b, to: nn.gelu(x @ to(a, P(None, "x"))) @ to(b, P("x", None)),
        (x, w1, w2),
        (None, None, None),
    )
    case("uneven_mean", "8", lambda x, to: to(x, P("x")).mean(0), (x,), (None,))
    case(
        "uneven_softmax",
        "8",
        lambda x, to: nn.softmax(to(x, P(None, "x"))),
        (x,),
        (None,),
    )
    case("uneven_max", "2x4", lambda x, to: to(x, P("x", "y")).max((0, 1)), (x,), (None,))
    case(
        "uneven_argmax",
        "8",
        lambda x, to: jnp.argmax(to(x, P(None, "x")), 1),
        (x,),
        (None,),
    )
    case(
        "uneven_sort",
        "8",
        lambda x, to: jnp.sort(to(x, P(None, "x")), 1),
        (x,),
        (None,),
    )
    case(
        "uneven_conv",
        "8",
        lambda x, w, to: to(
            lax.conv_general_dilated(to(x, P(None, None, "x")), w, (1, 1), "SAME"),
            P(None, None, "x"),
        ),
        (normal(2, 3, 13, 11), normal(4, 3, 3, 3)),
        (None, None),
    )
    case(
        "uneven_pad",
        "8",
        lambda x, to: to(jnp.pad(to(x, P("x")), ((3, 2), (0, 0))), P("x")),
        (x,),
        (None,),
    )
    case(
        "uneven_slice",
        "8",
        lambda x, to: to(to(x, P(None, "x"))[:, 4:25], P(None, "x")),
        (x,),
        (None,),
    )
    case(
        "uneven_concatenate",
        "8",
        lambda x, to: to(jnp.concatenate([to(x, P("x")), to(x[:7], P("x"))], 0), P("x")),
        (x,),
        (None,),
    )
    case(
        "uneven_reverse",
        "8",
        lambda x, to: to(to(x, P("x"))[::-1], P("x")),
        (x,),
        (None,),
    )
    case(
        "uneven_cumsum",
        "8",
        lambda x, to: to(jnp.cumsum(to(x, P("x")), 0), P("x")),
        (x,),
        (None,),
    )
    case(
        "uneven_reshape",
        "8",
        lambda x, to: to(x, P("x")).reshape(5, 60) * 2,
        (x,),
        (None,),
    )
    case(
        "uneven_embedding",
        "8",
        lambda t, i, to: to(t, P("x"))[i],
        (normal(50, 12), ints(0, 50, 6)),
        (None, None),
    )
    case(
        "uneven_scatter",
        "8",
        lambda t, i, u, to: to(t, P("x")).at[i].add(u),
        (normal(50, 12), ints(0, 50, 6), normal(6, 12)),
        (None, None, None),
    )
    case(
        "uneven_attention",
        "2x4",
        lambda x, q, k, v, o, to: attention(to(x, P("x")), q, to(k, P(None, "y")), v, o, 6),
        (normal(3, 7, 12), *(normal(12, 12) for _ in range(4))),
        (None,) * 5,
    )
    case(
        "uneven_grad",
        "8",
        lambda x, a, b, to: jax.grad(lambda w: (mlp(to(x, P("x")), *w) ** 2).mean())((a, b)),
        (x, w1, w2),
        (None,) * 3,
    )
    case(
        "uneven_loop",
        "8",
        lambda x, w, to: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), to(x, P("x"))),
        (x, normal(30, 30, scale=0.1)),
        (None, None),
    )
    case(
        "small_batch",
        "8",
        lambda x, a, to: to(x, P("x")) @ a,
        (normal(3, 16), normal(16, 8)),
        (None, None),
    )


def manual_cases() -> None:
    """shard_map regions, inside programs that are partitioned automatically."""
    x, w = normal(16, 32), normal(32, 64, scale=0.1)

    def region(mesh, fn, ins, outs, axes):
        sizes, names = MESHES[mesh]
        return jax.shard_map(
            fn,
            mesh=mesh_of(mesh),
            in_specs=ins,
            out_specs=outs,
            axis_names=set(axes),
            check_vma=False,
        )

    case(
        "manual_psum",
        "8",
        lambda x, w: jnp.tanh(
            region(
                "8",
                lambda a, b: lax.psum(a @ b, "x"),
                (P(None, "x"), P("x", None)),
                P(),
                ["x"],
            )(x, w)
        ),
        (x, w),
        (P(), P("x", None)),
    )
    case(
        "manual_ring",
        "8",
        lambda x: region(
            "8",
            lambda a: a + lax.ppermute(a, "x", [(i, (i + 1) % 8) for i in range(8)]),
            P("x"),
            P("x"),
            ["x"],
        )(x * 2),
        (x,),
        (P("x"),),
    )
    case(
        "manual_all_gather",
        "8",
        lambda x: region(
            "8",
            lambda a: lax.all_gather(a, "x", tiled=True) * (1.0 + lax.axis_index("x")),
            P("x"),
            P(None, "x"),
            ["x"],
        )(x),
        (x,),
        (P("x"),),
    )
    case(
        "manual_all_to_all",
        "8",
        lambda x: region(
            "8",
            lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True),
            P("x"),
            P(None, "x"),
            ["x"],
        )(x),
        (x,),
        (P("x"),),
    )
    case(
        "manual_reduce_scatter",
        "8",
        lambda x: region(
            "8",
            lambda a: lax.psum_scatter(a, "x", tiled=True),
            P(None, "x"),
            P("x"),
            ["x"],
        )(x),
        (x,),
        (P(None, "x"),),
    )
    case(
        "manual_partly",
        "2x4",
        lambda x, w: (
            nn.relu(
                region(
                    "2x4",
                    lambda a, b: lax.psum(a @ b, "y"),
                    (P(None, "y"), P("y", None)),
                    P(),
                    ["y"],
                )(x, w)
            )
            @ w.T
        ),
        (x, w),
        (P("x"), P("y", None)),
    )


def plain(value) -> np.ndarray:
    value = np.asarray(value)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def record(mesh_name: str, fn, args: tuple, specs: tuple, outs) -> dict:
    """The program in both annotations, XLA's program for one device, and what one device
    computes."""
    mesh = mesh_of(mesh_name)
    wants_to = (
        fn.__code__.co_varnames[: fn.__code__.co_argcount][-1:] == ("to",)
        if hasattr(fn, "__code__")
        else False
    )

    def placed(tree):
        return jax.tree.map(
            lambda s: None if s is None else NamedSharding(mesh, s),
            tree,
            is_leaf=lambda s: s is None or isinstance(s, P),
        )

    def constrain(value, spec):
        if spec is None or not {
            a for entry in spec if entry for a in ([entry] if isinstance(entry, str) else entry)
        } <= set(mesh.axis_names):
            return value
        return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    def fresh():  # traced anew for each partitioner
        return (lambda *a: fn(*a, constrain)) if wants_to else (lambda *a: fn(*a))

    def lowered():
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype), args
        )
        return jax.jit(fresh(), in_shardings=placed(specs), out_shardings=placed(outs)).lower(
            *shapes
        )

    jax.config.update("jax_use_shardy_partitioner", True)
    shardy = lowered()
    kept = sorted(
        shardy._lowering.compile_args.get("kept_var_idx", range(len(jax.tree.leaves(args))))
    )
    leaves = jax.tree.leaves(args)
    single = (lambda *a: fn(*a, lambda v, s: v)) if wants_to else fn
    values = jax.jit(single)(*args)
    found = {
        "stablehlo": shardy.as_text(),
        "xla": shardy.compile().as_text(),
        "inputs": [plain(leaves[i]) for i in kept],
        "outputs": [plain(v) for v in jax.tree.leaves(values)],
    }
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        found["hlo"] = lowered().compiler_ir("hlo").as_hlo_text(True)
    except Exception as error:
        print(f"no HLO form: {type(error).__name__}", file=sys.stderr)
    return found


def random_spec(rng: np.random.Generator, mesh: str, density: float, value):
    """A sharding that divides `value`; None with probability 1 - density."""
    sizes, axes = MESHES[mesh]
    dims = list(np.shape(value))
    entries: list = [()] * len(dims)
    for axis, size in sorted(zip(axes, sizes), key=lambda _: rng.random()):
        d = int(rng.integers(len(dims) + 1)) if dims else 0
        if d < len(dims) and dims[d] % size == 0:
            entries[d] += (axis,)
            dims[d] //= size
    return P(*entries) if rng.random() < density else None


def varied(count: int, seed: int) -> dict[str, tuple]:
    """Programs of CASES with other meshes and random shardings of some arguments."""
    rng = np.random.default_rng(seed)
    found = {}
    names = [n for n in CASES if not n.startswith("manual")]
    for i in range(count):
        name = names[rng.integers(len(names))]
        mesh = list(MESHES)[rng.integers(len(MESHES))]
        _, fn, args, _, _ = CASES[name]
        specs = jax.tree.map(partial(random_spec, rng, mesh, rng.random()), args)
        found[f"{name}_varied_{seed}_{i}"] = (mesh, fn, args, specs, None)
    return found


def main(path: str, *names: str) -> None:
    for family in (
        dense_cases,
        transformer_cases,
        moe_cases,
        convolution_cases,
        index_cases,
        move_cases,
        reduction_cases,
        loop_cases,
        random_cases,
        uneven_cases,
        manual_cases,
    ):
        family()
    if "--varied" in names:
        at = names.index("--varied")
        programs, names = varied(int(names[at + 1]), int(names[at + 2])), names[:at]
    else:
        programs = CASES
    found = {}
    for name, (mesh, fn, args, specs, outs) in programs.items():
        if names and not any(n in name for n in names):
            continue
        try:
            found[name] = record(mesh, fn, args, specs, outs)
        except Exception as error:
            print(
                f"{name}: JAX itself raises {type(error).__name__}:"
                f" {str(error).splitlines()[0][:160]}",
                file=sys.stderr,
            )
    with open(path, "wb") as file:
        pickle.dump(found, file)
    print(f"{len(found)} programs in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
