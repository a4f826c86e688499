"""PyTorch's operator database: every aten call that an operator makes, forward and backward, is
lowered, evaluated and compared.

The quick subset runs by default; `-m slow` runs all operators. Known gaps are in
expected_failures.py."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from .expected_failures import FALLBACKS, MISMATCHES, NOT_RUN
from .support import Checker

QUICK = re.compile(
    r"^(add|mul|div|pow|exp|where|clamp|sum|mean|amax|argmax|var|softmax|log_softmax|cumsum|sort|topk|cat|stack|view|permute|gather|scatter_add|"
    r"index_select|index_put|masked_fill|tril|matmul|addmm|bmm|einsum|linalg\.vector_norm|fft\.rfft|erfinv|lgamma|"
    r"nn\.functional\.(linear|gelu|silu|layer_norm|batch_norm|group_norm|cross_entropy|embedding|conv2d|conv_transpose2d|max_pool2d|avg_pool2d|"
    r"scaled_dot_product_attention|binary_cross_entropy_with_logits|mse_loss|dropout))$"
)


def cases(dtype: torch.dtype, quick: bool) -> list:
    wanted = [
        op
        for op in op_db
        if op.name not in NOT_RUN
        and dtype in op.supported_dtypes("cpu")
        and (not quick or QUICK.match(op.name))
    ]
    return [
        pytest.param(
            op,
            dtype,
            id=(
                f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}-{str(dtype)[6:]}"
            ),
        )
        for op in wanted
    ]


def run(op, dtype: torch.dtype, samples: int) -> Checker:
    """Run the first samples of an operator, with gradients where there are any, under the
    Checker."""
    torch.manual_seed(0)
    checker = Checker()
    gradients = dtype.is_floating_point and op.supports_autograd
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=gradients)):
            if i == samples:
                break
            with checker:
                out = op(sample.input, *sample.args, **sample.kwargs)
                outs = [
                    o for o in tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad
                ]
                leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
                inputs = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
                if outs and inputs:
                    torch.autograd.grad(
                        [o.abs().sum() if o.is_complex() else o.sum() for o in outs],
                        inputs,
                        allow_unused=True,
                    )
    return checker


def judge(checker: Checker) -> None:
    failures = {name: text for name, text in checker.failures.items() if name not in MISMATCHES}
    assert not failures, failures
    fallbacks = checker.fallbacks - FALLBACKS.keys()
    assert not fallbacks, f"run on the CPU: {sorted(fallbacks)}"


@pytest.mark.parametrize("op, dtype", cases(torch.float32, True))
def test_quick(op, dtype):
    judge(run(op, dtype, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, dtype",
    [c for d in (torch.float32, torch.int64, torch.bool, torch.complex64) for c in cases(d, False)],
)
def test_all(op, dtype):
    judge(run(op, dtype, 4))
