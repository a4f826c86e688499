"""nn.LSTM, nn.GRU and nn.RNN: one recorded op for a network, with a gradient of its own; the same
op in torch.compile's graphs.

Networks with dropout are one op per layer. When the gradient is differentiated again, it is
computed from ordinary ops."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hlo.lowering.nn.rnn import RECURRENT, RECURRENT_BACKWARD, layers_of
from torch_hlo.pytorch import autocast, participants
from torch_hlo.pytorch.operators import base_name

from ..aten import dispatch
from ..record import HloTensor, aten, decompose, inference, meta as metas
from ..run import drift

# ---- one time step in ordinary ops: (gates of the inputs, gates of the hidden state, state) -> new
# state


def _lstm(inputs: Tensor, hidden: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, hidden: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i_r, i_z, i_n = inputs.chunk(3, -1)
    h_r, h_z, h_n = hidden.chunk(3, -1)
    z = (i_z + h_z).sigmoid()
    n = (i_n + (i_r + h_r).sigmoid() * h_n).tanh()
    return (n + z * (state[0] - n),)


STEPS: dict[str, Callable] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda x, h, state: ((x + h).tanh(),),
    "rnn_relu": lambda x, h, state: ((x + h).relu(),),
}


def _fused(*tensors: Tensor | None) -> bool:
    """True when PyTorch's fused cells take these: matrices of one dtype on the device."""
    first = tensors[0]
    given = [t for t in tensors if t is not None]
    return (
        all(type(t) is HloTensor and t.dtype == first.dtype for t in given)
        and first.dim() == 2
        and not participants.forward_mode()
    )


def lstm_cell(
    x: Tensor,
    hx: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih=None,
    b_hh=None,
) -> tuple[Tensor, ...]:
    """One step of an LSTM: (hidden, cell)."""
    if _fused(x, *hx, w_ih, w_hh, b_ih, b_hh):
        return aten._thnn_fused_lstm_cell.default(
            F.linear(x, w_ih), F.linear(hx[0], w_hh), hx[1], b_ih, b_hh
        )[:2]
    return _lstm(F.linear(x, w_ih, b_ih), F.linear(hx[0], w_hh, b_hh), hx)


def gru_cell(x, h, w_ih, w_hh, b_ih=None, b_hh=None):
    """One step of a GRU: the new hidden state."""
    if _fused(x, h, w_ih, w_hh, b_ih, b_hh):
        return aten._thnn_fused_gru_cell.default(
            F.linear(x, w_ih), F.linear(h, w_hh), h, b_ih, b_hh
        )[0]
    return _gru(F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh), (h,))[0]


