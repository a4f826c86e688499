"""Recurrent networks: a layer's recurrence over time as one loop, forward and backward, and fused cells (one time step).

The recurrence takes the gates that the inputs contribute, computed beforehand by one product over all time steps; its backward leaves
the gates' gradients, so that each weight's gradient is one product over all time steps, too. Formulas: Hochreiter and Schmidhuber 1997
(LSTM, with forget gates), Cho et al. 2014 in cuDNN's variant (GRU), as in torch.nn's documentation.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_hlo.hlo.ir import Instruction
from torch_hlo.lowering import promote
from torch_hlo.lowering.control import scan_loop
from torch_hlo.lowering.elementwise import compute
from torch_hlo.lowering.expr import Expr, logistic, tanh, where
from torch_hlo.lowering.expr import maximum as larger
from torch_hlo.lowering.matmul import dot
from torch_hlo.lowering.registry import expected, lowers
from torch_hlo.lowering.shaping import add_dim, concatenate, permute, reduce, slice_dim

aten = torch.ops.aten

# Ops of our own: PyTorch's CompositeImplicit lstm.input & co. are taken apart by lazy/recurrent.py.
_library = torch.library.Library("torch_hlo", "DEF")
# gates [time, batch, gates * hidden], weight [gates * hidden, hidden], bias [gates * hidden], state: [batch, hidden] each
# -> output [time, batch, hidden], last state…, and with `save` what backward wants, [time, batch, hidden] each
_library.define("recurrence(str cell, bool reverse, bool save, Tensor gates, Tensor weight, Tensor? bias, Tensor[] state) -> Tensor[]")
# -> gradients of gates, weight, bias, state…
_library.define("recurrence_backward(str cell, bool reverse, bool[] mask, Tensor? grad, Tensor?[] grad_state, Tensor weight, Tensor? bias, "
                "Tensor[] state, Tensor output, Tensor[] saved) -> Tensor?[]")  # fmt: skip
RECURRENCE = torch.ops.torch_hlo.recurrence.default
RECURRENCE_BACKWARD = torch.ops.torch_hlo.recurrence_backward.default


@dataclass(frozen=True, slots=True)
class Cell:
    """One time step. The first state is the output.

    forward(inputs, hidden, state) -> new state, values that backward wants: `inputs`, `hidden` hold one Expr [batch, hidden] per gate.
    backward(gradients of the new state, output, saved) -> gradients of inputs, of hidden (the same list when they are equal), and of the
    old state apart from what comes through `hidden`.
    `hidden_bias`: the bias of the hidden part cannot be added to that of the inputs.
    """

    gates: int
    states: int
    saved: int
    forward: Callable
    backward: Callable
    hidden_bias: bool = False


def _lstm(inputs, hidden, state):
    i, f, g, o = (x + y for x, y in zip(inputs, hidden, strict=True))
    i, f, g, o = logistic(i), logistic(f), tanh(g), logistic(o)
    c = f * state[1] + i * g
    return [o * tanh(c), c], [i, f, g, o, state[1]]


def _lstm_backward(grads, output, saved):
    i, f, g, o, before = saved
    dh, dc = grads
    c = tanh(f * before + i * g)
    dc = dc + dh * o * (1 - c * c)
    gates = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * c * o * (1 - o)]
    return gates, gates, [None, dc * f]


def _gru(inputs, hidden, state):
    (ir, iz, ia), (hr, hz, hn) = inputs, hidden
    r, z = logistic(ir + hr), logistic(iz + hz)
    n = tanh(ia + r * hn)
    (h,) = state
    return [n + z * (h - n)], [r, z, n, h, hn]


def _gru_backward(grads, output, saved):
    r, z, n, h, hn = saved
    (g,) = grads
    dn = g * (1 - z) * (1 - n * n)
    dz = g * (h - n) * z * (1 - z)
    dr = dn * hn * r * (1 - r)
    return [dr, dz, dn], [dr, dz, dn * r], [g * z]


def _simple(activation: Callable, derivative: Callable) -> Cell:
    """Elman's network: activation(inputs + hidden); `derivative` is that of the activation, in terms of its value."""

    def backward(grads, output, saved):
        gates = [grads[0] * derivative(output)]
        return gates, gates, [None]

    return Cell(1, 1, 0, lambda inputs, hidden, state: ([activation(inputs[0] + hidden[0])], []), backward)


CELLS = {
    "lstm": Cell(4, 2, 5, _lstm, _lstm_backward),
    "gru": Cell(3, 1, 5, _gru, _gru_backward, hidden_bias=True),
    "rnn_tanh": _simple(tanh, lambda y: 1 - y * y),
    "rnn_relu": _simple(lambda x: larger(x, 0), lambda y: where(y > 0, y.like(1), 0)),
}


def _split(value: Expr, n: int) -> list[Expr]:
    size = value.dims[-1] // n
    return [Expr(slice_dim(value.x, -1, i * size, (i + 1) * size)) for i in range(n)]


