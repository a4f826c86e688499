"""A second opinion on recording: an engine that runs recorded nodes one by one with aten on the
CPU.

    with session.use(Interpreter()): ...

It knows nothing of lowering and compiling, so a difference from PyTorch's eager CPU result is a
mistake in lazy/."""

from __future__ import annotations

import math
import threading

import torch

from test.lowering.support import evaluated
from torch_hlo.lazy.record.engine import Engine
from torch_hlo.lazy.record.storage import Array, Number, pending_storages
from torch_hlo.lazy.record.views import bitcast_on_host
from torch_hlo.lowering.core.graph import Node, Out
from torch_hlo.lowering.core.registry import HLO_TO_TORCH

aten = torch.ops.aten
_CAUSAL = aten._scaled_dot_product_fused_attention_overrideable.default


class Interpreter(Engine):
    """An engine for `session.use`. Device values are CPU tensors (contiguous, never written
    to)."""

    def __init__(self) -> None:
        self.results: dict[Node, list] = {}
        self.steps = 0
        self.lock = threading.RLock()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def mark_step(self, wait: bool = False) -> None:
        with self.lock:
            self.steps += 1
            for storage in pending_storages():
                out = storage.value
                if type(out) is Out:
                    storage.bind(out, self.evaluate(out))
            self.results.clear()

    def synchronize(self) -> None:
        self.mark_step()

    def sync(self, tensors=None) -> None:
        self.mark_step()

    def materialize(self, tensors) -> list[torch.Tensor]:
        results = []
        for t in tensors:
            # another thread may write between the step and here
            while type(t._storage.value) is Out:
                self.mark_step()
            value = t._storage.value.data
            chain = []
            view = t._view
            while view is not None:
                chain.append(view)
                view = view.parent
            for view in reversed(chain):
                value = _dense(SPECIAL.get(view.op, view.op)(value, *view.args))
            results.append(value.clone(memory_format=torch.contiguous_format))
        return results

    def evaluate(self, out: Out) -> torch.Tensor:
        stack = [out.node]
        while stack:
            node = stack[-1]
            if node in self.results:
                stack.pop()
                continue
            missing = [
                n
                for n in _operands((node.args, tuple(node.kwargs.values())))
                if n not in self.results
            ]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self.results[node] = self.run(node)
        return self.results[out.node][out.index]

    def run(self, node: Node) -> list:
        kwargs = {k: self.value(v) for k, v in node.kwargs.items()}
        args = [self.value(a) for a in node.args]
        seed, offset = kwargs.pop("seed", None), kwargs.pop("offset", None)
        special = SPECIAL.get(node.target)
        if node.target.namespace == "torch_hlo" or node.target in LOWERED:
            result = evaluated(
                node.target,
                args,
                kwargs,
                [s and torch.empty(s.dims, dtype=HLO_TO_TORCH[s.dtype]) for s in node.outs],
            )
        elif special is not None:
            result = special(*args, **kwargs)
        elif seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(hash((seed, offset)) & 0x7FFFFFFF)
                result = node.target(*args, **kwargs)
        else:
            result = node.target(*args, **kwargs)
        flat = _flatten(result)
        assert len(flat) == len(node.outs), (
            f"{node.target}: {len(flat)} results, {len(node.outs)} recorded"
        )
        for i, (value, shape) in enumerate(zip(flat, node.outs)):
            if value is not None and shape is not None:
                # statistics that batch norm does not compute in eval mode
                if value.numel() == 0 and shape.size:
                    value = flat[i] = torch.zeros(shape.dims, dtype=value.dtype)
                assert tuple(value.shape) == shape.dims, (
                    f"{node.target}: {tuple(value.shape)}, recorded {shape}"
                )
        return [None if v is None else _dense(v) for v in flat]

    def value(self, x):
        kind = type(x)
        if kind is Out:
            return self.results[x.node][x.index]
        if kind is Array:
            return x.data
        if kind is Number:
            return x.value
        if kind in (list, tuple):
            return [self.value(v) for v in x]
        return x


def _dense(t: torch.Tensor) -> torch.Tensor:
    t = t.resolve_conj().resolve_neg()
    return t.contiguous() if t.numel() else torch.empty(t.shape, dtype=t.dtype)


def _operands(value):
    for x in value:
        if type(x) is Out:
            yield x.node
        elif type(x) in (list, tuple):
            yield from _operands(x)


def _flatten(result) -> list:
    if isinstance(result, (tuple, list)):
        return [v for r in result for v in _flatten(r)]
    return [result] if isinstance(result, torch.Tensor) or result is None else []


def _linear_backward(x, grad, weight, mask):
    count = math.prod(x.shape[:-1])  # of no elements, -1 says nothing
    rows, grows = x.reshape(count, x.shape[-1]), grad.reshape(count, grad.shape[-1])
    return (
        (grows @ weight).reshape(x.shape) if mask[0] else None,
        grows.t() @ rows if mask[1] else None,
        grows.sum(0) if mask[2] else None,
    )


def _attention(q, k, v, bias=None, dropout_p=0.0, is_causal=False, debug=False, scale=None):
    groups = q.shape[1] // k.shape[1]
    k2, v2 = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k2, v2, bias, 0.0, is_causal, scale=scale
    )
    state = torch.zeros((), dtype=torch.int64)
    return out, torch.zeros(q.shape[:3]), None, None, state, state, None


def _attention_backward(
    grad,
    q,
    k,
    v,
    bias,
    mask,
    out,
    lse,
    cq,
    ck,
    mq,
    mk,
    p,
    causal,
    seed,
    offset,
    scale=None,
):
    groups = q.shape[1] // k.shape[1]
    k2, v2 = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k2.transpose(-1, -2) * scale
    if bias is not None:
        scores = (
            scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
        )
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf")
        )
    w = scores.softmax(-1)
    dw = grad @ v2.transpose(-1, -2)
    ds = w * (dw - (dw * w).sum(-1, keepdim=True))

    def ungroup(t):
        return t.unflatten(1, (-1, groups)).sum(2)

    grads = [
        ds @ k2 * scale,
        ungroup(ds.transpose(-1, -2) @ q * scale),
        ungroup(w.transpose(-1, -2) @ grad),
    ]
    grads.append(ds.sum_to_size(bias.shape) if bias is not None else None)
    return tuple(g if m else None for g, m in zip(grads, mask))


def _fused_adam(op):
    def run(params, grads, exp_avgs, exp_avg_sqs, max_sqs, steps, **kwargs):
        lists = [[t.clone() for t in ts] for ts in (params, grads, exp_avgs, exp_avg_sqs, max_sqs)]
        op(*lists, steps, **kwargs)
        return lists

    return run


# Without a kernel on the CPU: what the lowering means.
LOWERED = {
    aten._fused_rms_norm_backward.default,
    aten._thnn_fused_lstm_cell.default,
    aten._thnn_fused_lstm_cell_backward_impl.default,
    aten._thnn_fused_gru_cell.default,
    aten._thnn_fused_gru_cell_backward.default,
}
SPECIAL = {
    aten.linear_backward.default: _linear_backward,
    _CAUSAL: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
    aten._fused_adamw.default: _fused_adam(aten._fused_adamw_.default),
    aten._fused_adam.default: _fused_adam(aten._fused_adam_.default),
    aten.view.dtype: bitcast_on_host,
    aten.empty.memory_format: lambda size, dtype=None, memory_format=None: torch.zeros(
        size, dtype=dtype
    ),
}
