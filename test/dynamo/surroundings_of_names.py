"""More functions whose surroundings change (see surroundings.py): what names stand for. Classes,
globals, caches, PyTorch's modes, and which parameters an optimizer has."""

from __future__ import annotations

import abc
import builtins
import collections
import decimal
import functools
import os
import sys
import types

import numpy as np
import torch
from torch import nn

from .surroundings import Box, case

TANH = nn.Tanh.forward


class Toggled:
    """Each call takes the next of two values."""

    def __init__(self, put, *values):
        self.put, self.values = put, values

    def __call__(self):
        self.values = self.values[::-1]
        self.put(self.values[0])


def trained(device, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)

    def fn(x):
        optimizer.zero_grad()
        model(x / 4).square().mean().backward()
        optimizer.step()
        return model.weight.detach().clone()

    return model, optimizer, fn


def replacing(kind, name, function):
    """A change: the function of a class is another."""
    return Toggled(lambda f: setattr(kind, name, f), getattr(kind, name), function)


@case
def forward_of_a_class(device):
    class Double(nn.Module):
        def forward(self, x):
            return x * 2

    return Double(), replacing(Double, "forward", lambda self, x: x * 7)


@case
def forward_of_a_class_of_pytorch(device):
    change = Toggled(lambda f: setattr(nn.Tanh, "forward", f), TANH, lambda self, x: x * 3)
    tanh = nn.Tanh()
    return lambda x: tanh(x), change


@case
def special_methods(device):
    class Value:
        def __getitem__(self, key):
            return 2.0

        def __eq__(self, other):
            return True

        def __iter__(self):
            return iter([1.0, 2.0])

    value = Value()
    changes = [
        replacing(Value, "__getitem__", lambda self, key: key + 3.0),
        replacing(Value, "__eq__", lambda self, other: False),
        replacing(Value, "__iter__", lambda self: iter([5.0])),
    ]
    return (
        lambda x: x * value[1] + (1 if value == 3 else 2) + sum(value),
        lambda: [change() for change in changes],
    )


@case
def getattribute_appears(device):
    class Value:
        a = 2.0

    value = Value()

    def change():
        Value.__getattribute__ = lambda self, name: 9.0 if name == "a" else None

    return lambda x: x * value.a, change


@case
def attribute_in_place_of_getattr(device):
    class Value:
        def __getattr__(self, name):
            return 2.0

    value = Value()
    return lambda x: x * value.a, lambda: setattr(value, "a", 7.0)


@case
def attribute_of_a_metaclass(device):
    class Meta(type):
        scale = 2.0

    Value = Meta("Value", (), {})
    return lambda x: x * Value.scale, lambda: setattr(Meta, "scale", Meta.scale + 1)


@case
def class_of_an_empty_dictionary(device):
    class Made(dict):
        value = 2.0

        def __missing__(self, key):
            return self.value

    made = Made()
    return lambda x: x * made["a"], lambda: setattr(Made, "value", Made.value + 1)


@case
def key_that_was_missing(device):
    first, second = {}, {"k": 2.0}
    chain = collections.ChainMap(first, second)
    return lambda x: x * chain["k"], lambda: first.update(k=5.0 + len(first))


@case
def environment_that_was_missing(device):
    name = "TORCH_HLO_TEST_MISSING"
    os.environ.pop(name, None)
    return lambda x: x * float(os.environ.get(name, "1.5")), lambda: os.environ.update({name: "3"})


@case
def builtin_hidden_by_a_global(device):
    scope = {}
    exec("def fn(x):\n    return x * max(1, 2)", scope)
    return scope["fn"], lambda: scope.update(max=lambda a, b: 7)


@case
def module_that_cannot_be_imported(device):
    module = types.ModuleType("nowhere")
    exec("scale = 2.0\ndef fn(x):\n    return x * scale", vars(module))
    return lambda x: module.fn(x), lambda: setattr(module, "scale", module.scale + 1)


@case
def cache_with_effects(device):
    calls = [0]

    @functools.cache
    def scale(k):
        calls[0] += 1
        return float(calls[0])

    return lambda x: x * scale(1) + calls[0], scale.cache_clear


@case
def cached_tensor(device):
    box = Box(value=2.0)

    @functools.lru_cache
    def table(n, on):
        return torch.full((n,), box.value, device=on)

    def change():
        box.value += 1
        if box.value > 3:
            table(4, device).add_(1)

    return lambda x: x * table(x.shape[0], device), change


@case
def cached_method(device):
    class Value:
        scale = 2.0

        @functools.cache  # noqa: B019
        def times(self, k):
            return self.scale * k

    value = Value()

    def change():
        value.scale += 1
        Value.times.cache_clear()

    return lambda x: x * value.times(2), change


@case
def cache_replaced(device):
    box = Box(f=functools.cache(lambda k: 2.0))
    return lambda x: x * box.f(1), lambda: setattr(box, "f", functools.cache(lambda k: 5.0))


@case
def hook_of_all_modules(device):
    model, handles = nn.Sigmoid(), []

    def change():
        if handles:
            return handles.pop().remove()
        hook = nn.modules.module.register_module_forward_hook
        handles.append(hook(lambda module, args, result: result * 2))

    return lambda x: model(x), change


@case
def dtype_of_autocast(device):
    dtype = torch.get_autocast_dtype(device)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    weight = torch.full((4, 4), 0.3, device=device)

    def fn(x):
        with torch.autocast(device):
            y = x @ weight
        return x * (1 if y.dtype == dtype else 2)

    return fn, Toggled(lambda d: torch.set_autocast_dtype(device, d), dtype, other)


