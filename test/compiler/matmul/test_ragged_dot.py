"""Products of groups whose sizes are computed: every layout, empty groups, rows without a group,
sizes that say too much."""

import numpy as np
import pytest

from test.compiler.steps import check
from torch_hlo.compiler.pipeline import optimize
from torch_hlo.hlo.ir import build
from torch_hlo.hlo.ir.instruction import Computation, Module
from torch_hlo.hlo.ir.intern import instr
from torch_hlo.hlo.ir.shape import Shape

SIZES = [(3, 0, 5), (8, 0, 0), (2, 2, 2), (0, 0, 0), (5, 9, 1), (-1, 4, 2)]


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype("float32") for s in shapes]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("group,contract", [(0, 1), (0, 2), (1, 0), (2, 1)])
def test_rows(sizes, group, contract):
    (free,) = {0, 1, 2} - {group, contract}
    dims = [0, 0, 0]
    dims[group], dims[contract], dims[free] = 3, 5, 7
    a, b = arrays((8, 5), dims)
    check(
        lambda x, y, s: build.ragged_dot(
            x,
            y,
            s,
            lhs_contract=(1,),
            rhs_contract=(contract,),
            lhs_ragged=(0,),
            rhs_group=(group,),
        ),
        a,
        b,
        np.array(sizes, "int32"),
        optimize=True,
    )


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_a_transposed_operand(sizes):
    a, b = arrays((5, 8), (3, 5, 7))
    check(
        lambda x, y, s: build.ragged_dot(
            x,
            y,
            s,
            lhs_contract=(0,),
            rhs_contract=(1,),
            lhs_ragged=(1,),
            rhs_group=(0,),
        ),
        a,
        b,
        np.array(sizes, "int64"),
        optimize=True,
    )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lhs,rhs", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_contraction(sizes, lhs, rhs):
    a, b = arrays((8, 6) if lhs == 0 else (6, 8), (8, 7) if rhs == 0 else (7, 8))
    check(
        lambda x, y, s: build.ragged_dot(
            x, y, s, lhs_contract=(lhs,), rhs_contract=(rhs,), lhs_ragged=(lhs,)
        ),
        a,
        b,
        np.array(sizes, "int32"),
        optimize=True,
    )


def test_large_groups_run_on_all_threads():
    a, b = arrays((600, 96), (4, 96, 130))
    check(
        lambda x, y, s: build.ragged_dot(
            x,
            y,
            s,
            lhs_contract=(1,),
            rhs_contract=(1,),
            lhs_ragged=(0,),
            rhs_group=(0,),
        ),
        a,
        b,
        np.array([201, 7, 300, 60], "int32"),
        optimize=True,
    )


def test_transposes_go_into_the_product():
    x, y, sizes = (
        instr("parameter", (), s, index=i)
        for i, s in enumerate((Shape("f32", (5, 8)), Shape("f32", (3, 7, 5)), Shape("s32", (3,))))
    )
    turned = build.transpose(x, (1, 0)), build.transpose(y, (0, 2, 1))
    root = build.ragged_dot(
        *turned,
        sizes,
        lhs_contract=(1,),
        rhs_contract=(1,),
        lhs_ragged=(0,),
        rhs_group=(0,),
    )
    module = optimize(Module("m", Computation("main", (x, y, sizes), root)))
    assert module.entry.root.op == "ragged-dot"
    assert module.entry.root.operands == (x, y, sizes)
    arguments = arrays((5, 8), (3, 7, 5))
    check(
        lambda x, y, s: build.ragged_dot(
            build.transpose(x, (1, 0)),
            build.transpose(y, (0, 2, 1)),
            s,
            lhs_contract=(1,),
            rhs_contract=(1,),
            lhs_ragged=(0,),
            rhs_group=(0,),
        ),
        *arguments,
        np.array([4, 1, 3], "int32"),
        optimize=True,
    )