def _joined(parts: Sequence[Expr]) -> Expr:
    return Expr(concatenate([p.x for p in parts], -1))


@lowers(RECURRENCE)
def recurrence(cell, reverse, save, gates, weight, bias, state):
    c, dtype = CELLS[cell], gates.shape.dtype
    turned = permute(weight, (1, 0))  # once, not in every step
    rest = [turned] if bias is None else [turned, bias]

    def step(carry, x, rest):
        hidden = dot(carry[0], rest[0], (1,), (0,))
        if bias is not None:
            hidden = hidden + Expr(promote.operand(rest[1], hidden.dtype, hidden.dims))
        new, saved = c.forward(_split(compute(x[0]), c.gates), _split(hidden, c.gates), [compute(s) for s in carry])
        new, saved = ([promote.cast(v.x, dtype) for v in values] for values in (new, saved))
        return new, [new[0], *(saved if save else ())]

    last, (out, *saved) = scan_loop(step, state, [gates], rest, gates.shape.dims[0], reverse)
    return (out, *last, *saved)


@lowers(RECURRENCE_BACKWARD)
def recurrence_backward(cell, reverse, mask, grad, grad_state, weight, bias, state, output, saved):
    c, dtype, length = CELLS[cell], output.shape.dtype, output.shape.dims[0]
    carry = [promote.full(0, dtype, s.shape.dims) if g is None else g for g, s in zip(grad_state, state, strict=True)]
    xs = [output, *saved, *([] if grad is None else [grad])]

    def step(carry, x, rest):
        output, *saved = (compute(v) for v in (x if grad is None else x[:-1]))
        grads = [compute(g) for g in carry]
        if grad is not None:
            grads[0] = grads[0] + compute(x[-1])
        inputs, hidden, before = c.backward(grads, output, saved)
        joined = [promote.cast(_joined(part).x, dtype) for part in ([inputs] if inputs is hidden else [inputs, hidden])]
        through = dot(joined[-1], rest[0], (1,), (0,))
        before = [through if before[0] is None else before[0] + through, *before[1:]]
        return [promote.cast(g.x, dtype) for g in before], joined

    first, ys = scan_loop(step, carry, xs, [weight], length, not reverse)
    inputs, hidden = ys[0], ys[-1]
    d_weight = d_bias = None
    if mask[0]:
        ends = (1, length) if reverse else (0, length - 1)
        previous = [add_dim(state[0], 0), slice_dim(output, 0, *ends)]
        previous = concatenate(previous[::-1] if reverse else previous, 0)
        d_weight = promote.cast(dot(hidden, previous, (0, 1), (0, 1)).x, weight.shape.dtype)
    if mask[1]:
        d_bias = promote.cast(reduce(promote.cast(hidden, promote.compute_type(dtype)), (0, 1)), bias.shape.dtype)
    return (inputs, d_weight, d_bias, *first)


# ---- cells


def _gates(x: Instruction, bias: Instruction | None, n: int) -> list[Expr]:
    value = compute(x)
    if bias is not None:
        value = value + Expr(promote.operand(bias, value.dtype, value.dims))
    return _split(value, n)


def _results(*values) -> tuple:
    return tuple(None if v is None or s is None else promote.cast(v.x, s.dtype) for v, s in zip(values, expected(), strict=True))


@lowers(aten._thnn_fused_lstm_cell)
def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """(hy, cy, workspace): the workspace holds the four activated gates."""
    (hy, cy), saved = _lstm(_gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4), [None, compute(cx)])
    return _results(hy, cy, _joined(saved[:4]))


@lowers(aten._thnn_fused_lstm_cell_backward_impl)
def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    """(gradient of the gates, gradient of cx, gradient of the bias)."""
    before = compute(cx)
    grads = [before * 0 if g is None else compute(g) for g in (grad_hy, grad_cy)]
    gates, _, (_, dc) = _lstm_backward(grads, None, [*_gates(workspace, None, 4), before])
    gates = _joined(gates)
    return _results(gates, dc, Expr(reduce(gates.x, (0,))) if has_bias else None)


@lowers(aten._thnn_fused_gru_cell)
def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """(hy, workspace): reset, update, new gates, the old state, and the hidden part of the new gate."""
    (hy,), saved = _gru(_gates(input_gates, input_bias, 3), _gates(hidden_gates, hidden_bias, 3), [compute(hx)])
    return _results(hy, _joined(saved))


@lowers(aten._thnn_fused_gru_cell_backward)
def gru_cell_backward(grad, workspace, has_bias):
    """Gradients of (input gates, hidden gates, hx, input bias, hidden bias)."""
    inputs, hidden, (h,) = _gru_backward([compute(grad)], None, _gates(workspace, None, 5))
    inputs, hidden = _joined(inputs), _joined(hidden)
    biases = [Expr(reduce(v.x, (0,))) if has_bias else None for v in (inputs, hidden)]
    return _results(inputs, hidden, h, *biases)