def gru_cell_meta(gates, hidden_gates, hx, *biases):
    """On tensors without data, which PyTorch has for LSTM's cells only."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def gru_cell_backward_meta(grad, workspace, has_bias):
    gates = grad.new_empty(grad.shape[0], 3 * grad.shape[1])
    bias = gates[0].clone() if has_bias else None
    return gates, gates.clone(), torch.empty_like(grad), bias, bias.clone() if has_bias else None


def _metas(*counts: int) -> Callable:
    """Of a cell: of its states, and of what its gradient needs."""

    def infer(gates: Tensor, hidden_gates: Tensor, state: Tensor, *biases: Any) -> list[metas.Meta]:
        batch, hidden = state.shape
        return [metas.contiguous((batch, n * hidden), state.dtype) for n in counts]

    return infer


def _backward_metas(state: Tensor, gates: int, biased: bool) -> list[metas.Meta | None]:
    """Of the gradients of gates, state and bias."""
    batch, hidden = state.shape
    bias = metas.contiguous((gates * hidden,), state.dtype) if biased else None
    shapes = (batch, gates * hidden), (batch, hidden)
    return [*(metas.contiguous(shape, state.dtype) for shape in shapes), bias]


def _lstm_backward_metas(*given: Any) -> list[metas.Meta | None]:
    return _backward_metas(given[2], 4, given[5])


def _gru_backward_metas(grad: Tensor, workspace: Tensor, has_bias: bool) -> list[metas.Meta | None]:
    gates, state, bias = _backward_metas(grad, 3, has_bias)
    return [gates, gates, state, bias, bias]


# PyTorch's meta kernels are missing, or fail without a bias.
inference.INFER[aten._thnn_fused_lstm_cell.default] = _metas(1, 1, 4)
inference.INFER[aten._thnn_fused_lstm_cell_backward_impl.default] = _lstm_backward_metas
inference.INFER[aten._thnn_fused_gru_cell.default] = _metas(1, 5)
inference.INFER[aten._thnn_fused_gru_cell_backward.default] = _gru_backward_metas


# ---- a network as one op


def _record(op, *args) -> list[Tensor]:
    return dispatch.handle(op, (), args)


def _trace(op, *args) -> list[Tensor]:
    return op(*args)


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        run: Callable[..., Any],
        options: tuple[str, bool, bool],
        lengths: Tensor | None,
        states: int,
        x: Tensor,
        *tensors,
    ) -> tuple[Tensor, ...]:
        state = list(tensors[:states])
        params = list(tensors[states:])
        out, *rest = run(
            RECURRENT,
            *options,
            True,
            x,
            state,
            params,
            lengths,
        )
        ctx.run = run
        ctx.options = options
        ctx.lengths = lengths
        ctx.states = states
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *tensors, out, *rest[states:])
        return (out, *rest[:states])

    @staticmethod
    def backward(ctx, grad: Tensor | None, *grad_state):
        count = ctx.states
        mask = ctx.needs_input_grad[4:]
        tensors = ctx.saved_tensors[: len(mask)]
        out, *saved = ctx.saved_tensors[len(mask) :]
        x = tensors[0]
        state = list(tensors[1 : 1 + count])
        params = list(tensors[1 + count :])
        if torch.is_grad_enabled():
            found = _differentiable(
                ctx.options, ctx.lengths, mask, tensors, count, (grad, *grad_state)
            )
        else:
            found = ctx.run(
                RECURRENT_BACKWARD,
                *ctx.options,
                list(mask),
                grad,
                list(grad_state),
                x,
                state,
                params,
                ctx.lengths,
                out,
                saved,
            )
        found = iter(found)
        return (*[None] * 4, *(next(found) if wanted else None for wanted in mask))


def _differentiable(
    options: tuple,
    lengths: Tensor | None,
    mask: Sequence[bool],
    tensors: Sequence[Tensor],
    states: int,
    grads: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """The gradients that `mask` asks for as a graph of ordinary ops."""
    results = _stepwise(
        *options, lengths, tensors[0], tensors[1 : 1 + states], tensors[1 + states :]
    )
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
    leaves = [t for t, wanted in zip(tensors, mask, strict=True) if wanted]
    return torch.autograd.grad(
        [r for r, _ in pairs],
        leaves,
        [g for _, g in pairs],
        create_graph=True,
        allow_unused=True,
    )


def _stepwise(
    cell: str,
    bidirectional: bool,
    has_biases: bool,
    lengths: Tensor | None,
    x: Tensor,
    state: Sequence[Tensor],
    params: Sequence[Tensor],
) -> list[Tensor]:
    """The network from ordinary ops, one time step after the other: [output, last state…]"""
    last: list[Sequence[Tensor]] = []
    for layer in layers_of(params, bidirectional, has_biases):
        outputs = []
        for direction, (w_in, w_hidden, b_in, b_hidden) in enumerate(layer):
            gates = F.linear(x, w_in, b_in).unbind()
            now = [s[len(last)] for s in state]
            steps = []
            for t in reversed(range(len(gates))) if direction else range(len(gates)):
                new = STEPS[cell](gates[t], F.linear(now[0], w_hidden, b_hidden), now)
                now = (
                    new
                    if lengths is None
                    else [
                        torch.where((lengths > t)[:, None], n, o)
                        for n, o in zip(new, now, strict=True)
                    ]
                )
                steps.append(now[0])
            outputs.append(torch.stack(steps[::-1] if direction else steps))
            last.append(now)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return [x, *map(torch.stack, zip(*last, strict=True))]


# ---- what torch_hlo.debug.compare compares with


def _compared(cell: str, two: bool, biases: bool, save: bool, *given: Any) -> list[Tensor]:
    x, state, params, lengths = given
    return _stepwise(cell, two, biases, lengths, x, state, params)


def _compared_backward(*given: Any) -> Sequence[Tensor | None]:
    *options, mask, grad, grad_state, x, state, params, lengths = given[:10]
    tensors = [t.detach().requires_grad_() for t in (x, *state, *params)]
    given = options, lengths, mask, tensors, len(state), (grad, *grad_state)
    with ThreadPoolExecutor(1) as apart:  # operations of the device are run below autograd
        found = apart.submit(_differentiable, *given).result()
    return [None if x is None else x.detach() for x in found]


drift.BY_OTHERS[RECURRENT] = _compared
drift.BY_OTHERS[RECURRENT_BACKWARD] = _compared_backward


def network(
    run: Callable,
    options: tuple[str, bool, bool],
    x: Tensor,
    state: Sequence[Tensor],
    params: Sequence[Tensor],
    lengths: Tensor | None,
) -> Sequence[Tensor]:
    """(output [time, batch, directions * hidden], last state…) of `x` [time, batch, features];
    `lengths`: of each sequence of the batch when they differ. `run`: _record, or _trace for
    torch.compile's graphs."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *state, *params)):
        return _Network.apply(
            run,
            options,
            lengths,
            len(state),
            x,
            *state,
            *params,
        )
    return run(
        RECURRENT,
        *options,
        False,
        x,
        list(state),
        list(params),
        lengths,
    )


# ---- the networks


