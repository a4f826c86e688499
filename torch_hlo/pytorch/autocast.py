"""autocast("hlo"): which ops run in the lower precision, which in float32, which in the widest type
given. The lists are CUDA's, but for cross_entropy_loss: what CUDA takes apart, rounding each
logarithm, the CPU computes in float32. Graphs of CPU tensors that are recorded for torch.compile
follow the CPU's (`as_on_the_cpu`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from .operators import OpOverload, base_name
from .participants import without_autocast
from .registration import PLACE

aten = torch.ops.aten

LOWER = """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
scaled_dot_product_attention
""".split()

FLOAT32 = """
acos asin cosh cross_entropy_loss erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow softplus layer_norm native_layer_norm group_norm nuclear_norm cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm fft_fft
fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn
fft_irfftn fft_hfft fft_ihfft
""".split()

# These sum in float32 by their own dtype argument.
FLOAT32_RESULT = (
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum".split()
)

WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
).split()

# Of the ops above, what the CPU does (at/native: autocast_mode.cpp); it leaves the others as they
# are. Those that PyTorch takes apart into products are lowered there.
CPU_LOWER = frozenset(
    """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
prelu addmm matmul einsum tensordot mm linalg_vecdot linear addbmm baddbmm bmm chain_matmul
linalg_multi_dot scaled_dot_product_attention
""".split()
)
CPU_FLOAT32 = frozenset(
    """
cross_entropy_loss grid_sampler prod cdist mse_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss poisson_nll_loss smooth_l1_loss l1_loss huber_loss margin_ranking_loss
soft_margin_loss triplet_margin_loss multi_margin_loss kl_div multilabel_margin_loss
binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft
fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft
""".split()
)
_here = threading.local()


@contextlib.contextmanager
def as_on_the_cpu(enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """On this thread ops on hlo tensors are cast as autocast("cpu") casts those on CPU tensors,
    where it is enabled; autocast("hlo") inside turns that on and off."""
    _here.cpu = True
    try:
        with torch.autocast(PLACE.name, dtype, enabled):
            yield
    finally:
        _here.cpu = False


def _overloads(name: str) -> list[OpOverload]:
    packet = getattr(aten, name, None)
    found = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    return [o for o in found if not (o._schema.is_mutable or _named(o))]


def _eligible(x: object) -> bool:
    return PLACE.has(x) and x.is_floating_point() and x.dtype != torch.float64


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if _eligible(value) and value.dtype != dtype else value
    if isinstance(value, (list, tuple)):
        return (
            type(value)([_cast(v, dtype) for v in value]) if type(value) in (list, tuple) else value
        )
    return value


def _casting(op: OpOverload, choose: Callable[[tuple], torch.dtype]) -> Callable:
    name = base_name(op)

    def kernel(*args: object, **kwargs: object) -> object:
        with without_autocast():
            if getattr(_here, "cpu", False):
                if name not in CPU_LOWER and name not in CPU_FLOAT32:
                    return op(*args, **kwargs)
                dtype = _lower(args) if name in CPU_LOWER else torch.float32
            else:
                dtype = choose(args)
            return op(
                *[_cast(a, dtype) for a in args],
                **{k: _cast(v, dtype) for k, v in kwargs.items()},
            )

    return kernel


def lowers_networks() -> bool:
    """Whether recurrent networks run in the lower precision here, as CUDA's do. (The CPU casts what
    some of them are taken apart into.)"""
    return torch.is_autocast_enabled(PLACE.name) and not getattr(_here, "cpu", False)


def lowered(values: tuple) -> tuple:
    """Tensors, or sequences of them, in the lower precision."""
    return _cast(values, _lower(values))


def _lower(args: tuple) -> torch.dtype:
    return torch.get_autocast_dtype(PLACE.name)


def _float32(args: tuple) -> torch.dtype:
    return torch.float32


def _widest(args: tuple) -> torch.dtype:
    flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,)) if _eligible(x)]
    return torch.float32 if any(x.dtype == torch.float32 for x in flat) else _lower(args)


def _float32_result(op: OpOverload) -> Callable:
    def kernel(*args: object, **kwargs: object) -> object:
        with without_autocast():
            if getattr(_here, "cpu", False):
                return (
                    op(*(_cast(a, torch.float32) for a in args), **kwargs)
                    if op._schema.name == "aten::prod"
                    else op(*args, **kwargs)
                )
            given = dict(zip([a.name for a in op._schema.arguments], args)) | kwargs
            if given.get("dtype") is None and _eligible(args[0]):
                position = next(
                    (i for i, a in enumerate(op._schema.arguments) if a.name == "dtype"),
                    None,
                )
                if position is not None and position < len(args):
                    args = (*args[:position], torch.float32, *args[position + 1 :])
                else:
                    kwargs = kwargs | {"dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _banned(*args: object, **kwargs: object) -> None:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to"
        " autocast.\nMany models use a sigmoid layer right before the binary cross entropy"
        " layer.\nIn this case, combine the two layers using"
        " torch.nn.functional.binary_cross_entropy_with_logits\nor torch.nn.BCEWithLogitsLoss. "
        " binary_cross_entropy_with_logits and BCEWithLogits are\nsafe to autocast."
    )


def register(every: torch.library.Library, library: torch.library.Library) -> None:
    """Fall through for all ops, kernels for the lists. `every` is a library of the namespace "_",
    `library` of aten."""
    key = f"Autocast{PLACE.key}"
    every.fallback(torch.library.fallthrough_kernel, key)
    for names, choose in ((LOWER, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
        for name in names:
            for op in _overloads(name):
                library.impl(_key(op), _casting(op, choose), key)
    for name in FLOAT32_RESULT:
        for op in _overloads(name):
            if any(a.name == "dtype" for a in op._schema.arguments):
                library.impl(_key(op), _float32_result(op), key)
    library.impl("binary_cross_entropy", _banned, key)


def _key(op: OpOverload) -> str:
    return base_name(op) + ("." + op._overloadname if op._overloadname != "default" else "")


def _named(op: OpOverload) -> bool:
    """Overloads for named tensors, which the device does not have."""
    return (
        any("Dimname" in str(a.type) for a in op._schema.arguments) or "Dimname" in op._overloadname
    )
