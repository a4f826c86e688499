"""nn.LSTM, nn.GRU and nn.RNN: each layer and direction is one product for the inputs and one recorded recurrence.

The recurrence has a gradient of its own; when that is differentiated again, it is computed from ordinary ops.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from torch_hlo.lazy import backend, decompose, dispatch
from torch_hlo.lazy import meta as metas
from torch_hlo.lazy.meta import aten
from torch_hlo.lazy.tensor import HloTensor, fresh
from torch_hlo.lowering.graph import Node, Out
from torch_hlo.lowering.rnn import CELLS, RECURRENCE, RECURRENCE_BACKWARD

Tensor = torch.Tensor


# ---- one time step in ordinary ops: (gates of the inputs, gates of the hidden state, state) -> new state


def _lstm(inputs: Tensor, hidden: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, hidden: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (i_r, i_z, i_n), (h_r, h_z, h_n) = inputs.chunk(3, -1), hidden.chunk(3, -1)
    z = (i_z + h_z).sigmoid()
    n = (i_n + (i_r + h_r).sigmoid() * h_n).tanh()
    return (n + z * (state[0] - n),)


STEPS: dict[str, Callable] = {
    "lstm": _lstm, "gru": _gru, "rnn_tanh": lambda x, h, state: ((x + h).tanh(),), "rnn_relu": lambda x, h, state: ((x + h).relu(),),
}  # fmt: skip


def _fused(*tensors: Tensor | None) -> bool:
    """True when PyTorch's fused cells take these: matrices of one dtype on the device."""
    first = tensors[0]
    given = [t for t in tensors if t is not None]
    return all(type(t) is HloTensor and t.dtype == first.dtype for t in given) and first.dim() == 2 and not backend.forward_mode()


def lstm_cell(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step of an LSTM: (hidden, cell)."""
    if _fused(x, *hx, w_ih, w_hh, b_ih, b_hh):
        return aten._thnn_fused_lstm_cell.default(F.linear(x, w_ih), F.linear(hx[0], w_hh), hx[1], b_ih, b_hh)[:2]
    return _lstm(F.linear(x, w_ih, b_ih), F.linear(hx[0], w_hh, b_hh), hx)


def gru_cell(x, h, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step of a GRU: the new hidden state."""
    if _fused(x, h, w_ih, w_hh, b_ih, b_hh):
        return aten._thnn_fused_gru_cell.default(F.linear(x, w_ih), F.linear(h, w_hh), h, b_ih, b_hh)[0]
    return _gru(F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh), (h,))[0]


def _lstm_metas(input_gates, hidden_gates, cx, *biases) -> list[metas.Meta]:
    batch, hidden = cx.shape
    return [metas.contiguous((batch, n * hidden), cx.dtype) for n in (1, 1, 4)]


def _lstm_backward_metas(grad_hy, grad_cy, cx, cy, workspace, has_bias) -> list[metas.Meta | None]:
    batch, hidden = cx.shape
    gates, bias = metas.contiguous((batch, 4 * hidden), cx.dtype), metas.contiguous((4 * hidden,), cx.dtype) if has_bias else None
    return [gates, metas.contiguous((batch, hidden), cx.dtype), bias]


def _gru_metas(input_gates, hidden_gates, hx, *biases) -> list[metas.Meta]:
    batch, hidden = hx.shape
    return [metas.contiguous((batch, n * hidden), hx.dtype) for n in (1, 5)]


def _gru_backward_metas(grad, workspace, has_bias) -> list[metas.Meta | None]:
    batch, hidden = grad.shape
    gates, bias = metas.contiguous((batch, 3 * hidden), grad.dtype), metas.contiguous((3 * hidden,), grad.dtype) if has_bias else None
    return [gates, gates, metas.contiguous((batch, hidden), grad.dtype), bias, bias]


# PyTorch's meta kernels are missing, or fail without a bias.
dispatch.INFER[aten._thnn_fused_lstm_cell.default] = _lstm_metas
dispatch.INFER[aten._thnn_fused_lstm_cell_backward_impl.default] = _lstm_backward_metas
dispatch.INFER[aten._thnn_fused_gru_cell.default] = _gru_metas
dispatch.INFER[aten._thnn_fused_gru_cell_backward.default] = _gru_backward_metas


# ---- the recurrence of a layer as one op


_ARGUMENTS = {op: dispatch.Arguments(op) for op in (RECURRENCE, RECURRENCE_BACKWARD)}


def _record(op, args: tuple, found: list[metas.Meta | None]) -> list[Tensor | None]:
    nodes, keywords, *_ = dispatch.operands(args, {}, _ARGUMENTS[op])
    node = Node(op, tuple(nodes), keywords, tuple(m and m.hlo for m in found), dispatch.SOURCE and dispatch.source())
    return [m and fresh(m, Out(node, i)) for i, m in enumerate(found)]


