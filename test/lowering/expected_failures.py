"""What the sweep over PyTorch's operator database leaves out, each with its reason. A test fails
when an entry is no longer needed."""

from __future__ import annotations

# op_db operators that cannot run without CUDA or are not strided.
NOT_RUN = {
    "jiterator_unary": "CUDA only", "jiterator_binary": "CUDA only", "jiterator_4inputs_with_extra_args": "CUDA only",
    "jiterator_binary_return_by_ref": "CUDA only", "jiterator_2inputs_2outputs": "CUDA only",
    "chalf": "torch.complex32 has no element type in the language",
    "sparse.mm": "not strided", "sparse.sampled_addmm": "not strided", "to_sparse": "not strided",
    "grid_sampler_3d": "samples of a million points are slow in the NumPy evaluator; grid_sampler_2d runs the same code",
}  # fmt: skip

# aten overloads that run on the CPU: what their result looks like depends on values, or LAPACK does
# them better.
DATA_DEPENDENT = "the size of the result depends on values"
ON_THE_HOST = "returns a Python value"
LAPACK = "only for matrices that are transposed views, or without pivoting"
RARE = "rare in models, and no decomposition"
FALLBACKS = {
    "aten.nonzero.default": DATA_DEPENDENT, "aten.nonzero_static.default": DATA_DEPENDENT,
    "aten.masked_select.default": DATA_DEPENDENT, "aten._unique.default": DATA_DEPENDENT,
    "aten._unique2.default": DATA_DEPENDENT, "aten.unique_consecutive.default": DATA_DEPENDENT,
    "aten.unique_dim.default": DATA_DEPENDENT, "aten.bincount.default": DATA_DEPENDENT,
    "aten.index.Tensor": DATA_DEPENDENT, "aten.repeat_interleave.Tensor": DATA_DEPENDENT,
    "aten.index_put.default": DATA_DEPENDENT, "aten.equal.default": ON_THE_HOST,
    "aten.allclose.default": ON_THE_HOST, "aten.is_nonzero.default": ON_THE_HOST,
    "aten.item.default": ON_THE_HOST, "aten._linalg_check_errors.default": ON_THE_HOST,
    "aten.linalg_lstsq.default": DATA_DEPENDENT, "aten._ctc_loss.default": DATA_DEPENDENT,
    "aten._ctc_loss.Tensor": DATA_DEPENDENT,
    "aten._linalg_det.default": LAPACK, "aten._linalg_slogdet.default": LAPACK,
    "aten.linalg_lu_factor_ex.default": LAPACK, "aten.linalg_lu.default": LAPACK,
    "aten.hash_tensor.default": RARE, "aten.histogram.bin_ct": RARE,
    "aten.histogram.bins_tensor": RARE, "aten._histogramdd_bin_edges.default": RARE,
    "aten._histogramdd_from_bin_cts.default": RARE,
    "aten._histogramdd_from_bin_tensors.default": RARE,
    "torch_nn._linear_cross_entropy_batch_chunked.default": RARE,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": RARE,
    "aten.__iand__.Tensor": ON_THE_HOST, "aten.__ior__.Tensor": ON_THE_HOST,
    "aten.resize.default": DATA_DEPENDENT,
}  # fmt: skip

# aten overloads whose values differ from PyTorch's.
MISMATCHES: dict[str, str] = {}
