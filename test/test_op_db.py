"""torch's operator database on the device: forward, backward, in-place and out= against the CPU.

A varied subset by default; `-m slow` runs every operator in several dtypes. Exceptions stand in
KNOWN and KNOWN_IN, each with its reason."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from test.sweeps.op_db import SKIP, check
from torch_hlo import metrics

# One or two of every kind; the rest runs the same code with another function or is covered
# elsewhere.
QUICK = frozenset(
    """
    add sub mul div pow float_power remainder atan2 maximum where clamp lerp
    abs neg exp sqrt sigmoid tanh erfinv lgamma digamma logit special.zeta
    eq bitwise_left_shift
    sum mean prod amax aminmax argmax var std_mean logsumexp median mode cumsum cummax logcumsumexp
    cat stack split_with_sizes_copy unbind_copy tensor_split permute expand flip roll repeat_interleave unfold
    diagonal diag_embed tril triu as_strided view_as_complex meshgrid kron
    gather scatter scatter_add scatter_reduce index_select index_put index_add index_copy masked_fill masked_scatter
    searchsorted sort topk kthvalue unique nonzero bincount
    matmul addmm baddbmm einsum linalg.qr linalg.solve linalg.svd linalg.eigh linalg.matrix_rank linalg.pinv
    matrix_exp cholesky linalg.vector_norm cross cdist fft.rfft fft.ifft2
    linspace_tensor_overload arange
    nn.functional.linear nn.functional.conv2d nn.functional.conv_transpose1d nn.functional.max_pool2d
    nn.functional.adaptive_avg_pool2d nn.functional.fractional_max_pool2d nn.functional.layer_norm nn.functional.batch_norm
    _native_batch_norm_legit nn.functional.group_norm nn.functional.normalize log_softmax nn.functional.gelu
    nn.functional.prelu nn.functional.cross_entropy nn.functional.nll_loss nn.functional.ctc_loss
    nn.functional.embedding_bag nn.functional.embedding nn.functional.interpolate nn.functional.grid_sample nn.functional.pad
    nn.functional.pixel_shuffle nn.functional.scaled_dot_product_attention masked.normalize
    """.split()
)
KNOWN = {
    "sparse_mm_reduce": "products of sparse matrices are sums only",
    "sparse.sampled_addmm": "no out= for sparse results",
    "chalf": "no element type complex32",
    "as_strided_partial_views": (
        "reads memory outside of the view, which a copy to the device does not take along"
    ),
}
STATISTICS = "saved statistics are float32, as on CUDA"
NORMS = (
    "native_layer_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
)
KNOWN_IN = {(name, torch.bfloat16): STATISTICS for name in NORMS} | {
    ("matrix_exp", torch.bfloat16): "the CPU's own result is nan"
}
# Computed on the CPU: rare, and no decomposition.
FALLBACK = frozenset(["hash_tensor"])
DTYPES = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.bfloat16,
    torch.complex64,
)


def cases(dtype: torch.dtype, quick: bool):
    seen = set()
    for op in op_db:
        if (
            op.name in SKIP
            or op.name in KNOWN
            or op.formatted_name in KNOWN
            or (op.name, dtype) in KNOWN_IN
            or dtype not in op.supported_dtypes("cpu")
        ):
            continue
        if not quick or (op.name in QUICK and op.name not in seen):
            seen.add(op.name)
            yield pytest.param(
                op, dtype, id=f"{op.formatted_name}-{str(dtype).removeprefix('torch.')}"
            )


def run(op, dtype: torch.dtype, samples: int) -> None:
    torch.manual_seed(0)
    metrics.clear_all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(op, samples, dtype)
    assert op.name in FALLBACK or not [n for n in metrics.counter_names() if n.startswith("aten::")]


@pytest.mark.parametrize("op, dtype", list(cases(torch.float32, True)))
def test_quick(op, dtype):
    run(op, dtype, 1)


@pytest.mark.slow
@pytest.mark.parametrize("op, dtype", [case for dtype in DTYPES for case in cases(dtype, False)])
def test_all(op, dtype):
    run(op, dtype, 3)


def moved(value, device: str, memory: dict):
    """Arguments on the device, which share memory as they do."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        if value.device.type == "meta":
            return value
        key = (value.untyped_storage().data_ptr() or id(value), value.dtype)
        if key not in memory:
            count = value.untyped_storage().nbytes() // value.dtype.itemsize
            memory[key] = value.detach().as_strided((count,), (1,), 0).clone().to(device)
        view = memory[key].as_strided(value.shape, value.stride(), value.storage_offset())
        return memory.setdefault(id(value), view)  # a tensor that is given twice is one
    if isinstance(value, (tuple, list)):
        return type(value)([moved(v, device, memory) for v in value])
    if isinstance(value, dict):
        return {k: moved(v, device, memory) for k, v in value.items()}
    return torch.device(device) if isinstance(value, torch.device) else value


# PyTorch's own check comes after ours, which says more.
OTHER_ERRORS = {("narrow_copy", 1)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(
            op,
            id=op.formatted_name,
            marks=() if op.name in QUICK else pytest.mark.slow,
        )
        for op in op_db
        if op.error_inputs_func is not None and op.name not in SKIP
    ],
)
def test_errors(op):
    for i, wrong in enumerate(op.error_inputs("cpu")):
        sample = wrong.sample_input
        kinds = []
        for device in "cpu", "hlo":
            memory = {}
            args = moved((sample.input, *sample.args), device, memory)
            kwargs = moved(sample.kwargs, device, memory)
            try:
                op(*args, **kwargs)
                kinds.append(None)
            except Exception as error:
                kinds.append(type(error))
        assert kinds[0] is kinds[1] or (op.name, i) in OTHER_ERRORS, (i, kinds)


def test_the_quick_subset_exists():
    assert {op.name for op in op_db} | {op.formatted_name for op in op_db} >= QUICK
