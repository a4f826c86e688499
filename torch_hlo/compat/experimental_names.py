"""torch_xla.experimental: loops in the program, checkpointing, attention."""

import contextlib
import copy

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as _checkpoint

import torch_hlo
from torch_hlo import metrics
from torch_hlo.hlo.ir import build
from torch_hlo.lazy.aten import dispatch
from torch_hlo.lazy.record import HloTensor, read, write
from torch_hlo.lowering.core import RECORDING, Node, Out, lowers

# scripts clear them; programs are kept by the device
_SCAN_COMPUTATION_CACHE, _ONE_LAYER_CACHE = {}, {}


def scan(
    fn,
    init,
    xs,
    partition_fn=None,
    is_fn_pure=True,
):
    """torch_hlo.scan, with gradients. Backward computes `fn` again (`partition_fn` has no say)."""
    if not callable(fn):
        raise ValueError(f"`fn` {fn} must be callable.")
    leaves = pytree.tree_leaves(xs)
    if not leaves:
        raise ValueError(f"`xs` {xs} is an empty PyTree.")
    if len({len(x) for x in leaves}) > 1:
        raise ValueError(
            "The leaves of the `xs` input PyTree must have the same leading dimension size. Got"
            f" {[len(x) for x in leaves]}"
        )
    rebuild: list = []

    def step(carry, x):
        new, y = fn(carry, x)
        kept, back = tree_flatten_none(y)
        rebuild[:] = [back]
        return new, kept

    carry, ys = torch_hlo.scan(step, init, xs)
    return carry, rebuild[0](ys)


def scan_layers(
    layers,
    input_data,
    partition_fn=None,
    is_layer_pure=False,
):
    """The layers one after another as one loop over their stacked parameters."""
    found = list(layers)
    if not found:
        return input_data
    states = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in found]
    for i, state in enumerate(states[1:], 1):
        if missing := states[0].keys() ^ state.keys():
            raise ValueError(f"Layer {i} has mismatched keys: {', '.join(sorted(missing))}.")
        for name, value in state.items():
            if value.shape != (first := states[0][name]).shape:
                raise ValueError(
                    f"Shape mismatch for '{name}' in layer {i}: expected {first.shape}, got"
                    f" {value.shape}."
                )
    stacked = {name: torch.stack([s[name] for s in states]) for name in states[0]}
    example = copy.deepcopy(found[0])
    carried = isinstance(input_data, (tuple, list))

    def layer(carry, state):
        result = torch.func.functional_call(example, state, tuple(carry) if carried else (carry,))
        return result, ()

    if not states[0]:  # layers without parameters: nothing to loop over
        for m in found:
            input_data = m(*input_data) if carried else m(input_data)
        return input_data
    return scan(layer, input_data, stacked)[0]


def fori_loop(lower, upper, body_fun, *values):
    """`values = body_fun(*values)`, `upper - lower` times, as a loop of the program; returns
    (0, value)."""

    def body(i, *carried):
        result = body_fun(*carried)
        return (i - 1, *(result if isinstance(result, (tuple, list)) else (result,)))

    return torch_hlo.while_loop(lambda i, *_: i > 0, body, (upper - lower, *values))


def while_loop(
    cond_fn,
    body_fn,
    carried_inputs,
    additional_inputs=None,
):
    return torch_hlo.while_loop(cond_fn, body_fn, carried_inputs)


def assume_pure(fn, **options):
    """The function: recording is not traced anew where the step is known."""
    return fn


PureModule = assume_pure  # of a module


def gradient_accumulation(
    train_step,
    iterable_tensors,
    model,
    *carried_tensors,
):
    """`train_step` of each slice of the tensors, and backward of its loss; returns the mean of the
    losses, and what is carried."""
    total, carried = 0, carried_tensors
    if not iterable_tensors:
        raise ValueError("gradient_accumulation: `iterable_tensors` is empty")
    count = len(iterable_tensors[0])
    for i in range(count):
        result = train_step(*[t[i] for t in iterable_tensors], *carried)
        loss, *carried = result if isinstance(result, (tuple, list)) else (result,)
        loss = loss / count
        loss.backward()
        total = total + loss.detach()
    return (total, *carried) if carried else total


def checkpoint(function, *args, **kwargs):
    """torch.utils.checkpoint, which the device takes as it is."""
    kwargs.setdefault("use_reentrant", True)
    return _checkpoint(function, *args, **kwargs)


@torch.library.custom_op("torch_hlo::barrier", mutates_args=())
def _barrier(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


@lowers(torch.ops.torch_hlo.barrier.default)
def _opt_barrier(tensors):
    whole = build.opt_barrier(build.tuple_(*tensors))
    return tuple(build.get_tuple_element(whole, i) for i in range(len(tensors)))


def optimization_barrier_(tensors):
    """What uses the tensors from here on is not shared with what used them before, and needs all of
    them to be there. Tensors of other devices stay as they are."""
    found = [t for t in tensors if isinstance(t, HloTensor)]
    with RECORDING:
        shapes = tuple(t._meta.hlo for t in found)
        node = Node(torch.ops.torch_hlo.barrier.default, ([*map(read, found)],), {}, shapes)
        for i, t in enumerate(found):
            write(t, Out(node, i))


def tree_flatten_none(tree):
    """Leaves without those that are None, and a function that puts them back."""
    flat, form = pytree.tree_flatten(tree)
    kept = [x for x in flat if x is not None]

    holes = [x is None for x in flat]

    def rebuild(leaves):
        found = iter(leaves)
        return pytree.tree_unflatten([None if hole else next(found) for hole in holes], form)

    return kept, rebuild


def repeat_with_fixed_output_size(input, repeats, total_repeat_length):
    """Each element `repeats` times, cut or filled with the last one to a fixed length."""
    places = torch.arange(total_repeat_length, device=input.device)
    found = torch.searchsorted(repeats.cumsum(0), places, right=True)
    return input[found.clamp(max=len(input) - 1)]


def flash_attention(
    q,
    k,
    v,
    causal=False,
    q_segment_ids=None,
    kv_segment_ids=None,
    sm_scale=1.0,
    *,
    ab=None,
    partition_spec=None,
    mesh=None,
):
    """Attention by the device's own kernel. `ab` is added to the scores; segments attend within."""
    mask = ab
    if q_segment_ids is not None:
        same = q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :]
        mask = torch.where(same, 0.0 if mask is None else mask, float("-inf"))
    if causal and mask is not None:
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        mask = torch.where(future, float("-inf"), mask)
        causal = False
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, mask, is_causal=causal, scale=sm_scale)


class _Mode:
    on = False


# what single operations take is counted for itself
_EAGER = {name: f"EagerOp{name}" for name in ("CompileTime", "ExecuteTime")}


def eager_mode(enable):
    if enable != _Mode.on:
        dispatch.set_eager(enable)
        metrics.rename(_EAGER if enable else {})
        _Mode.on = enable


def is_eager_mode():
    return _Mode.on


@contextlib.contextmanager
def eager_mode_context(enable):
    before = _Mode.on
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)