@case
def inference_mode_inside(device):
    box = Box(on=False)

    def fn(x):
        with torch.inference_mode(box.on):
            y = x * 2
        return y * (3 if y.is_inference() else 1)

    return fn, lambda: setattr(box, "on", not box.on)


@case
def range_of_an_object(device):
    box = Box(r=range(2))
    return lambda x: x * sum(box.r), lambda: setattr(box, "r", range(1, len(box.r) + 3))


@case
def decimal_of_an_object(device):
    box = Box(d=decimal.Decimal("1.5"))
    return lambda x: x * float(box.d), lambda: setattr(box, "d", box.d + 1)


@case
def gradient_of_a_changing_power(device):
    weight, box = nn.Parameter(torch.ones(4, device=device)), Box(p=2)
    return (
        lambda x: torch.autograd.grad(((x * weight) ** box.p).sum(), weight)[0],
        lambda: setattr(box, "p", box.p + 1),
    )


@case
def step_of_an_optimizer_replaced(device):
    model, optimizer, fn = trained(device)
    return fn, lambda: setattr(optimizer, "step", lambda: None)


@case
def scheduler_made_later(device):
    model, optimizer, fn = trained(device)
    return fn, lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5).step()


@case
def parameter_exchanged_under_an_optimizer(device):
    model, optimizer, fn = trained(device)

    def change():
        model.weight = nn.Parameter(torch.full((4, 4), 0.5, device=device))

    return fn, change


@case
def weights_tied_later(device):
    model, optimizer, fn = trained(device)
    other, first = nn.Linear(4, 4).to(device), model.forward
    other.load_state_dict(model.state_dict())
    optimizer.add_param_group({"params": list(other.parameters())})
    model.forward = lambda x: other(first(x))
    return fn, lambda: setattr(other, "weight", model.weight)


@case
def module_of_that_name_replaced(device):
    def put(scale):
        sys.modules["torch_hlo_test_module"] = module = types.ModuleType("torch_hlo_test_module")
        module.scale = scale

    def fn(x):
        from torch_hlo_test_module import scale

        return x * scale

    put(2.0)
    return fn, Toggled(put, 2.0, 5.0)


@case
def builtin_replaced(device):
    builtins.torch_hlo_test_scale = lambda: 2.0
    scope = {}
    exec("def fn(x):\n    return x * torch_hlo_test_scale()", scope)
    return scope["fn"], replacing(builtins, "torch_hlo_test_scale", lambda: 5.0)


@case
def method_of_tensors_replaced(device):
    return lambda x: x.square(), replacing(torch.Tensor, "square", lambda x: x * 7)


@case
def names_of_an_object(device):
    box = Box(a=1)
    return lambda x: x * len(vars(box)), lambda: setattr(box, f"b{len(vars(box))}", 1)


@case
def class_registered_with_an_abstract_one(device):
    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Value:
        pass

    value = Value()
    return lambda x: x * (2 if isinstance(value, Abstract) else 3), lambda: Abstract.register(Value)


@case
def class_that_says_what_is_an_instance(device):
    class Meta(type):
        def __instancecheck__(cls, value):
            return cls.on

    kind, value = Meta("Kind", (), {"on": True}), Box()
    return (
        lambda x: x * (2 if isinstance(value, kind) else 3),
        lambda: setattr(kind, "on", not kind.on),
    )


@case
def number_of_a_class_of_its_own(device):
    class More(float):
        def __mul__(self, x):
            return x * (float(self) + 1)

    box = Box(scale=More(2.0))
    return lambda x: box.scale * x, lambda: setattr(box, "scale", More(float(box.scale) + 1))


@case
def code_of_the_function_itself(device):
    def fn(x):
        return x * 2

    def other(x):
        return x * 3

    return fn, Toggled(lambda code: setattr(fn, "__code__", code), fn.__code__, other.__code__)


@case
def step_of_a_class_of_optimizers_replaced(device):
    model, optimizer, fn = trained(device)
    return fn, replacing(torch.optim.SGD, "step", lambda self: None)


@case
def mode_of_functions_entered(device):
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            return result * 2 if function in (torch.mul, torch.Tensor.mul) else result

    mode = Doubles()
    left = [lambda: mode.__exit__(None, None, None), mode.__enter__]
    return lambda x: x * 3, lambda: left.pop()()


@case
def hooks_of_saved_tensors_entered(device):
    weight = torch.ones(4, device=device, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
    left = [lambda: hooks.__exit__(None, None, None), hooks.__enter__]
    return (
        lambda x: torch.autograd.grad((x * weight).exp().sum(), weight)[0],
        lambda: left.pop()(),
    )


@case
def gradients_switched_inside(device):
    weight = torch.ones(4, device=device, requires_grad=True)

    def fn(x):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        y = x * weight
        return y * (2 if before else 3)

    return fn, lambda: torch.set_grad_enabled(True)


@case
def version_of_a_tensor(device):
    t = torch.ones(4, device=device)
    return lambda x: x * t._version, lambda: t.add_(1)


@case
def arrays_that_numpy_draws(device):
    np.random.seed(0)

    def fn(x):
        return x * torch.from_numpy(np.random.rand(4).astype(np.float32)).to(x.device)

    return fn, lambda: np.random.seed(5)
