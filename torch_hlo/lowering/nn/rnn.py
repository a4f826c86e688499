"""Recurrent networks: a layer's recurrence over time as one loop, forward and backward, and fused
cells (one time step).

A layer's inputs contribute to the gates by one product over all time steps before the loop; its
backward leaves the gates' gradients, so that each weight's gradient is one product over all time
steps, too. Formulas: Hochreiter and Schmidhuber 1997 (LSTM, with forget gates), Cho et al. 2014 in
cuDNN's variant (GRU), as in torch.nn's documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_hlo.frozen import frozen
from torch_hlo.hlo.ir import Instruction, Instructions, build

from ..core import (
    Expr,
    LoweringError,
    Results,
    add_dim,
    aten,
    compute,
    concatenate,
    expected,
    finish_all,
    iota,
    logistic,
    lowers,
    maximum as larger,
    permute,
    promote,
    reduce,
    scan_loop,
    select_dim,
    slice_dim,
    stack,
    tanh,
    where,
)
from ..linalg.matmul import affine, dot

# Ops of our own, for PyTorch's CompositeImplicit lstm.input & co. (lazy/ops/recurrent.py): whole
# networks without dropout.
_library = torch.library.Library("torch_hlo", "DEF")
# input [time, batch, features], state: [layers * directions, batch, hidden] each, params of each
# layer and direction: weights of input and hidden state, their biases, lengths: of each sequence of
# the batch if they differ -> output [time, batch, directions * hidden], last state…, and with
# `save` what backward wants: outputs of all layers but the last, then what each cell saves, [time,
# batch, hidden] each
_library.define(
    "recurrent(str cell, bool bidirectional, bool has_biases, bool save, Tensor input, Tensor[]"
    " state, Tensor[] params, Tensor? lengths) -> Tensor[]"
)
# -> gradients of input, state…, params…: those that `mask` asks for
_library.define(
    "recurrent_backward(str cell, bool bidirectional, bool has_biases, bool[] mask, Tensor? grad,"
    " Tensor?[] grad_state, Tensor input, Tensor[] state, Tensor[] params, Tensor? lengths, Tensor"
    " output, Tensor[] saved) -> Tensor[]"
)
RECURRENT = torch.ops.torch_hlo.recurrent.default
RECURRENT_BACKWARD = torch.ops.torch_hlo.recurrent_backward.default


@frozen
class Cell:
    """One time step. The first state is the output.

    forward(inputs, hidden, state) -> new state, values that backward wants: `inputs`, `hidden` hold
    one Expr [batch, hidden] per gate. backward(gradients of the new state, output, saved) ->
    gradients of inputs, of hidden (the same list when they are equal), and of the old state apart
    from what comes through `hidden`.
    `hidden_bias`: the bias of the hidden part cannot be added to that of the inputs.
    """

    gates: int
    states: int
    saved: int
    forward: Callable
    backward: Callable
    hidden_bias: bool = False


def _lstm(
    inputs: Sequence[Expr],
    hidden: Sequence[Expr],
    state: Sequence[Expr],
) -> tuple[list[Expr], ...]:
    i, f, g, o = (x + y for x, y in zip(inputs, hidden, strict=True))
    i = logistic(i)
    f = logistic(f)
    g = tanh(g)
    o = logistic(o)
    c = f * state[1] + i * g
    return [o * tanh(c), c], [i, f, g, o, state[1]]


def _lstm_backward(
    grads: Sequence[Expr],
    output: Expr,
    saved: Sequence[Expr],
) -> tuple[list[Expr], list[Expr], list[Expr | None]]:
    i, f, g, o, before = saved
    dh, dc = grads
    c = tanh(f * before + i * g)
    dc += dh * o * (1 - c * c)
    gates = [
        dc * g * i * (1 - i),
        dc * before * f * (1 - f),
        dc * i * (1 - g * g),
        dh * c * o * (1 - o),
    ]
    return gates, gates, [None, dc * f]


def _gru(
    inputs: Sequence[Expr],
    hidden: Sequence[Expr],
    state: Sequence[Expr],
) -> tuple[list[Expr], ...]:
    ir, iz, ia = inputs
    hr, hz, hn = hidden
    r = logistic(ir + hr)
    z = logistic(iz + hz)
    n = tanh(ia + r * hn)
    (h,) = state
    return [n + z * (h - n)], [r, z, n, h, hn]


def _gru_backward(
    grads: Sequence[Expr],
    output: Expr | None,
    saved: Sequence[Expr],
) -> tuple[list[Expr], ...]:
    r, z, n, h, hn = saved
    (g,) = grads
    dn = g * (1 - z) * (1 - n * n)
    dz = g * (h - n) * z * (1 - z)
    dr = dn * hn * r * (1 - r)
    return [dr, dz, dn], [dr, dz, dn * r], [g * z]


def _simple(activation: Callable, derivative: Callable) -> Cell:
    """Elman's network: activation(inputs + hidden); `derivative` is that of the activation, in
    terms of its value."""

    def backward(
        grads: Sequence[Expr],
        output: Expr,
        saved: Sequence[Expr],
    ) -> tuple[list[Expr], list[Expr], list[None]]:
        gates = [grads[0] * derivative(output)]
        return gates, gates, [None]

    return Cell(
        1,
        1,
        0,
        lambda inputs, hidden, state: ([activation(inputs[0] + hidden[0])], []),
        backward,
    )


CELLS = {
    "lstm": Cell(4, 2, 5, _lstm, _lstm_backward),
    "gru": Cell(3, 1, 5, _gru, _gru_backward, hidden_bias=True),
    "rnn_tanh": _simple(tanh, lambda y: 1 - y * y),
    "rnn_relu": _simple(lambda x: larger(x, 0), lambda y: where(y > 0, y.like(1), 0)),
}


def _split(value: Expr, n: int) -> list[Expr]:
    return [Expr(_part(value.x, i, n)) for i in range(n)]


def _joined(parts: Sequence[Expr]) -> Expr:
    return Expr(concatenate([p.x for p in parts], -1))


def layers_of(params: Sequence, bidirectional: bool, has_biases: bool) -> list[list[tuple]]:
    """For each layer and direction (weight of the input, weight of the hidden state, their biases
    or None)."""
    each = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    groups = [(*params[i : i + each], *[None] * (4 - each)) for i in range(0, len(params), each)]
    return [groups[i : i + directions] for i in range(0, len(groups), directions)]


def _meta(
    cell: str,
    bidirectional: bool,
    has_biases: bool,
    save: bool,
    x: Tensor,
    state: Sequence[Tensor],
    params: Sequence[Tensor],
    lengths: Tensor | None,
) -> list[Tensor]:
    length, batch, _ = x.shape
    hidden = state[0].shape[2]
    layers = len(layers_of(params, bidirectional, has_biases))
    directions = 1 + bidirectional
    outputs = [
        x.new_empty(length, batch, directions * hidden) for _ in range(layers if save else 1)
    ]
    saved = [
        x.new_empty(length, batch, hidden)
        for _ in range(CELLS[cell].saved * layers * directions if save else 0)
    ]
    return [
        outputs[0],
        *(x.new_empty(s.shape) for s in state),
        *outputs[1:],
        *saved,
    ]


def _meta_backward(
    cell: str,
    bidirectional: bool,
    has_biases: bool,
    mask: Sequence[bool],
    grad: Tensor | None,
    grad_state: Sequence[Tensor | None],
    x: Tensor,
    state: Sequence[Tensor],
    params: Sequence[Tensor],
    lengths: Tensor | None,
    output: Tensor,
    saved: Sequence[Tensor],
) -> list[Tensor]:
    return [
        t.new_empty(t.shape) for t, wanted in zip((x, *state, *params), mask, strict=True) if wanted
    ]


_library.impl("recurrent", _meta, "Meta")
_library.impl("recurrent_backward", _meta_backward, "Meta")


def _part(x: Instruction, n: int, count: int) -> Instruction:
    """Part `n` of `count` of the last dimension."""
    size = x.dims[-1] // count
    return slice_dim(x, -1, n * size, (n + 1) * size)


def _over_time(x: Instruction) -> Instruction:
    """The sum over time and batch."""
    return promote.cast(reduce(compute(x).x, (0, 1)), x.dtype)


def _sum(a: Instruction, b: Instruction) -> Instruction:
    return (compute(a) + compute(b)).cast(a.dtype).x


def _lives(lengths: Instruction | None, x: Instruction) -> list[Instruction]:
    """[time, batch, 1]: whether a sequence has not ended; nothing when all are as long as `x`.
    States of those that have ended stay as they are."""
    if lengths is None:
        return []
    dims = (*x.dims[:2], 1)
    return [build.compare(iota(dims, 0).x, build.broadcast(lengths, dims, (1,)), "LT")]


def _where(
    lives: Sequence[Instruction],
    values: Sequence[Expr],
    others: Sequence[Expr],
) -> list[Expr]:
    """`values` of the sequences that have not ended, `others` of those that have."""
    return (
        [
            where(Expr(promote.operand(lives[0], "pred", v.dims)), v, o)
            for v, o in zip(values, others, strict=True)
        ]
        if lives
        else list(values)
    )


@lowers(RECURRENT)
def recurrent(
    cell: str,
    bidirectional: bool,
    has_biases: bool,
    save: bool,
    x: Instruction,
    state: Sequence[Instruction],
    params: Sequence[Instruction],
    lengths: Instruction | None,
) -> Instructions:
    c = CELLS[cell]
    last = []
    outputs = []
    kept = []
    lives = _lives(lengths, x)
    for layer in layers_of(params, bidirectional, has_biases):
        parts = []
        for direction, (w_in, w_hidden, b_in, b_hidden) in enumerate(layer):
            if b_in is not None and not c.hidden_bias:
                b_in = _sum(b_in, b_hidden)
                b_hidden = None
            gates = affine(x, w_in, b_in).cast(expected().dtype).x
            out, new, saved = _recurrence(
                c,
                direction == 1,
                save,
                gates,
                w_hidden,
                b_hidden,
                [select_dim(s, 0, len(last)) for s in state],
                lives,
            )
            parts.append(out)
            last.append(new)
            kept += saved
        x = concatenate(parts, -1) if bidirectional else parts[0]
        outputs.append(x)
    return (
        x,
        *(stack(s, 0) for s in zip(*last, strict=True)),
        *((*outputs[:-1], *kept) if save else ()),
    )


# units of a layer from which on a product with 8 rows is limited by reading the weights
LARGE = 512


def _recurrence(
    c: Cell,
    reverse: bool,
    save: bool,
    gates: Instruction,
    weight: Instruction,
    bias: Instruction | None,
    state: Sequence[Instruction],
    lives: Sequence[Instruction] = (),
) -> tuple[Instruction, list, list]:
    """(output, last state, what backward wants) of one direction from the inputs' `gates` [time,
    batch, gates * hidden]."""
    dtype = gates.dtype
    batch = gates.dims[1]
    hidden_size = weight.dims[1]
    few = (
        isinstance(batch, int)
        and isinstance(hidden_size, int)
        and batch <= (8 if hidden_size >= LARGE else 2)
    )
    # once, not in every step; few rows read it as fast as it is
    turned = weight if few else permute(weight, (1, 0))
    rest = [turned] if bias is None else [turned, bias]

    def step(
        carry: Sequence[Instruction],
        x: Sequence[Instruction],
        rest: Sequence[Instruction],
    ) -> tuple[list[Instruction], ...]:
        hidden = dot(carry[0], rest[0], (1,), (1 if few else 0,))
        if bias is not None:
            hidden += hidden.like(rest[1])
        old = [compute(s) for s in carry]
        new, saved = c.forward(_split(compute(x[0]), c.gates), _split(hidden, c.gates), old)
        new = _where(x[1:], new, old)
        new, saved = ([v.cast(dtype).x for v in values] for values in (new, saved))
        return new, [new[0], *(saved if save else ())]

    last, (out, *saved) = scan_loop(step, state, [gates, *lives], rest, gates.dims[0], reverse)
    return out, last, saved


@lowers(aten.mkldnn_rnn_layer)
def lstm_layer(
    x: Instruction,
    w_in: Instruction,
    w_hidden: Instruction,
    b_in: Instruction,
    b_hidden: Instruction,
    hx: Instruction,
    cx: Instruction,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> Results:
    """One layer and direction of an LSTM in inference: what PyTorch makes of one whose tensors
    differ in type, as under autocast."""
    if mode != 2 or num_layers != 1 or bidirectional or batch_first or train:
        raise LoweringError(
            f"mkldnn_rnn_layer({x.shape}): mode {mode}, {num_layers} layers,"
            f" bidirectional={bidirectional}, batch_first={batch_first}, train={train}: only one"
            " layer and direction of an LSTM (mode 2) in inference is taken; call torch.lstm"
        )
    bias = _sum(b_in, b_hidden) if has_biases else None
    out, last, _ = _recurrence(
        CELLS["lstm"],
        reverse,
        False,
        affine(x, w_in, bias).cast(expected().dtype).x,
        w_hidden,
        None,
        [select_dim(s, 0, 0) for s in (hx, cx)],
    )
    return (out, *(add_dim(s, 0) for s in last), promote.full(0, "u8", (0,)))


@lowers(RECURRENT_BACKWARD)
def recurrent_backward(
    cell: str,
    bidirectional: bool,
    has_biases: bool,
    mask: Sequence[bool],
    grad: Instruction | None,
    grad_state: Sequence[Instruction | None],
    x: Instruction,
    state: Sequence[Instruction],
    params: Sequence[Instruction],
    lengths: Instruction | None,
    output: Instruction,
    saved: Sequence[Instruction],
) -> Instructions:
    c = CELLS[cell]
    layers = layers_of(params, bidirectional, has_biases)
    lives = _lives(lengths, x)
    outputs = [*saved[: len(layers) - 1], output]
    kept = saved[len(layers) - 1 :]
    inputs = [x, *outputs[:-1]]
    width = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    d_state: list[tuple] = []  # per layer and direction, like d_params: layers are met last first
    d_params: list[Instruction | None] = []
    for number in reversed(range(len(layers))):
        d_input = None
        d_layer = []
        d_first = []
        for direction, weights in enumerate(layers[number]):
            n = number * width + direction
            d_gates, d_hidden, first = _recurrence_backward(
                c,
                direction == 1,
                None if grad is None else _part(grad, direction, width),
                [None if g is None else select_dim(g, 0, n) for g in grad_state],
                weights[1],
                [select_dim(s, 0, n) for s in state],
                _part(outputs[number], direction, width),
                kept[n * c.saved : (n + 1) * c.saved],
                lives,
            )
            d_first.append(first)
            wanted = mask[1 + len(state) + n * each :]
            previous = _before(outputs[number], state[0], n, direction, width)
            products = [(d_gates, inputs[number]), (d_hidden, previous)]
            d_layer += _parameter_gradients(products, weights, wanted, has_biases)
            if number or mask[0]:
                through = dot(d_gates, weights[0], (2,), (0,))
                d_input = through if d_input is None else d_input + through
        grad = None if d_input is None else d_input.cast(x.dtype).x
        d_params = d_layer + d_params
        d_state = d_first + d_state
    found = [grad, *(stack(s, 0) for s in zip(*d_state, strict=True)), *d_params]
    return tuple(g for g, wanted in zip(found, mask, strict=True) if wanted)


def _parameter_gradients(
    products: Sequence[tuple[Instruction, Instruction]],
    weights: Sequence[Instruction | None],
    wanted: Sequence[bool],
    has_biases: bool,
) -> list[Instruction | None]:
    """Of the two weights of one direction, and of its biases. `products`: for each weight the
    gradient of what it gives, and what it is applied to."""
    found = [
        dot(g, v, (0, 1), (0, 1)).cast(w.dtype).x if want else None
        for (g, v), w, want in zip(products, weights, wanted, strict=False)
    ]
    if has_biases:
        found += [
            _over_time(g) if want else None
            for (g, _), want in zip(products, wanted[2:], strict=False)
        ]
    return found


def _recurrence_backward(
    c: Cell,
    reverse: bool,
    grad: Instruction | None,
    grad_state: Sequence[Instruction | None],
    weight: Instruction,
    state: Sequence[Instruction],
    output: Instruction,
    saved: Sequence[Instruction],
    lives: Sequence[Instruction],
) -> tuple[Instruction, Instruction, list]:
    """Gradients of (the inputs' gates, the hidden state's gates, the first state) of one
    direction."""
    dtype = output.dtype
    length = output.dims[0]
    carry = [
        promote.full(0, dtype, s.dims) if g is None else g
        for g, s in zip(grad_state, state, strict=True)
    ]
    xs = [output, *saved, *([] if grad is None else [grad]), *lives]

    def step(
        carry: Sequence[Instruction],
        x: Sequence[Instruction],
        rest: Sequence[Instruction],
    ) -> tuple[list[Instruction], ...]:
        x, alive = x[: len(xs) - len(lives)], x[len(xs) - len(lives) :]
        output, *saved = (compute(v) for v in (x if grad is None else x[:-1]))
        grads = [compute(g) for g in carry]
        if grad is not None:
            grads[0] += compute(x[-1])
        zeros = [g.like(0) for g in grads]
        inputs, hidden, before = c.backward(_where(alive, grads, zeros), output, saved)
        joined = [
            _joined(part).cast(dtype).x
            for part in ([inputs] if inputs is hidden else [inputs, hidden])
        ]
        through = dot(joined[-1], rest[0], (1,), (0,))
        before = [
            through if before[0] is None else before[0] + through,
            *before[1:],
        ]
        if alive:
            before = [b + g for b, g in zip(before, _where(alive, zeros, grads), strict=True)]
        return [g.cast(dtype).x for g in before], joined

    first, ys = scan_loop(step, carry, xs, [weight], length, not reverse)
    return ys[0], ys[-1], first


def _before(
    output: Instruction,
    state: Instruction,
    n: int,
    direction: int,
    width: int,
) -> Instruction:
    """The hidden state before every time step."""
    out = _part(output, direction, width)
    length = output.dims[0]
    ends = (1, length) if direction else (0, length - 1)
    previous = [slice_dim(state, 0, n, n + 1), slice_dim(out, 0, *ends)]
    return concatenate(previous[::-1] if direction else previous, 0)


# ---- cells


def _gates(x: Instruction, bias: Instruction | None, n: int) -> list[Expr]:
    value = compute(x)
    if bias is not None:
        value += value.like(bias)
    return _split(value, n)


@lowers(aten._thnn_fused_lstm_cell)
def lstm_cell(
    input_gates: Instruction,
    hidden_gates: Instruction,
    cx: Instruction,
    input_bias: Instruction | None = None,
    hidden_bias: Instruction | None = None,
) -> Results:
    """(hy, cy, workspace): the workspace holds the four activated gates."""
    (hy, cy), saved = _lstm(
        _gates(input_gates, input_bias, 4),
        _gates(hidden_gates, hidden_bias, 4),
        [None, compute(cx)],
    )
    return finish_all(hy, cy, _joined(saved[:4]))


@lowers(aten._thnn_fused_lstm_cell_backward_impl)
def lstm_cell_backward(
    grad_hy: Instruction | None,
    grad_cy: Instruction | None,
    cx: Instruction,
    cy: Instruction,
    workspace: Instruction,
    has_bias: bool,
) -> Results:
    """(gradient of the gates, gradient of cx, gradient of the bias)."""
    before = compute(cx)
    grads = [before * 0 if g is None else compute(g) for g in (grad_hy, grad_cy)]
    gates, _, (_, dc) = _lstm_backward(grads, None, [*_gates(workspace, None, 4), before])
    gates = _joined(gates)
    return finish_all(gates, dc, Expr(reduce(gates.x, (0,))) if has_bias else None)


@lowers(aten._thnn_fused_gru_cell)
def gru_cell(
    input_gates: Instruction,
    hidden_gates: Instruction,
    hx: Instruction,
    input_bias: Instruction | None = None,
    hidden_bias: Instruction | None = None,
) -> Results:
    """(hy, workspace): reset, update, new gates, the old state, and the hidden part of the new
    gate."""
    (hy,), saved = _gru(
        _gates(input_gates, input_bias, 3),
        _gates(hidden_gates, hidden_bias, 3),
        [compute(hx)],
    )
    return finish_all(hy, _joined(saved))


@lowers(aten._thnn_fused_gru_cell_backward)
def gru_cell_backward(
    grad: Instruction,
    workspace: Instruction,
    has_bias: bool,
) -> Results:
    """Gradients of (input gates, hidden gates, hx, input bias, hidden bias)."""
    inputs, hidden, (h,) = _gru_backward([compute(grad)], None, _gates(workspace, None, 5))
    inputs = _joined(inputs)
    hidden = _joined(hidden)
    biases = [Expr(reduce(v.x, (0,))) if has_bias else None for v in (inputs, hidden)]
    return finish_all(inputs, hidden, h, *biases)