class Network:
    """Kernel of `lstm.input` and its like. `otherwise` takes what does not fit. `run`: see
    `network`."""

    def __init__(self, op, otherwise: Callable | None = None, run: Callable = _record) -> None:
        self.cell = base_name(op)
        self.run = run
        self.otherwise = otherwise or (lambda *args: decompose.decomposition(op)(*args))

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """`args`: as the operator has them, see `compute`."""
        if self.run is _record and autocast.lowers_networks():
            args = autocast.lowered(args)
            with participants.without_autocast():
                return self(*args)
        found = self.compute(*args)
        return self.otherwise(*args) if found is None else found

    def compute(
        self,
        x: Tensor,
        hx: list[Tensor] | Tensor,
        params: list[Tensor],
        *options: Any,
    ) -> tuple[Tensor, ...] | None:
        """None where the operator is taken apart. `options`: those of `layers`, `batch_first`."""
        if not self.takes(x, 3, hx, params):
            return None
        *options, batch_first = options
        out, *last = self.layers(x.transpose(0, 1) if batch_first else x, hx, params, *options)
        return (out.transpose(0, 1) if batch_first else out, *last)

    def takes(
        self,
        x: Tensor,
        rank: int,
        hx: list[Tensor] | Tensor,
        params: Sequence[Tensor],
    ) -> bool:
        """Tensors of one device and floating dtype, without projections. The rest is taken apart
        into single steps."""
        state = self.states(hx)
        tensors = (x, *state, *params)
        if (
            self.run is _record
            and any(type(t) is not HloTensor for t in tensors)
            or any(t.device != x.device or t.dtype != x.dtype for t in tensors)
        ):
            return False
        if (
            not x.is_floating_point()
            or x.dim() != rank
            or not x.numel()
            or participants.forward_mode()
            or torch.is_autocast_enabled(x.device.type)
        ):
            return False
        return all(s.shape[2] == state[0].shape[2] for s in state)

    def states(self, hx: list[Tensor] | Tensor) -> list[Tensor]:
        return list(hx) if self.cell == "lstm" else [hx]

    def layers(
        self,
        x: Tensor,
        hx: list[Tensor] | Tensor,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        lengths: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """(output, last state…) of `x` [time, batch, features]."""
        state = self.states(hx)
        run = partial(network, self.run, (self.cell, bidirectional, has_biases))
        if not (dropout and train and num_layers > 1):
            return run(x, state, params, lengths)
        count = 2 if bidirectional else 1
        last = []
        each = len(params) // num_layers
        for layer in range(num_layers):
            own = slice(layer * count, (layer + 1) * count)
            weights = params[layer * each : (layer + 1) * each]
            x, *new = run(x, [s[own] for s in state], weights, lengths)
            last.append(new)
            if layer < num_layers - 1:
                x = F.dropout(x, dropout, True)
        return [x, *map(torch.cat, zip(*last, strict=True))]


class Packed(Network):
    """Kernel of `lstm.data` and its like: sequences of different lengths, of which time step t has
    the first batch_sizes[t]."""

    def compute(
        self,
        data: Tensor,
        batch_sizes: Tensor,
        hx: list[Tensor] | Tensor,
        params: list[Tensor],
        *options: Any,
    ) -> tuple[Tensor, ...] | None:
        if batch_sizes.device.type != "cpu" or not self.takes(data, 2, hx, params):
            return None
        steps = len(batch_sizes)
        batch = int(batch_sizes[0])
        alive = torch.arange(batch) < batch_sizes[:, None]
        # of `data`, for every time step and sequence
        rows = torch.where(alive, alive.flatten().cumsum(0).view(steps, batch) - 1, 0)
        lengths, rows, places = (
            t.to(data.device)
            for t in (alive.sum(0), rows.flatten(), alive.flatten().nonzero()[:, 0])
        )
        padded = data.index_select(0, rows).view(steps, batch, -1)
        out, *last = self.layers(padded, hx, params, *options, lengths)
        return (out.flatten(0, 1).index_select(0, places), *last)


NETWORKS = {
    op: kind(op)
    for kind, ops in (
        (
            Network,
            (
                aten.lstm.input,
                aten.gru.input,
                aten.rnn_tanh.input,
                aten.rnn_relu.input,
            ),
        ),
        (
            Packed,
            (aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data),
        ),
    )
    for op in ops
}


# ---- in torch.compile's graphs


def _traced(function: Callable, op) -> Callable:
    kernel = Network(op, function, _trace)

    def call(*args):
        # Packed sequences have a tensor of batch sizes in the second place.
        return kernel(*args) if isinstance(args[3], bool) else function(*args)

    call.__name__ = call.__qualname__ = f"{kernel.cell}_network"
    return call


_FUNCTIONS = {
    op: getattr(torch, kernel.cell) for op, kernel in NETWORKS.items() if type(kernel) is Network
}
_TRACED = {function: _traced(function, op) for op, function in _FUNCTIONS.items()}


def as_networks(graph: torch.fx.Graph) -> None:
    """Replace calls of torch.lstm and its like, which PyTorch's own kernels would take apart, by
    those of networks."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _TRACED.get(node.target, node.target)
