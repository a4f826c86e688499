"""Fused recurrent cells (one time step), forward and backward."""
from __future__ import annotations

import torch

from torch_hlo.hlo.ir import Instruction
from torch_hlo.lowering import promote
from torch_hlo.lowering.elementwise import compute
from torch_hlo.lowering.expr import Expr, logistic, tanh
from torch_hlo.lowering.registry import expected, lowers
from torch_hlo.lowering.shaping import concatenate, reduce, slice_dim

aten = torch.ops.aten


def _gates(x: Instruction, bias: Instruction | None, n: int) -> list[Expr]:
    value = compute(x)
    if bias is not None:
        value = value + Expr(promote.operand(bias, value.dtype, value.dims))
    size = value.dims[1] // n
    return [Expr(slice_dim(value.x, 1, i * size, (i + 1) * size)) for i in range(n)]


def _results(*values) -> tuple:
    return tuple(None if v is None or s is None else promote.cast(v.x, s.dtype) for v, s in zip(values, expected(), strict=True))


def _joined(parts: list[Expr]) -> Expr:
    return Expr(concatenate([p.x for p in parts], 1))


@lowers(aten._thnn_fused_lstm_cell)
def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """(hy, cy, workspace): the workspace holds the four activated gates."""
    a, b = _gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4)
    i, f, g, o = (x + y for x, y in zip(a, b, strict=True))
    i, f, g, o = logistic(i), logistic(f), tanh(g), logistic(o)
    cy = f * compute(cx) + i * g
    return _results(o * tanh(cy), cy, _joined([i, f, g, o]))


@lowers(aten._thnn_fused_lstm_cell_backward_impl)
def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    """(gradient of the gates, gradient of cx, gradient of the bias)."""
    i, f, g, o = _gates(workspace, None, 4)
    c = tanh(compute(cy))
    dh = c * 0 if grad_hy is None else compute(grad_hy)
    dc = dh * o * (1 - c * c)
    if grad_cy is not None:
        dc = dc + compute(grad_cy)
    gates = _joined([dc * g * i * (1 - i), dc * compute(cx) * f * (1 - f), dc * i * (1 - g * g), dh * c * o * (1 - o)])
    bias = Expr(reduce(gates.x, (0,))) if has_bias else None
    return _results(gates, dc * f, bias)


@lowers(aten._thnn_fused_gru_cell)
def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """(hy, workspace): reset, update, new gates, the old state, and the hidden part of the new gate."""
    (ir, iz, ia), (hr, hz, hn) = _gates(input_gates, input_bias, 3), _gates(hidden_gates, hidden_bias, 3)
    r, z = logistic(ir + hr), logistic(iz + hz)
    n = tanh(ia + r * hn)
    h = compute(hx)
    return _results(n + z * (h - n), _joined([r, z, n, h, hn]))


@lowers(aten._thnn_fused_gru_cell_backward)
def gru_cell_backward(grad, workspace, has_bias):
    """Gradients of (input gates, hidden gates, hx, input bias, hidden bias)."""
    r, z, n, h, hn = _gates(workspace, None, 5)
    g = compute(grad)
    dn = g * (1 - z) * (1 - n * n)
    dz = g * (h - n) * z * (1 - z)
    dr = dn * hn * r * (1 - r)
    inputs, hidden = _joined([dr, dz, dn]), _joined([dr, dz, dn * r])
    biases = [Expr(reduce(v.x, (0,))) if has_bias else None for v in (inputs, hidden)]
    return _results(inputs, hidden, g * z, *biases)