def _forward(cell: str, reverse: bool, save: bool, gates: Tensor, weight: Tensor, bias: Tensor | None, state: Sequence[Tensor]) -> list[Tensor]:
    """[output, last state…, what backward wants…]"""
    length, batch, _ = gates.shape
    size = (batch, weight.shape[1])
    whole, one = metas.contiguous((length, *size), gates.dtype), metas.contiguous(size, gates.dtype)
    found = [whole, *[one] * len(state), *[whole] * (CELLS[cell].saved if save else 0)]
    return _record(RECURRENCE, (cell, reverse, save, gates, weight, bias, list(state)), found)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cell, reverse, gates, weight, bias, *state):
        out, *rest = _forward(cell, reverse, True, gates, weight, bias, state)
        ctx.cell, ctx.reverse = cell, reverse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gates, weight, bias, out, *state, *rest[len(state):])
        return (out, *rest[: len(state)])

    @staticmethod
    def backward(ctx, grad, *grad_state):
        gates, weight, bias, out, *rest = ctx.saved_tensors
        state, saved = rest[: len(grad_state)], rest[len(grad_state):]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(ctx, wanted, (gates, weight, bias, *state), (grad, *grad_state)))
        mask = [wanted[1], bias is not None and wanted[2]]
        given = [gates, weight if mask[0] else None, bias if mask[1] else None, *state]
        found = [t if t is None else metas.contiguous(tuple(t.shape), t.dtype) for t in given]
        args = (ctx.cell, ctx.reverse, mask, grad, list(grad_state), weight, bias, state, out, saved)
        return (None, None, *_record(RECURRENCE_BACKWARD, args, found))


def _differentiable(ctx, wanted: Sequence[bool], inputs: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The gradients as a graph of ordinary ops."""
    results = _stepwise(ctx.cell, ctx.reverse, *inputs)
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
    leaves = [t for t, w in zip(inputs, wanted, strict=True) if w]
    found = iter(torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], create_graph=True, allow_unused=True))
    return [next(found) if w else None for w in wanted]


def _stepwise(cell: str, reverse: bool, gates: Tensor, weight: Tensor, bias: Tensor | None, *state: Tensor) -> tuple[Tensor, ...]:
    outputs = []
    for x in reversed(gates.unbind()) if reverse else gates.unbind():
        state = STEPS[cell](x, F.linear(state[0], weight, bias), state)
        outputs.append(state[0])
    return (torch.stack(outputs[::-1] if reverse else outputs), *state)


def recurrence(cell: str, reverse: bool, gates: Tensor, weight: Tensor, bias: Tensor | None, state: Sequence[Tensor]) -> Sequence[Tensor]:
    """(output [time, batch, hidden], last state…) from the inputs' `gates` [time, batch, gates * hidden]."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (gates, weight, bias, *state)):
        return _Recurrence.apply(cell, reverse, gates, weight, bias, *state)
    return _forward(cell, reverse, False, gates, weight, bias, state)


# ---- the networks


def _layer(cell: str, reverse: bool, x: Tensor, state: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih=None, b_hh=None) -> Sequence[Tensor]:
    if b_ih is not None and not CELLS[cell].hidden_bias:
        b_ih, b_hh = b_ih + b_hh, None
    return recurrence(cell, reverse, F.linear(x, w_ih, b_ih), w_hh, b_hh, state)


class Network:
    """Kernel of `lstm.input` and its like."""

    def __init__(self, op) -> None:
        self.op, self.cell = op, op._schema.name.split("::")[1]

    def __call__(self, x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        states = list(hx) if self.cell == "lstm" else [hx]
        if not _fits(x, states, params, self.cell):
            return decompose.decomposition(self.op)(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        each, directions = 4 if has_biases else 2, 2 if bidirectional else 1
        if batch_first:
            x = x.transpose(0, 1)
        last = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                n = layer * directions + direction
                out, *state = _layer(self.cell, direction == 1, x, [s[n] for s in states], *params[n * each : (n + 1) * each])
                outputs.append(out)
                last.append(state)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                x = F.dropout(x, dropout, True)
        return (x.transpose(0, 1) if batch_first else x, *(torch.stack(s) for s in zip(*last)))


def _fits(x: Tensor, states: list[Tensor], params: Sequence[Tensor], cell: str) -> bool:
    """Hlo tensors of one floating dtype, without projections. The rest is taken apart into single steps."""
    tensors = [x, *states, *params]
    if not all(type(t) is HloTensor and t.dtype == x.dtype for t in tensors) or not x.is_floating_point() or x.dim() != 3 or not x.numel():
        return False
    if backend.forward_mode() or torch.is_autocast_enabled(backend.NAME):
        return False
    return all(s.shape[2] == states[0].shape[2] for s in states)


NETWORKS = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
