"""Functions for the JAX corpus, see jax_corpus.py. Needs JAX; runs without this project.

    python test/sweeps/jax_cases.py OUT.pickle [NAME…]
writes {name: {"stablehlo": text, "hlo": text, "optimized": text, "inputs": [array], "outputs":
[array]}}, values from XLA's CPU backend.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax, nn, random

jax.config.update("jax_enable_x64", True)
RNG = np.random.default_rng(0)
CASES: dict[str, tuple] = {}
BF16, F16 = jnp.bfloat16, jnp.float16


def case(name: str, fn, *args) -> None:
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    CASES[name] = (fn, args)


def normal(*dims: int, dtype="float32") -> np.ndarray:
    value = RNG.standard_normal(dims)
    return (
        value + 1j * RNG.standard_normal(dims) if np.dtype(dtype).kind == "c" else value
    ).astype(dtype)


def uniform(*dims: int) -> np.ndarray:
    return RNG.random(dims).astype(np.float32)


def ints(low: int, high: int, *dims: int, dtype="int32") -> np.ndarray:
    return RNG.integers(low, high, dims).astype(dtype)


X = normal(3, 4, 5)
M = normal(6, 6)
SPD = (M @ M.T + 6 * np.eye(6)).astype(np.float32)
KEY = np.array([7, 42], np.uint32)


def elementwise() -> None:
    unary = {
        "abs": jnp.abs,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "tanh": jnp.tanh,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "erf": lax.erf,
        "erfc": lax.erfc,
        "expm1": jnp.expm1,
        "cbrt": lax.cbrt,
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": jnp.round,
        "rint": jnp.rint,
        "trunc": jnp.trunc,
        "sign": jnp.sign,
        "logistic": lax.logistic,
        "asinh": jnp.arcsinh,
        "atan": jnp.arctan,
        "i0e": lax.bessel_i0e,
        "i1e": lax.bessel_i1e,
        "sinc": jnp.sinc,
        "square": jnp.square,
        "nan_to_num": jnp.nan_to_num,
        "isfinite": jnp.isfinite,
        "signbit": jnp.signbit,
        "deg2rad": jnp.deg2rad,
        "relu6": nn.relu6,
        "softplus": nn.softplus,
        "elu": nn.elu,
        "selu": nn.selu,
        "gelu": nn.gelu,
        "gelu_exact": partial(nn.gelu, approximate=False),
        "silu": nn.silu,
        "mish": nn.mish,
        "celu": nn.celu,
        "hard_tanh": nn.hard_tanh,
        "log_sigmoid": nn.log_sigmoid,
        "hard_swish": nn.hard_swish,
        "squareplus": nn.squareplus,
        "log1p_abs": lambda x: jnp.log1p(jnp.abs(x)),
        "normcdf": jsp.stats.norm.cdf,
        "ndtr": jsp.special.ndtr,
        "frexp": jnp.frexp,
        "modf": jnp.modf,
        "heaviside": lambda x: jnp.heaviside(x, 0.5),
    }
    positive = {
        "log": jnp.log,
        "log2": jnp.log2,
        "log10": jnp.log10,
        "sqrt": jnp.sqrt,
        "rsqrt": lax.rsqrt,
        "lgamma": lax.lgamma,
        "digamma": lax.digamma,
        "gammaln": jsp.special.gammaln,
        "entr": jsp.special.entr,
        "acosh": lambda x: jnp.arccosh(1 + x),
    }
    inside = {
        "asin": jnp.arcsin,
        "acos": jnp.arccos,
        "atanh": jnp.arctanh,
        "erf_inv": lax.erf_inv,
        "logit": lambda x: jsp.special.logit(jnp.abs(x)),
    }
    domains = (
        (unary, normal(40) * 3),
        (positive, uniform(40) * 20 + 0.01),
        (inside, uniform(40) * 1.9 - 0.95),
    )
    for table, x in domains:
        for name, fn in table.items():
            case(f"unary_{name}", fn, x)
            if name not in ("frexp", "modf"):
                case(f"unary_{name}_f64", fn, x.astype(np.float64))
                case(f"unary_{name}_bf16", fn, x.astype(BF16))
                case(f"unary_{name}_f16", fn, x.astype(np.float16))
                case(
                    f"grad_{name}",
                    lambda x, fn=fn: jax.grad(lambda v: jnp.sum(fn(v).astype(jnp.float32)))(x),
                    x,
                )
    z = normal(30, dtype="complex64")
    for name in "exp log tanh sin cos sqrt abs angle conj real imag square sinh cosh log1p expm1 reciprocal arcsin arctan".split():
        case(f"complex_{name}", getattr(jnp, name), z)
    case(
        "complex_arithmetic",
        lambda a, b: (a + b, a * b, a / b, a - b, jnp.power(a, b), a == b),
        z,
        normal(30, dtype="complex64"),
    )
    case(
        "complex128",
        lambda a, b: (a * b / (a + 1), jnp.exp(a)),
        z.astype("complex128"),
        normal(30, dtype="complex128"),
    )


def arithmetic() -> None:
    a, b = normal(30), normal(30)
    for name in "add subtract multiply divide maximum minimum arctan2 hypot logaddexp logaddexp2 fmod remainder floor_divide copysign nextafter".split():
        case(f"binary_{name}", getattr(jnp, name), a, b)
    case("binary_power", jnp.power, np.abs(a), b)
    case("binary_ldexp", jnp.ldexp, a, ints(-5, 5, 30))
    case("binary_xlogy", jsp.special.xlogy, a, np.abs(b))
    case(
        "binary_compare",
        lambda a, b: (a < b, a <= b, a == b, a != b, a > b, a >= b, jnp.isclose(a, b)),
        a,
        b,
    )
    for dtype in "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split():
        low = -20 if dtype[0] == "i" else 0
        x, y = ints(low, 21, 30, dtype=dtype), ints(low, 21, 30, dtype=dtype)
        y = np.where(y == 0, 3, y).astype(dtype)
        case(
            f"integer_{dtype}",
            lambda x, y: (
                x + y,
                x - y,
                x * y,
                x // y,
                x % y,
                lax.div(x, y),
                lax.rem(x, y),
                jnp.minimum(x, y),
                x**2,
            ),
            x,
            y,
        )
        case(
            f"bits_{dtype}",
            lambda x, y: (
                x & y,
                x | y,
                x ^ y,
                ~x,
                x << 2,
                x >> 1,
                lax.shift_right_logical(x, lax.full_like(x, 1)),
                lax.population_count(x),
                lax.clz(x),
            ),
            x,
            y,
        )
        case(
            f"reduce_{dtype}",
            lambda x, y: (
                x.sum(),
                x.max(),
                y.min(),
                jnp.prod(y[:4]),
                jnp.argmax(x),
                jnp.bitwise_xor.reduce(x),
            ),
            x,
            y,
        )
        case(
            f"convert_{dtype}",
            lambda x, y: (
                x.astype(jnp.float32),
                x.astype(jnp.int8),
                x.astype(jnp.uint64),
                x.astype(bool),
                x.astype(F16),
            ),
            x,
            y,
        )
    wide = normal(50) * 40
    for dtype in "float64 float16 bfloat16 int8 uint8 int32 int64 uint32 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e5m2fnuz".split():
        x = np.abs(wide) if dtype[0] == "u" else wide
        case(f"convert_to_{dtype}", lambda x, d=dtype: x.astype(d).astype(jnp.float64), x)
    case(
        "convert_int4",
        lambda x: (x.astype("int4") + jnp.ones((), "int4")).astype(jnp.int32),
        ints(-8, 7, 20),
    )
    case(
        "convert_uint4",
        lambda x: (x.astype("uint4") * jnp.full((), 2, "uint4")).astype(jnp.int32),
        ints(0, 7, 20),
    )
    case(
        "float8_arithmetic",
        lambda x, y: (x.astype("float8_e4m3fn") * y.astype("float8_e4m3fn")).astype(jnp.float32),
        a,
        b,
    )
    case(
        "float8_dot",
        lambda x, y: lax.dot(
            x.astype("float8_e4m3fn"),
            y.astype("float8_e5m2"),
            preferred_element_type=jnp.float32,
        ),
        M,
        M,
    )
    case(
        "int4_dot",
        lambda x, y: lax.dot(x.astype("int4"), y.astype("int4"), preferred_element_type=jnp.int32),
        ints(-8, 7, 4, 6),
        ints(-8, 7, 6, 3),
    )
    case(
        "bitcast",
        lambda x: (
            lax.bitcast_convert_type(x, jnp.int32),
            lax.bitcast_convert_type(x, jnp.uint16),
            x.view(jnp.uint8),
        ),
        a,
    )
    case(
        "bitcast_wider",
        lambda x: x.view(jnp.float32),
        ints(0, 255, 4, 8, dtype="uint8"),
    )
    case("clip", lambda x: (jnp.clip(x, -0.5, 0.5), lax.clamp(-1.0, x, 1.0)), a)
    case(
        "reduce_precision",
        lambda x: [lax.reduce_precision(x, e, m) for e, m in ((5, 10), (8, 7), (4, 3))],
        wide,
    )
    case(
        "where",
        lambda p, x, y: (
            jnp.where(p, x, y),
            jnp.select([x > 1, x > 0], [x, y], 7.0),
            jnp.piecewise(x, [x < 0], [jnp.abs, jnp.sqrt]),
        ),
        a > 0,
        a,
        b,
    )
    case("integer_pow", lambda x: [x**k for k in (2, 3, 5, -1, -2)], a)
    case(
        "gcd_lcm",
        lambda x, y: (jnp.gcd(x, y), jnp.lcm(x, y)),
        ints(1, 50, 20),
        ints(1, 50, 20),
    )
    case(
        "polynomial",
        lambda c, x: (jnp.polyval(c, x), jnp.polyder(c), jnp.polymul(c, c)),
        normal(4),
        a,
    )
    case(
        "packbits",
        lambda x: (jnp.packbits(x), jnp.unpackbits(jnp.packbits(x))),
        ints(0, 2, 24, dtype="uint8"),
    )
    case("scalar_types", lambda x: (x * 2, x + jnp.int8(3), x * np.float64(0.5)), a)


def moves() -> None:
    shaping = {
        "broadcast": lambda x: jnp.broadcast_to(x, (2, 3, 4, 5)),
        "reshape": lambda x: x.reshape(5, 12),
        "transpose": lambda x: x.transpose(2, 0, 1),
        "reverse": lambda x: x[::-1, :, ::-1],
        "slice": lambda x: x[1:, ::2, -3:],
        "newaxis": lambda x: x[:, None, ..., None],
        "pad": lambda x: lax.pad(x, np.float32(7), ((1, 2, 0), (-1, 0, 1), (0, -2, 2))),
        "pad_reflect": lambda x: jnp.pad(x, 1, "reflect"),
        "pad_edge": lambda x: jnp.pad(x, ((0, 0), (2, 1), (1, 2)), "edge"),
        "pad_wrap": lambda x: jnp.pad(x, 2, "wrap"),
        "roll": lambda x: jnp.roll(x, 2, 1),
        "tile": lambda x: jnp.tile(x, (1, 2, 3)),
        "repeat": lambda x: jnp.repeat(x, 3, 1),
        "stack": lambda x: jnp.stack([x, x + 1], 1),
        "split": lambda x: jnp.split(x, 2, 1),
        "concatenate": lambda x: jnp.concatenate([x, x[:1]], 0),
        "flip": jnp.flip,
        "rot90": jnp.rot90,
        "moveaxis": lambda x: jnp.moveaxis(x, 0, -1),
        "tril": lambda x: jnp.tril(x, 1),
        "triu": jnp.triu,
        "diagonal": lambda x: jnp.diagonal(x, 0, 1, 2),
        "diag": lambda x: jnp.diag(x[0, 0]),
        "trace": lambda x: jnp.trace(x, 0, 1, 2),
        "squeeze": lambda x: x[:1].squeeze(0),
        "ravel": jnp.ravel,
        "meshgrid": lambda x: jnp.meshgrid(x[0, 0], x[0, :, 0]),
        "outer": lambda x: jnp.outer(x[0, 0], x[1, :, 1]),
        "kron": lambda x: jnp.kron(x[0], x[1, :2, :2]),
        "cross": lambda x: jnp.cross(x[:, 0, :3], x[:, 1, :3]),
        "diff": lambda x: jnp.diff(x, axis=1),
        "gradient": lambda x: jnp.gradient(x[0], axis=0),
        "empty": lambda x: x[:0] + 1,
        "vander": lambda x: jnp.vander(x[0, 0], 3),
        "toeplitz": lambda x: jsp.linalg.toeplitz(x[0, 0]),
        "block_diag": lambda x: jsp.linalg.block_diag(x[0], x[1]),
        "array_split": lambda x: jnp.array_split(x, 3, 2),
        "insert": lambda x: jnp.insert(x, 1, 9.0, 1),
        "delete": lambda x: jnp.delete(x, 1, 2),
        "interp": lambda x: jnp.interp(x[0, 0], jnp.arange(4.0), x[0, :, 0]),
        "unfold": lambda x: lax.conv_general_dilated_patches(x[:, None], (2, 2), (1, 1), "VALID"),
    }
    for name, fn in shaping.items():
        case(f"shape_{name}", fn, X)
        if name not in (
            "empty",
            "interp",
            "meshgrid",
            "split",
            "gradient",
            "array_split",
        ):
            case(
                f"shape_{name}_grad",
                lambda x, fn=fn: jax.grad(lambda v: jnp.sum(jnp.sin(fn(v)) ** 2))(x),
                X,
            )
    case(
        "iota",
        lambda: (
            jnp.arange(7),
            jnp.linspace(0, 1, 5),
            jnp.eye(3),
            lax.broadcasted_iota(jnp.int32, (3, 4), 1),
            jnp.logspace(0, 2, 4),
        ),
    )
    case(
        "bool_logic",
        lambda p, q: (
            p & q,
            p | q,
            p ^ q,
            ~p,
            p < q,
            p.sum(),
            jnp.all(p),
            jnp.any(q),
            jnp.where(p, 1, 2),
        ),
        uniform(9) > 0.5,
        uniform(9) > 0.5,
    )
    index = ints(-6, 6, 7)
    indexing = {
        "take": lambda x, i: jnp.take(x, i, axis=1),
        "take_clip": lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
        "take_wrap": lambda x, i: jnp.take(x, i, axis=2, mode="wrap"),
        "take_fill": lambda x, i: jnp.take(x, i, axis=0, mode="fill", fill_value=-1),
        "index": lambda x, i: x[i],
        "index_middle": lambda x, i: x[:, i % 4],
        "index_pair": lambda x, i: x[i % 3, :, i % 5],
        "index_scalar": lambda x, i: x[i[0]],
        "index_none": lambda x, i: x[i % 3, None, 1:3],
        "index_mask": lambda x, i: jnp.where(x > 0, x, 0).at[i % 3].get(),
        "set": lambda x, i: x.at[i].set(5.0),
        "set_slice": lambda x, i: x.at[:, 1:3].set(0),
        "add_at": lambda x, i: x.at[i % 3].add(1.5),
        "mul_at": lambda x, i: x.at[i % 3, 1].mul(2.0),
        "max_at": lambda x, i: x.at[:, i % 4].max(0.3),
        "min_at": lambda x, i: x.at[..., i % 5].min(0.3),
        "drop": lambda x, i: x.at[i].add(1.0, mode="drop"),
        "clip_at": lambda x, i: x.at[i].add(1.0, mode="clip"),
        "apply": lambda x, i: x.at[1].apply(jnp.sin),
        "dynamic_slice": lambda x, i: lax.dynamic_slice(x, (i[0], i[1], i[2]), (2, 2, 3)),
        "dynamic_update": lambda x, i: lax.dynamic_update_slice(
            x, x[:1, :2, :2] * 2, (i[0], i[1], i[2])
        ),
        "dynamic_index": lambda x, i: lax.dynamic_index_in_dim(x, i[3], 1),
        "one_hot": lambda x, i: nn.one_hot(i, 6),
        "take_along": lambda x, i: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
        "put_along": lambda x, i: jnp.put_along_axis(
            x, i[None, :5, None] % 4, 9.0, 1, inplace=False
        ),
        "segment_sum": lambda x, i: jax.ops.segment_sum(x.reshape(-1)[:7], i % 4, 4),
        "segment_max": lambda x, i: jax.ops.segment_max(x.reshape(-1)[:7], i % 4, 4),
        "bincount": lambda x, i: jnp.bincount(i % 6, length=6),
        "histogram": lambda x, i: jnp.histogram(x, 5)[0],
        "digitize": lambda x, i: jnp.digitize(x, jnp.linspace(-1, 1, 4)),
        "unravel": lambda x, i: jnp.unravel_index(i % 3, (2, 2)),
        "vmap_slice": lambda x, i: jax.vmap(lambda a, j: lax.dynamic_slice(a, (j, 0), (2, 5)))(
            x, i[:3]
        ),
        "vmap_index": lambda x, i: jax.vmap(lambda a, j: a[j % 4])(x, i[:6].reshape(3, 2)),
        "vmap_scatter": lambda x, i: jax.vmap(lambda a, j: a.at[j % 4].add(1.0))(
            x, i[:6].reshape(3, 2)
        ),
        "vmap_update": lambda x, i: jax.vmap(
            lambda a, j: lax.dynamic_update_slice(a, a[:1] * 3, (j, 0))
        )(x, i[:3]),
        "nonzero": lambda x, i: jnp.nonzero(x[0, 0] > 0, size=5, fill_value=-1),
        "unique": lambda x, i: jnp.unique(i, size=7),
        "isin": lambda x, i: jnp.isin(i, jnp.array([1, 3, -2])),
        "choose": lambda x, i: jnp.choose(i[:5] % 3, x[:, 0]),
    }
    for name, fn in indexing.items():
        case(f"index_{name}", fn, X, index)
    for name in "take index index_pair set add_at mul_at dynamic_slice dynamic_update take_along vmap_index vmap_scatter segment_sum".split():
        case(
            f"index_{name}_grad",
            lambda x, i, fn=indexing[name]: jax.grad(lambda v: jnp.sum(jnp.sin(fn(v, i))))(x),
            X,
            index,
        )


def reductions() -> None:
    for name in "sum prod max min mean var std argmax argmin median nanmax nansum ptp cumsum cumprod nanmean".split():
        fn = getattr(jnp, name)
        case(f"reduce_{name}", lambda x, fn=fn: (fn(x, axis=1), fn(x, axis=0)), X)
        if not name.startswith("arg"):
            case(
                f"reduce_{name}_grad",
                lambda x, fn=fn: jax.grad(lambda v: jnp.sum(fn(v, axis=1) ** 2))(x),
                X,
            )
    for dtype in ("bfloat16", "float16", "float64"):
        case(
            f"reduce_{dtype}",
            lambda x: (x.sum(1), x.max(0), x.mean(), jnp.argmax(x, 2)),
            X.astype(dtype),
        )
    case(
        "reduce_logsumexp",
        lambda x: (
            jsp.special.logsumexp(x, 1),
            nn.softmax(x),
            nn.log_softmax(x, 0),
            nn.standardize(x),
        ),
        X,
    )
    case(
        "reduce_norms",
        lambda x: (
            jnp.linalg.norm(x),
            jnp.linalg.norm(x, axis=1),
            jnp.linalg.norm(x, ord=1, axis=2),
            jnp.linalg.norm(x[0], ord=jnp.inf),
        ),
        X,
    )
    case(
        "reduce_bool",
        lambda x: (jnp.all(x > -1, 0), jnp.any(x > 1, 1), jnp.count_nonzero(x > 0)),
        X,
    )
    case(
        "reduce_quantile",
        lambda x: (jnp.quantile(x, 0.3, axis=1), jnp.percentile(x, 75.0)),
        X,
    )
    case(
        "reduce_cov",
        lambda x: (
            jnp.cov(x[0]),
            jnp.corrcoef(x[0]),
            jnp.average(x, 1, jnp.arange(4.0)),
        ),
        X,
    )
    case(
        "reduce_variadic",
        lambda a, b: lax.reduce(
            (a, b),
            (np.float32(0), np.int32(0)),
            lambda p, q: (p[0] + q[0], jnp.maximum(p[1], q[1])),
            (0,),
        ),
        normal(4, 3),
        ints(-3, 9, 4, 3),
    )
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        case(
            f"lax_{name}",
            lambda x, n=name: (
                getattr(lax, n)(x, axis=1),
                getattr(lax, n)(x, axis=2, reverse=True),
            ),
            X,
        )
    case("associative_scan", lambda x: lax.associative_scan(jnp.maximum, x, axis=1), X)
    pools = {
        "max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3), (1, 2, 1), "SAME"),
        "min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 3, 2), (1, 1, 2), "VALID"),
        "sum": lambda x: lax.reduce_window(
            x,
            0.0,
            lax.add,
            (1, 2, 3),
            (1, 2, 1),
            ((0, 0), (1, 0), (2, 1)),
            base_dilation=(1, 2, 1),
            window_dilation=(1, 1, 2),
        ),
    }
    for name, fn in pools.items():
        case(f"pool_{name}", fn, X)
    case("pool_max_grad", jax.grad(lambda x: jnp.sum(pools["max"](x) ** 2)), X)
    case(
        "pool_sum_grad",
        jax.grad(
            lambda x: jnp.sum(lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 2, 1), "SAME") ** 2)
        ),
        X,
    )
    case(
        "pool_general",
        lambda x: lax.reduce_window(
            x, 0.0, lambda a, b: a * 0.5 + b, (1, 2, 2), (1, 1, 1), "VALID"
        ),
        X,
    )
    sorts = {
        "sort": lambda x: (jnp.sort(x, 1), jnp.sort(x, 0, descending=True)),
        "argsort": lambda x: jnp.argsort(x, 2),
        "top_k": lambda x: lax.top_k(x, 3),
        "lexsort": lambda x: jnp.lexsort((x[0, 0], jnp.round(x[0, 1]))),
        "sort_pairs": lambda x: lax.sort((jnp.round(x), x, -x), num_keys=2, dimension=1),
        "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x[0, 0]), x[1]),
        "approx_max": lambda x: lax.approx_max_k(x, 2),
        "approx_min": lambda x: lax.approx_min_k(x, 2),
        "partition": lambda x: jnp.partition(x, 2, axis=1)[:, 2],
        "sort_nan": lambda x: jnp.sort(jnp.where(x > 1, jnp.nan, x)),
        "argpartition": lambda x: jnp.take_along_axis(x, jnp.argpartition(x, 2), -1)[..., 2],
    }
    for name, fn in sorts.items():
        case(f"sort_{name}", fn, X)
    case(
        "sort_grad",
        jax.grad(lambda x: jnp.sum(jnp.sort(x, 1) ** 2 * jnp.arange(4.0)[:, None])),
        X,
    )
    case("sort_bf16", lambda x: jnp.sort(x, 1), X.astype(BF16))


def contractions() -> None:
    a, b = normal(5, 7), normal(7, 6)
    for dtype in (
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "complex64",
        "complex128",
    ):
        case(f"dot_{dtype}", jnp.matmul, a.astype(dtype), b.astype(dtype))
    case(
        "dot_int8",
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
        ints(-128, 127, 4, 9, dtype="int8"),
        ints(-128, 127, 9, 3, dtype="int8"),
    )
    case(
        "dot_bf16_f32",
        lambda x, y: lax.dot(x.astype(BF16), y.astype(BF16), preferred_element_type=jnp.float32),
        a,
        b,
    )
    case(
        "dot_general",
        lambda x, y: lax.dot_general(x, y, (((0, 2), (2, 1)), ((1,), (0,)))),
        normal(3, 2, 4),
        normal(2, 4, 3),
    )
    case(
        "dot_vector",
        lambda x, y: (
            x[0] @ y,
            x @ y[:, 0],
            x[0] @ y[:, 0],
            jnp.vdot(x[0], y[:, 0]),
            jnp.inner(x, y.T),
        ),
        a,
        b,
    )
    case("dot_batched", jnp.matmul, normal(2, 1, 3, 4), normal(5, 4, 2))
    case(
        "dot_precision",
        lambda x, y: jnp.dot(x, y, precision=lax.Precision.HIGHEST),
        a,
        b,
    )
    case(
        "tensordot",
        lambda x, y: jnp.tensordot(x, y, ((0, 2), (1, 0))),
        normal(3, 2, 4),
        normal(4, 3, 5),
    )
    case(
        "ragged_dot",
        lambda x, y, g: lax.ragged_dot(x, y, g),
        normal(8, 4),
        normal(3, 4, 5),
        np.array([2, 0, 5], np.int32),
    )
    for i, spec in enumerate(
        (
            "ij,kj->ik",
            "bij,bkj->bik",
            "ijk,k->ij",
            "ii->i",
            "ij,ji->",
            "bhqd,bhkd->bhqk",
            "abc,cd,de->abe",
            "i,j->ij",
        )
    ):
        sizes = dict(zip("abcdehijkqd", (2, 3, 4, 5, 3, 2, 4, 4, 3, 6, 5)))
        case(
            f"einsum_{i}",
            partial(jnp.einsum, spec),
            *(normal(*(sizes[c] for c in term)) for term in spec.split("->")[0].split(",")),
        )
    case("dot_grad", jax.grad(lambda x, y: jnp.sum(jnp.tanh(x @ y) ** 2), (0, 1)), a, b)
    convolutions = {
        "same": (
            dict(window_strides=(1, 1), padding="SAME"),
            (2, 3, 7, 6),
            (4, 3, 3, 3),
        ),
        "dilated": (
            dict(
                window_strides=(2, 1),
                padding=((1, 2), (-1, 3)),
                lhs_dilation=(2, 1),
                rhs_dilation=(1, 2),
            ),
            (2, 3, 7, 6),
            (4, 3, 3, 2),
        ),
        "nhwc": (
            dict(
                window_strides=(2, 2),
                padding="VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            ),
            (2, 7, 6, 3),
            (3, 3, 3, 4),
        ),
        "odd_layout": (
            dict(
                window_strides=(1, 2),
                padding="SAME",
                dimension_numbers=("HNCW", "OWIH", "WCHN"),
            ),
            (7, 2, 3, 6),
            (4, 3, 3, 2),
        ),
        "grouped": (
            dict(window_strides=(1, 1), padding="SAME", feature_group_count=2),
            (2, 4, 5, 5),
            (6, 2, 3, 3),
        ),
        "depthwise": (
            dict(window_strides=(1, 1), padding="SAME", feature_group_count=4),
            (2, 4, 5, 5),
            (8, 1, 3, 3),
        ),
        "batch_grouped": (
            dict(window_strides=(1, 1), padding="SAME", batch_group_count=2),
            (4, 3, 5, 5),
            (6, 3, 3, 3),
        ),
        "1d": (dict(window_strides=(2,), padding=((1, 1),)), (2, 3, 9), (4, 3, 3)),
        "3d": (
            dict(window_strides=(1, 1, 1), padding="VALID"),
            (1, 2, 4, 4, 4),
            (3, 2, 2, 2, 2),
        ),
        "strided": (
            dict(window_strides=(2, 2), padding="SAME"),
            (2, 3, 8, 9),
            (5, 3, 3, 3),
        ),
        "one_by_one": (
            dict(window_strides=(1, 1), padding="VALID"),
            (2, 8, 5, 5),
            (6, 8, 1, 1),
        ),
    }
    for name, (options, x, w) in convolutions.items():
        conv = partial(lambda o, x, w: lax.conv_general_dilated(x, w, **o), options)
        case(f"conv_{name}", conv, normal(*x), normal(*w))
        if name in (
            "batch_grouped",
            "same",
            "nhwc",
            "grouped",
            "depthwise",
            "1d",
            "strided",
            "dilated",
        ):
            case(
                f"conv_{name}_grad",
                jax.grad(lambda x, w, conv=conv: jnp.sum(conv(x, w) ** 2), (0, 1)),
                normal(*x),
                normal(*w),
            )
    case(
        "conv_bf16",
        lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
        normal(2, 3, 7, 6).astype(BF16),
        normal(4, 3, 3, 3).astype(BF16),
    )
    case(
        "conv_f64",
        lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
        normal(2, 3, 7, 6, dtype="float64"),
        normal(4, 3, 3, 3, dtype="float64"),
    )
    case(
        "conv_transpose",
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        normal(1, 4, 4, 3),
        normal(3, 3, 2, 3),
    )
    case(
        "convolve",
        lambda x, y: (
            jnp.convolve(x, y),
            jnp.correlate(x, y, "same"),
            jsp.signal.convolve2d(x.reshape(5, 4), y.reshape(2, 2), "valid"),
        ),
        normal(20),
        normal(4),
    )
    case(
        "image_resize",
        lambda x: (
            jax.image.resize(x, (3, 8, 7), "bilinear"),
            jax.image.resize(x, (3, 2, 3), "nearest"),
            jax.image.resize(x, (3, 6, 6), "cubic"),
        ),
        X,
    )


def linalg() -> None:
    b, z = normal(6, 3), normal(5, 5, dtype="complex64")
    # vectors are determined up to a factor
    signless = lambda fn: lambda *args: jax.tree.map(jnp.abs, fn(*args))
    cases = {
        "cholesky": jnp.linalg.cholesky,
        "inv": jnp.linalg.inv,
        "det": jnp.linalg.det,
        "slogdet": jnp.linalg.slogdet,
        "solve": lambda a: jnp.linalg.solve(a, b),
        "qr": jnp.linalg.qr,
        "qr_complete": lambda a: jnp.linalg.qr(a[:, :3], mode="complete"),
        "eigh": signless(jnp.linalg.eigh),
        "eigvalsh": jnp.linalg.eigvalsh,
        "svd": signless(jnp.linalg.svd),
        "svd_thin": signless(lambda a: jnp.linalg.svd(a[:, :2], full_matrices=False)),
        "svdvals": lambda a: jnp.linalg.svd(a, compute_uv=False),
        "lu": lambda a: jsp.linalg.lu(a),
        "lu_solve": lambda a: jsp.linalg.lu_solve(jsp.linalg.lu_factor(a), b),
        "cho_solve": lambda a: jsp.linalg.cho_solve(jsp.linalg.cho_factor(a), b),
        "expm": lambda a: jsp.linalg.expm(a / 10),
        "pinv": jnp.linalg.pinv,
        "matrix_rank": jnp.linalg.matrix_rank,
        "matrix_power": lambda a: jnp.linalg.matrix_power(a, 3),
        "lstsq": lambda a: jnp.linalg.lstsq(a[:, :4], b)[0],
        "cond": jnp.linalg.cond,
        "solve_triangular": lambda a: jsp.linalg.solve_triangular(a, b, lower=True, trans=1),
        "cholesky_grad": jax.grad(lambda a: jnp.sum(jnp.linalg.cholesky(a) ** 3)),
        "inv_grad": jax.grad(lambda a: jnp.sum(jnp.linalg.inv(a) ** 2)),
        "hessenberg": jsp.linalg.hessenberg,
        "det_grad": jax.grad(jnp.linalg.det),
        "tridiagonal": lambda a: lax.linalg.tridiagonal(a)[1:3],
        "batched": lambda a: jnp.linalg.cholesky(jnp.stack([a, 2 * a])),
        "batched_solve": lambda a: jnp.linalg.solve(jnp.stack([a, a + 1]), jnp.stack([b, b])),
        "qr_grad": jax.grad(lambda a: jnp.sum(jnp.linalg.qr(a)[1] ** 2)),
        "sqrtm": jsp.linalg.sqrtm,
        "eigh_grad": jax.grad(lambda a: jnp.sum(jnp.linalg.eigh(a)[0] ** 2)),
        "multi_dot": lambda a: jnp.linalg.multi_dot([a, b, b.T]),
        "schur_values": lambda a: jnp.sort(jnp.diag(jsp.linalg.schur(a)[0])),
        "tridiagonal_solve": lambda a: lax.linalg.tridiagonal_solve(
            a[0].at[0].set(0), a[1] + 20, a[2].at[-1].set(0), b
        ),
    }
    for name, fn in cases.items():
        case(f"linalg_{name}", fn, SPD)
    case("linalg_eig", lambda a: jnp.sort_complex(jnp.linalg.eigvals(a)), M)
    case(
        "linalg_f64",
        lambda a: (jnp.linalg.inv(a), jnp.linalg.eigvalsh(a), jnp.linalg.qr(a)[1]),
        SPD.astype(np.float64),
    )
    case(
        "linalg_complex",
        lambda a: (
            jnp.linalg.inv(a),
            jnp.linalg.det(a),
            jnp.linalg.qr(a),
            jnp.linalg.eigvalsh(a @ a.conj().T),
            jnp.linalg.cholesky(a @ a.conj().T),
        ),
        z,
    )
    for left in (False, True):
        for lower in (False, True):
            for transpose in (False, True):
                fn = partial(
                    lax.linalg.triangular_solve,
                    left_side=left,
                    lower=lower,
                    transpose_a=transpose,
                    unit_diagonal=lower != transpose,
                )
                case(f"triangular_{left:d}{lower:d}{transpose:d}", fn, SPD, normal(6, 6))
    c, r = normal(3, 8, dtype="complex64"), normal(3, 8)
    for name, value in (
        ("fft", c),
        ("ifft", c),
        ("rfft", r),
        ("fft2", c),
        ("ifft2", c),
        ("rfft2", r),
        ("fftshift", r),
        ("fft_f64", c.astype("complex128")),
    ):
        case(f"fft_{name}", getattr(jnp.fft, name.removesuffix("_f64")), value)
    case("fft_irfft", lambda v: (jnp.fft.irfft(v, 14), jnp.fft.irfft(v, 13)), c)
    case("fft_grad", jax.grad(lambda v: jnp.sum(jnp.abs(jnp.fft.rfft(v)) ** 2)), r)
    case("fft_odd", lambda v: (jnp.fft.fft(v, 7), jnp.fft.fft(v, axis=0)), c)


def control() -> None:
    x = normal(4)
    loops = {
        "while": lambda x: lax.while_loop(
            lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 1.5), (0, x)
        ),
        "fori": lambda x: lax.fori_loop(0, 4, lambda i, a: a + i, x),
        "while_value": lambda x: lax.while_loop(
            lambda v: jnp.max(v) < 100, lambda v: v * v + 1, jnp.abs(x)
        ),
        "scan": lambda x: lax.scan(lambda c, a: (c + a, c * a), 0.0, x),
        "scan_reverse": lambda x: lax.scan(
            lambda c, a: (c * 0.9 + a, jnp.sin(c)), 1.0, x, reverse=True
        ),
        "scan_no_input": lambda x: lax.scan(lambda c, _: (c * 1.1, c[0]), x, None, length=3),
        "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, lambda y: y * 2, x),
        "cond_nested": lambda x: lax.cond(
            x[0] > 0,
            lambda y: lax.cond(y[1] > 0, jnp.cos, jnp.tan, y),
            lambda y: y * 2,
            x,
        ),
        "switch": lambda x: [
            lax.switch(i, [jnp.sin, jnp.cos, lambda y: y - 1], x) for i in (-3, 1, 7)
        ],
        "switch_data": lambda x: lax.switch(
            jnp.argmax(x), [jnp.sin, jnp.cos, jnp.tanh, jnp.exp], x
        ),
        "map": lambda x: lax.map(lambda a: a * jnp.arange(3), x),
        "nested_loops": lambda x: lax.fori_loop(
            0, 3, lambda i, a: lax.fori_loop(0, i, lambda j, b: b + j * a, a), x
        ),
        "scan_grad": jax.grad(
            lambda x: lax.scan(lambda c, a: (jnp.tanh(c + a), c * a), 0.5, x)[1].sum()
        ),
        "fori_grad": jax.grad(
            lambda x: lax.fori_loop(0, 4, lambda i, a: jnp.sin(a) * 1.5, x).sum()
        ),
        "cond_grad": jax.grad(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x).sum()),
        "checkpoint": jax.grad(lambda x: jax.checkpoint(lambda v: jnp.sin(jnp.sin(v)))(x).sum()),
        "jit_nested": lambda x: jax.jit(jnp.sin)(x) + jax.jit(lambda y: y * 2)(x),
        "barrier": lambda x: lax.optimization_barrier((x, x + 1)),
        "hessian": jax.hessian(lambda x: jnp.sum(jnp.sin(x) * x**2)),
        "jacobian": jax.jacrev(lambda x: jnp.outer(x, jnp.tanh(x)).ravel()),
        "jvp": lambda x: jax.jvp(jnp.tanh, (x,), (x,)),
        "custom_jvp": jax.grad(lambda x: nn.relu(x).sum()),
        "fibonacci": lambda x: lax.fori_loop(0, 20, lambda i, s: (s[1], s[0] + s[1]), (0, 1)),
        "newton": lambda x: lax.fori_loop(
            0, 8, lambda i, r: 0.5 * (r + jnp.abs(x) / r), jnp.ones(4)
        ),
        "while_update": lambda x: lax.fori_loop(0, 4, lambda i, a: a.at[i].set(a[i - 1] + i), x),
        "scan_stack": lambda x: lax.scan(lambda c, i: (c.at[i].add(1.0), c), x, jnp.arange(4)),
        "bisect": lambda x: lax.fori_loop(
            0,
            30,
            lambda i, s: jnp.where(
                (s.mean(0) ** 2 > jnp.abs(x)),
                jnp.stack([s[0], s.mean(0)]),
                jnp.stack([s.mean(0), s[1]]),
            ),
            jnp.stack([jnp.zeros(4), jnp.full(4, 5.0)]),
        ),
        "sort_loop": lambda x: lax.fori_loop(0, 3, lambda i, v: jnp.sort(jnp.sin(v * 3)), x),
        "ode": lambda x: jax.experimental.ode.odeint(lambda y, t: -y, x, jnp.linspace(0, 1, 3)),
        "polyroots": lambda x: jnp.sort(jnp.abs(jnp.roots(x, strip_zeros=False))),
    }
    for name, fn in loops.items():
        case(f"control_{name}", fn, x)


def randomness() -> None:
    draws = {
        "uniform": lambda k: random.uniform(k, (7,)),
        "normal": lambda k: random.normal(k, (3, 5)),
        "randint": lambda k: random.randint(k, (9,), -4, 9),
        "permutation": lambda k: random.permutation(k, 8),
        "bernoulli": lambda k: random.bernoulli(k, 0.3, (9,)),
        "categorical": lambda k: random.categorical(k, jnp.arange(5.0), shape=(6,)),
        "gumbel": lambda k: random.gumbel(k, (4,)),
        "exponential": lambda k: random.exponential(k, (4,)),
        "gamma": lambda k: random.gamma(k, 2.5, (4,)),
        "beta": lambda k: random.beta(k, 2.0, 3.0, (4,)),
        "poisson": lambda k: random.poisson(k, 3.0, (5,)),
        "laplace": lambda k: random.laplace(k, (4,)),
        "cauchy": lambda k: random.cauchy(k, (4,)),
        "dirichlet": lambda k: random.dirichlet(k, jnp.ones(3)),
        "truncated": lambda k: random.truncated_normal(k, -1, 1, (4,)),
        "bits": lambda k: [
            random.bits(k, (5,), d) for d in ("uint8", "uint16", "uint32", "uint64")
        ],
        "split": lambda k: random.split(k, 3),
        "fold_in": lambda k: random.fold_in(k, 5),
        "choice": lambda k: random.choice(k, 10, (4,), replace=False),
        "uniform_f64": lambda k: random.uniform(k, (5,), jnp.float64),
        "normal_bf16": lambda k: random.normal(k, (6,), BF16),
        "normal_f16": lambda k: random.normal(k, (6,), F16),
        "rademacher": lambda k: random.rademacher(k, (5,)),
        "ball": lambda k: random.ball(k, 3),
        "orthogonal": lambda k: jnp.abs(random.orthogonal(k, 3)),
        "multivariate": lambda k: random.multivariate_normal(k, jnp.zeros(2), jnp.eye(2), (3,)),
        "t": lambda k: random.t(k, 5.0, (3,)),
        "randint_u8": lambda k: random.randint(k, (9,), 0, 200, jnp.uint8),
        "philox": lambda k: lax.rng_bit_generator(
            jnp.concatenate([k, k]), (7,), jnp.uint32, lax.RandomAlgorithm.RNG_PHILOX
        ),
        "threefry": lambda k: lax.rng_bit_generator(
            jnp.concatenate([k, k]), (7,), jnp.uint32, lax.RandomAlgorithm.RNG_THREE_FRY
        ),
        "rbg": lambda k: random.normal(
            random.wrap_key_data(jnp.concatenate([k, k]), impl="rbg"), (5,)
        ),
        "large": lambda k: random.uniform(k, (1000, 7)).sum(0),
        "complex": lambda k: random.normal(k, (3,), jnp.complex64),
        "dropout": lambda k: jnp.where(random.bernoulli(k, 0.5, (6,)), jnp.arange(6.0) * 2, 0),
    }
    for name, fn in draws.items():
        case(f"random_{name}", fn, KEY)


def special() -> None:
    a, x = uniform(20) * 5 + 0.2, uniform(20) * 6 + 0.1
    case("special_igamma", lambda a, x: (lax.igamma(a, x), lax.igammac(a, x)), a, x)
    case(
        "special_betainc",
        lambda a, x: lax.regularized_incomplete_beta(a, a + 1, x / 7),
        a,
        x,
    )
    case("special_zeta", lambda a, x: lax.zeta(a + 1.1, x), a, x)
    case(
        "special_polygamma",
        lambda a, x: [jsp.special.polygamma(n, x) for n in (1, 2)],
        a,
        x,
    )
    case("special_ndtri", lambda a, x: jsp.special.ndtri(x / 7), a, x)
    case("special_log_ndtr", lambda a, x: jsp.special.log_ndtr(x - 3), a, x)
    case("special_i0", lambda a, x: (jsp.special.i0(x), jsp.special.i1(x)), a, x)
    case(
        "special_factorial",
        lambda a, x: (
            jsp.special.factorial(x),
            jsp.special.beta(a, x),
            jsp.special.expit(x),
        ),
        a,
        x,
    )
    case("special_expn", lambda a, x: jsp.special.exp1(x), a, x)
    case("special_spence", lambda a, x: jsp.special.spence(x), a, x)
    case(
        "special_stats",
        lambda a, x: (
            jsp.stats.norm.logpdf(x),
            jsp.stats.gamma.logpdf(x, a),
            jsp.stats.t.logpdf(x, 4.0),
            jsp.stats.poisson.logpmf(jnp.round(x), a),
        ),
        a,
        x,
    )
    case(
        "special_kl",
        lambda a, x: (jsp.special.kl_div(a, x), jsp.special.rel_entr(a, x)),
        a,
        x,
    )


def models() -> None:
    def mlp(w, x):
        for m in w[:-1]:
            x = jnp.tanh(x @ m)
        return x @ w[-1]

    w, x, y = (
        [normal(6, 8) * 0.4, normal(8, 8) * 0.4, normal(8, 3) * 0.4],
        normal(10, 6),
        ints(0, 3, 10),
    )

    def loss(w, x, y):
        return -jnp.mean(jnp.sum(nn.one_hot(y, 3) * nn.log_softmax(mlp(w, x)), -1))

    def sgd(w, x, y):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, y))

    case("model_mlp", mlp, w, x)
    case("model_mlp_loss", jax.value_and_grad(loss), w, x, y)
    case("model_mlp_sgd", sgd, w, x, y)
    case(
        "model_mlp_trained",
        lambda w, x, y: lax.fori_loop(0, 30, lambda i, w: sgd(w, x, y), w),
        w,
        x,
        y,
    )
    case(
        "model_mlp_bf16",
        lambda w, x: mlp(jax.tree.map(lambda m: m.astype(BF16), w), x.astype(BF16)),
        w,
        x,
    )

    def adam(state, x, y):
        w, m, v, t = state
        g = jax.grad(loss)(w, x, y)
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        v = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b * b, v, g)
        w = jax.tree.map(
            lambda p, a, b: p - 0.01 * (a / (1 - 0.9**t)) / (jnp.sqrt(b / (1 - 0.99**t)) + 1e-8),
            w,
            m,
            v,
        )
        return w, m, v, t + 1

    zeros = [np.zeros_like(m) for m in w]
    case("model_adam", adam, (w, zeros, zeros, np.float32(1)), x, y)
    case(
        "model_adam_scan",
        lambda s, x, y: lax.scan(
            lambda s, _: (adam(s, x, y), loss(s[0], x, y)), s, None, length=10
        )[1],
        (w, zeros, zeros, np.float32(1)),
        x,
        y,
    )

    def attention(p, x, causal=True):
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, m) for m in p[:3])
        s = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)
        return jnp.einsum("bhqk,bkhe,hed->bqd", nn.softmax(s), v, p[3])

    def layer_norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    p = [normal(8, 2, 4) * 0.3 for _ in range(3)] + [normal(2, 4, 8) * 0.3]
    seq, mix = normal(2, 5, 8), [normal(8, 16) * 0.3, normal(16, 8) * 0.3]

    def block(p, mix, x):
        x = x + attention(p, layer_norm(x))
        return x + nn.gelu(layer_norm(x) @ mix[0]) @ mix[1]

    case("model_attention", attention, p, seq)
    case("model_block", block, p, mix, seq)
    case(
        "model_block_grad",
        jax.grad(lambda p, m, x: jnp.sum(block(p, m, x) ** 2), (0, 1)),
        p,
        mix,
        seq,
    )
    case(
        "model_dot_product_attention",
        lambda q: nn.dot_product_attention(q, q, q, is_causal=True),
        normal(2, 5, 2, 4),
    )
    table = normal(11, 8)

    def lm(t, p, m, tokens):
        x = block(p, m, t[tokens])
        return -jnp.mean(
            jnp.take_along_axis(nn.log_softmax(x @ t.T), jnp.roll(tokens, -1, 1)[..., None], -1)
        )

    case(
        "model_gpt_loss",
        jax.value_and_grad(lm, (0, 1, 2)),
        table,
        p,
        mix,
        ints(0, 11, 2, 5),
    )
    filters, image = (
        [normal(3, 3, 1, 4), normal(3, 3, 4, 8) * 0.3, normal(8, 3)],
        normal(2, 8, 8, 1),
    )

    def cnn(w, x):
        for f in w[:2]:
            x = nn.relu(
                lax.conv_general_dilated(
                    x, f, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return x.mean((1, 2)) @ w[2]

    case("model_cnn", cnn, filters, image)
    case(
        "model_cnn_grad",
        jax.grad(lambda w, x: jnp.sum(nn.log_softmax(cnn(w, x))[:, 0])),
        filters,
        image,
    )

    def lstm(w, x):
        def cell(state, v):
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([v, h], -1) @ w, 4, -1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
            return (nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((x.shape[1], 4))
        return lax.scan(cell, (zero, zero), x)[0][0]

    cell, steps = normal(10, 16) * 0.4, normal(5, 3, 6)
    case("model_lstm", lstm, cell, steps)
    case("model_lstm_grad", jax.grad(lambda w, x: jnp.sum(lstm(w, x) ** 2)), cell, steps)
    case(
        "model_batch_norm",
        lambda x, g: (
            (x - x.mean((0, 2))[:, None]) / jnp.sqrt(x.var((0, 2)) + 1e-3)[:, None] * g[:, None]
        ),
        normal(6, 4, 5),
        normal(4),
    )
    case(
        "model_vmap_grad",
        jax.vmap(jax.grad(lambda w, x, y: jnp.sum((jnp.tanh(x @ w) - y) ** 2)), (None, 0, 0)),
        normal(6, 3),
        normal(5, 6),
        normal(5, 3),
    )
    case(
        "model_kmeans",
        lambda x: lax.fori_loop(
            0,
            4,
            lambda i, c: jax.vmap(
                lambda k: (
                    jnp.sum(
                        jnp.where(
                            (jnp.argmin(((x[:, None] - c) ** 2).sum(-1), 1) == k)[:, None],
                            x,
                            0,
                        ),
                        0,
                    )
                    / 3
                )
            )(jnp.arange(3)),
            x[:3],
        ),
        normal(12, 2),
    )
    case(
        "model_gaussian_process",
        lambda x, y: jsp.linalg.cho_solve(
            jsp.linalg.cho_factor(jnp.exp(-((x[:, None] - x) ** 2)) + jnp.eye(8)), y
        ),
        normal(8),
        normal(8),
    )
    case(
        "model_pca",
        lambda x: jnp.linalg.svd(x - x.mean(0), compute_uv=False),
        normal(12, 4),
    )
    case(
        "model_diffusion",
        lambda x, k: lax.scan(
            lambda c, k: (c * 0.9 + 0.1 * random.normal(k, c.shape, jnp.float32), None),
            x,
            random.split(k, 4),
        )[0],
        normal(4),
        KEY,
    )
    case(
        "model_rope",
        lambda x: jnp.concatenate(
            [
                x[..., ::2] * jnp.cos(jnp.arange(5.0))[:, None]
                - x[..., 1::2] * jnp.sin(jnp.arange(5.0))[:, None],
                x,
            ],
            -1,
        ),
        normal(2, 5, 8),
    )
    case(
        "model_game_of_life",
        lambda g: lax.fori_loop(
            0,
            5,
            lambda i, g: (lambda n: ((n == 3) | ((g == 1) & (n == 2))).astype(jnp.int32))(
                sum(
                    jnp.roll(g, (a, b), (0, 1))
                    for a in (-1, 0, 1)
                    for b in (-1, 0, 1)
                    if (a, b) != (0, 0)
                )
            ),
            g,
        ),
        ints(0, 2, 8, 8),
    )
    case(
        "model_mandelbrot",
        lambda c: lax.fori_loop(
            0,
            12,
            lambda i, s: (lambda z: (z, s[1] + (jnp.abs(z) < 2)))(
                jnp.where(jnp.abs(s[0]) < 2, s[0] ** 2 + c, s[0])
            ),
            (jnp.zeros_like(c), jnp.zeros(c.shape, jnp.int32)),
        )[1],
        normal(5, 5, dtype="complex64"),
    )


def plain(value) -> np.ndarray:
    """As NumPy can store it: narrow floats as float32, keys as their data."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        value = random.key_data(value)
    value = np.asarray(value)
    return (
        value.astype(np.float32)
        if value.dtype.name == "bfloat16" or value.dtype.name.startswith("float8")
        else value
    )


def record(fn, args: tuple) -> dict:
    """The program in every form, and what XLA computes."""
    lowered = jax.jit(fn).lower(*args)
    compiled = lowered.compile()
    kept = sorted(
        lowered._lowering.compile_args.get("kept_var_idx", range(len(jax.tree.leaves(args))))
    )
    leaves = jax.tree.leaves(args)
    return {
        "stablehlo": lowered.as_text(),
        "hlo": lowered.compiler_ir("hlo").as_hlo_text(True),
        "optimized": compiled.as_text(),
        "inputs": [plain(leaves[i]) for i in kept],
        "outputs": [plain(v) for v in jax.tree.leaves(compiled(*args))],
        "types": [str(v.dtype) for v in jax.tree.leaves(compiled(*args))],
    }


def main(path: str, *names: str) -> None:
    for family in (
        elementwise,
        arithmetic,
        moves,
        reductions,
        contractions,
        linalg,
        control,
        randomness,
        special,
        models,
    ):
        family()
    found = {}
    for name, (fn, args) in CASES.items():
        if names and not any(n in name for n in names):
            continue
        try:
            found[name] = record(fn, args)
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
