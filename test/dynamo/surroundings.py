"""Functions whose surroundings change between calls: what a captured step must notice.

A case is a function of a device that returns (function of x, change): the change is made after
three calls, and each call must do what it does on the CPU without being captured."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import itertools
import os
import tempfile
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import torch
from torch import nn

CASES = {}
SCALE = 2.0
TABLE = {"a": [1.0, {"b": 2.0}]}
Pair = namedtuple("Pair", "a b")


def case(make):
    CASES[make.__name__.replace("_", " ")] = make
    return make


class Box:
    factor = 2.0

    def __init__(self, **values):
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("value", "inner")

    def __init__(self, value, inner=None):
        self.value, self.inner = value, inner


@case
def nested_attribute(device):
    cfg = Box(model=Box(scale=[1.0, 2.0]))
    return lambda x: x * cfg.model.scale[0], lambda: cfg.model.scale.__setitem__(0, 3.0)


@case
def class_attribute(device):
    kind = type("Kind", (Box,), {"factor": 2.0})
    box = kind()
    return lambda x: x * box.factor, lambda: setattr(kind, "factor", 5.0)


@case
def class_attribute_shadowed(device):
    box = type("Kind", (Box,), {"factor": 2.0})()
    return lambda x: x * box.factor, lambda: setattr(box, "factor", 5.0)


@case
def slots(device):
    s = Slotted(2.0, Slotted(3.0))
    return lambda x: x * s.inner.value, lambda: setattr(s.inner, "value", 7.0)


@case
def function_held_by_object(device):
    box = Box(act=torch.relu)
    return lambda x: box.act(x), lambda: setattr(box, "act", torch.sigmoid)


@case
def function_in_dict(device):
    table = {"f": lambda x: x + 1}
    return lambda x: table["f"](x), lambda: table.update(f=lambda x: x - 1)


@case
def set_grows(device):
    names = {"a"}
    return lambda x: x * 2 if "b" in names else x, lambda: names.add("b")


@case
def set_length(device):
    names = {"a"}
    return lambda x: x * len(names), lambda: names.add("b")


@case
def environment(device):
    os.environ["TORCH_HLO_TEST_SCALE"] = "2"
    return (
        lambda x: x * float(os.environ["TORCH_HLO_TEST_SCALE"]),
        lambda: os.environ.update(TORCH_HLO_TEST_SCALE="3"),
    )


@case
def environment_by_getenv(device):
    os.environ["TORCH_HLO_TEST_FLAG"] = ""
    return (
        lambda x: x * 2 if os.getenv("TORCH_HLO_TEST_FLAG") else x,
        lambda: os.environ.update(TORCH_HLO_TEST_FLAG="1"),
    )


@case
def file_content(device):
    path = tempfile.mktemp()
    with open(path, "w") as file:
        file.write("2")

    def fn(x):
        with open(path) as file:
            return x * float(file.read())

    def change():
        with open(path, "w") as file:
            file.write("3")

    return fn, change


@case
def context_variable(device):
    variable = contextvars.ContextVar("v", default=2.0)
    return lambda x: x * variable.get(), lambda: variable.set(4.0)


@case
def thread_local(device):
    local = threading.local()
    local.scale = 2.0
    return lambda x: x * local.scale, lambda: setattr(local, "scale", 4.0)


@case
def attribute_of_a_tensor(device):
    t = torch.ones(4).to(device)
    t.scale = 2.0
    return lambda x: x * t * t.scale, lambda: setattr(t, "scale", 3.0)


@case
def attribute_of_a_parameter(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    layer.weight.lr_scale = 1.0
    return lambda x: layer(x) * layer.weight.lr_scale, lambda: setattr(
        layer.weight, "lr_scale", 3.0
    )


@case
def momentum_turned_on(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()

    return fn, lambda: optimizer.param_groups[0].update(momentum=0.9)


@case
def weight_decay_and_betas(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()

    return fn, lambda: optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.5, 0.9), lr=0.05)


@case
def optimizer_state_loaded(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()

    def change():
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["exp_avg"] = values["exp_avg"] * 0 + 1
        optimizer.load_state_dict(state)

    return fn, change


@case
def optimizer_state_cleared(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()

    return fn, lambda: optimizer.state.clear()


@case
def optimizer_replaced(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    box = Box(optimizer=torch.optim.SGD(layer.parameters(), 0.1))

    def fn(x):
        box.optimizer.zero_grad()
        layer(x).square().sum().backward()
        box.optimizer.step()
        return layer.weight.detach().clone()

    return fn, lambda: setattr(box, "optimizer", torch.optim.SGD(layer.parameters(), 0.5))


@case
def optimizer_hook(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()

    def halve(*args):
        with torch.no_grad():
            layer.weight.mul_(0.5)

    return fn, lambda: optimizer.register_step_post_hook(halve)


@case
def parameter_frozen(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return torch.cat([layer.weight.detach(), layer.bias.detach()[None]])

    return fn, lambda: layer.weight.requires_grad_(False)


@case
def two_arguments_become_one_tensor(device):
    a, b = torch.ones(4).to(device), torch.full((4,), 2.0).to(device)
    box = Box(a=a, b=b)

    def fn(x):
        box.a.add_(x.sum())
        return box.a + box.b * 10

    return fn, lambda: setattr(box, "b", box.a)


@case
def an_argument_becomes_a_view_of_another(device):
    a, b = torch.ones(4).to(device), torch.full((2,), 2.0).to(device)
    box = Box(a=a, b=b)

    def fn(x):
        box.a.add_(x.sum())
        return box.a.sum() + box.b * 10

    return fn, lambda: setattr(box, "b", box.a[1:3])


@case
def a_view_moves(device):
    a = torch.arange(6.0).to(device)
    box = Box(b=a[0:3])
    return lambda x: x.sum() * box.b, lambda: setattr(box, "b", a[2:5])


@case
def module_hook_added(device):
    layer = nn.Linear(4, 4).to(device)
    with torch.no_grad():
        layer.weight.fill_(0.1)
        layer.bias.fill_(0.2)
    return lambda x: layer(x), lambda: layer.register_forward_hook(lambda m, a, r: r * 2)


@case
def module_pre_hook_added(device):
    layer = nn.Linear(4, 4).to(device)
    with torch.no_grad():
        layer.weight.fill_(0.1)
        layer.bias.fill_(0.2)
    net = nn.Sequential(layer, nn.ReLU())
    return lambda x: net(x), lambda: layer.register_forward_pre_hook(lambda m, a: (a[0] * 2,))


@case
def module_hook_changes(device):
    layer = nn.Linear(4, 4).to(device)
    with torch.no_grad():
        layer.weight.fill_(0.1)
        layer.bias.fill_(0.2)
    box = Box(scale=2.0)
    layer.register_forward_hook(lambda m, a, r: r * box.scale)
    return lambda x: layer(x), lambda: setattr(box, "scale", 3.0)


@case
def backward_hook_of_a_parameter(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)

    def fn(x):
        layer.zero_grad()
        layer(x).square().sum().backward()
        return layer.weight.grad.clone()

    return fn, lambda: layer.weight.register_hook(lambda g: g * 3)


@case
def post_accumulate_hook(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    seen = []

    def fn(x):
        layer.zero_grad()
        layer(x).square().sum().backward()
        return layer.weight.grad.clone() + len(seen)

    return fn, lambda: layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))


@case
def counting_hook_of_a_parameter(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    count = itertools.count(1)
    layer.weight.register_hook(lambda g: g * next(count))

    def fn(x):
        layer.zero_grad()
        layer(x).square().sum().backward()
        return layer.weight.grad.clone()

    return fn, lambda: None


@case
def training_flag(device):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)).to(device)
    with torch.no_grad():
        net[0].weight.fill_(0.1)
        net[0].bias.fill_(0.2)
    return lambda x: net(
        x.expand(3, 4) * torch.tensor([[1.0], [2.0], [4.0]], device=x.device)
    ), net.eval


@case
def module_replaced(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    return lambda x: net(x), lambda: net.__setitem__(1, nn.Sigmoid())


@case
def module_appended(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    return lambda x: net(x), lambda: net.append(nn.Sigmoid())


@case
def forward_replaced(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    return lambda x: layer(x), lambda: setattr(layer, "forward", lambda x: x * 2)


@case
def parameter_replaced(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    new = nn.Parameter(torch.ones(4, 4).to(device))
    return lambda x: layer(x), lambda: setattr(layer, "weight", new)


@case
def data_replaced(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    return lambda x: layer(x), lambda: setattr(layer.weight, "data", torch.ones(4, 4).to(device))


@case
def parameter_written(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)

    def change():
        with torch.no_grad():
            layer.weight.fill_(0.5)

    return lambda x: layer(x), change


@case
def buffer_registered(device):
    net = nn.Module()
    net.scale = torch.ones(4).to(device)
    net.forward = lambda x: x * net.scale

    def change():
        del net.scale
        net.register_buffer("scale", torch.full((4,), 3.0).to(device))

    return lambda x: net.forward(x), change


@case
def state_dict_loaded(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    state = {k: torch.ones_like(v) for k, v in layer.state_dict().items()}
    return lambda x: layer(x), lambda: layer.load_state_dict(state)


@case
def global_variable(device):
    globals()["SCALE"] = 2.0
    return lambda x: x * SCALE, lambda: globals().update(SCALE=3.0)


@case
def global_nested(device):
    TABLE["a"] = [1.0, {"b": 2.0}]
    return lambda x: x * TABLE["a"][1]["b"], lambda: TABLE["a"][1].update(b=5.0)


@case
def closure_variable(device):
    scale = 2.0

    def fn(x):
        return x * scale

    def change():
        nonlocal scale
        scale = 4.0

    return fn, change


@case
def closure_of_a_called_function(device):
    scale = 2.0

    def inner(x):
        return x * scale

    def change():
        nonlocal scale
        scale = 4.0

    return lambda x: inner(x) + 1, change


@case
def default_argument(device):
    def inner(x, scale=2.0):
        return x * scale

    return lambda x: inner(x), lambda: setattr(inner, "__defaults__", (5.0,))


@case
def keyword_default(device):
    def inner(x, *, scale=2.0):
        return x * scale

    return lambda x: inner(x), lambda: inner.__kwdefaults__.update(scale=5.0)


@case
def code_replaced(device):
    def inner(x):
        return x * 2

    def other(x):
        return x * 3

    return lambda x: inner(x), lambda: setattr(inner, "__code__", other.__code__)


@case
def partial(device):
    box = Box(f=functools.partial(torch.mul, other=2.0))
    return (
        lambda x: box.f(x),
        lambda: setattr(box, "f", functools.partial(torch.mul, other=3.0)),
    )


@case
def property_of_an_object(device):
    class Model:
        value = 2.0

        @property
        def scale(self):
            return self.value * 2

    m = Model()
    return lambda x: x * m.scale, lambda: setattr(m, "value", 3.0)


@case
def property_replaced(device):
    class Model:
        @property
        def scale(self):
            return 2.0

    m = Model()
    return lambda x: x * m.scale, lambda: setattr(Model, "scale", property(lambda self: 3.0))


@case
def method_replaced(device):
    class Model:
        def f(self, x):
            return x * 2

    m = Model()
    return lambda x: m.f(x), lambda: setattr(Model, "f", lambda self, x: x * 3)


@case
def getattr_of_an_object(device):
    class Model:
        table = {"scale": 2.0}

        def __getattr__(self, name):
            return self.table[name]

    m = Model()
    return lambda x: x * m.scale, lambda: m.table.update(scale=3.0)


@case
def call_of_an_object(device):
    class Model:
        def __init__(self):
            self.n = 2.0

        def __call__(self, x):
            return x * self.n

    m = Model()
    return lambda x: m(x), lambda: setattr(m, "n", 3.0)


@case
def list_grows(device):
    values = [1.0, 2.0]
    return lambda x: x * sum(values), lambda: values.append(3.0)


@case
def list_of_tensors(device):
    values = [torch.ones(4).to(device), torch.full((4,), 2.0).to(device)]
    return (
        lambda x: sum([x * v for v in values]),
        lambda: values.append(torch.full((4,), 5.0).to(device)),
    )


@case
def list_of_tensors_swapped(device):
    values = [torch.ones(4).to(device), torch.full((4,), 2.0).to(device)]
    return lambda x: x * values[0] - values[1], lambda: values.reverse()


@case
def dict_order(device):
    table = OrderedDict(a=1.0, b=2.0)

    def fn(x):
        for value in table.values():
            x = x * 2 + value
        return x

    return fn, lambda: table.move_to_end("a")


@case
def dict_key_added(device):
    table = {"a": 1.0}
    return lambda x: x * len(table) + table.get("b", 0.0), lambda: table.update(b=4.0)


@case
def dict_key_removed(device):
    table = {"a": 1.0, "b": 2.0}
    return lambda x: x * table["a"] if "b" in table else x * 7, lambda: table.pop("b", 0)


@case
def default_dict(device):
    table = defaultdict(lambda: 2.0)
    return lambda x: x * table["a"], lambda: table.update(a=3.0)


@case
def counter(device):
    table = Counter("aab")
    return lambda x: x * table["a"], lambda: table.update("aa")


@case
def deque_rotates(device):
    values = deque([1.0, 2.0, 3.0])
    return lambda x: x * values[0], lambda: values.rotate(1)


@case
def named_tuple(device):
    box = Box(pair=Pair(1.0, 2.0))
    return lambda x: x * box.pair.b, lambda: setattr(box, "pair", Pair(1.0, 5.0))


@case
def data_class(device):
    @dataclasses.dataclass
    class Config:
        scale: float = 2.0
        names: list = dataclasses.field(default_factory=list)

    c = Config()

    def change():
        c.names.append("x")
        c.scale = 3.0

    return lambda x: x * c.scale + len(c.names), change


@case
def frozen_data_class(device):
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float = 2.0

    box = Box(c=Config())
    return lambda x: x * box.c.scale, lambda: setattr(box, "c", Config(3.0))


@case
def simple_namespace(device):
    s = types.SimpleNamespace(scale=2.0)
    return lambda x: x * s.scale, lambda: setattr(s, "scale", 3.0)


@case
def enumeration(device):
    class Mode(enum.Enum):
        PLUS = 1
        MINUS = 2

    box = Box(mode=Mode.PLUS)
    return (
        lambda x: x + 1 if box.mode is Mode.PLUS else x - 1,
        lambda: setattr(box, "mode", Mode.MINUS),
    )


@case
def string(device):
    box = Box(mode="relu")
    return lambda x: getattr(torch, box.mode)(x), lambda: setattr(box, "mode", "neg")


@case
def module_attribute(device):
    module = types.ModuleType("settings")
    module.scale = 2.0
    return lambda x: x * module.scale, lambda: setattr(module, "scale", 3.0)


@case
def numpy_number(device):
    box = Box(scale=np.float64(2.0))
    return lambda x: x * float(box.scale), lambda: setattr(box, "scale", np.float64(3.0))


@case
def numpy_array(device):
    values = np.ones(4, np.float32)
    return lambda x: x + torch.from_numpy(values).to(x.device), lambda: values.__setitem__(0, 5.0)


@case
def tensor_of_the_cpu(device):
    values = torch.ones(4)
    return lambda x: x + values.to(x.device), lambda: values.fill_(3.0)


@case
def number_of_a_cpu_tensor(device):
    value = torch.tensor(2.0)
    return lambda x: x * value.item(), lambda: value.fill_(3.0)


@case
def number_of_a_tensor(device):
    value = torch.tensor(2.0).to(device)
    return lambda x: x * value.item(), lambda: value.fill_(3.0)


@case
def branch_on_a_tensor(device):
    value = torch.tensor(2.0).to(device)
    return lambda x: x + 1 if value > 0 else x - 1, lambda: value.fill_(-3.0)


@case
def counter_in_python(device):
    box = Box(steps=0)

    def fn(x):
        box.steps += 1
        return x * box.steps

    return fn, lambda: setattr(box, "steps", 10)


@case
def iterator(device):
    source = iter(range(1, 100))
    return lambda x: x * next(source), lambda: next(source)


@case
def itertools_count(device):
    source = itertools.count(1)
    return lambda x: x * next(source), lambda: next(source)


@case
def generator_of_python(device):
    def numbers():
        n = 1.0
        while True:
            yield n
            n *= 2

    source = numbers()
    return lambda x: x * next(source), lambda: next(source)


@case
def tensors_of_a_loader(device):
    batches = iter([torch.full((4,), float(i)).to(device) for i in range(20)])
    return lambda x: x * next(batches), lambda: next(batches)


@case
def state_that_is_rebound(device):
    state = {"h": torch.zeros(4).to(device)}

    def fn(x):
        state["h"] = state["h"] * 0.5 + x
        return state["h"].sum()

    return fn, lambda: state.update(h=torch.ones(4).to(device))


@case
def attribute_that_is_rebound(device):
    box = Box(h=torch.zeros(4).to(device))

    def fn(x):
        box.h = box.h * 0.5 + x
        return box.h.sum()

    return fn, lambda: setattr(box, "h", torch.ones(4).to(device))


@case
def cache_that_grows(device):
    state = {"kv": torch.zeros(1, 4).to(device)}

    def fn(x):
        state["kv"] = torch.cat([state["kv"], x[None]])
        return state["kv"].sum(0)

    return fn, lambda: state.update(kv=state["kv"][:1])


@case
def list_that_is_filled(device):
    kept = []

    def fn(x):
        kept.append((x * 2).sum())
        return kept[-1] + len(kept)

    return fn, lambda: kept.clear()


@case
def number_that_is_left(device):
    box = Box(total=0.0)

    def fn(x):
        box.total += x.sum().item()
        return x * box.total

    return fn, lambda: setattr(box, "total", 100.0)


@case
def default_dtype(device):
    return (
        lambda x: x + torch.ones(4, device=x.device).double().to(torch.get_default_dtype()),
        lambda: None,
    )


@case
def grad_mode(device):
    layer = nn.Linear(4, 4).to(device)
    box = Box(on=True)

    def fn(x):
        with torch.set_grad_enabled(box.on):
            y = x.requires_grad_() * 2
        return y.detach() + float(y.requires_grad)

    del layer
    return fn, lambda: setattr(box, "on", False)


@case
def autocast(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    box = Box(on=False)

    def fn(x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=box.on):
            y = layer(x)
        return y.detach().float() + float(y.dtype == torch.bfloat16)

    return fn, lambda: setattr(box, "on", True)


@case
def dropout_probability(device):
    drop = nn.Dropout(0.0)
    return lambda x: drop(x), lambda: setattr(drop, "p", 1.0)


@case
def eps_of_a_norm(device):
    norm = nn.LayerNorm(4).to(device)
    return lambda x: norm(x), lambda: setattr(norm, "eps", 10.0)


@case
def learning_rate_schedule(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()

    return fn, schedule.step


@case
def schedule_inside(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        schedule.step()
        return layer.weight.detach().clone()

    return fn, lambda: None


@case
def accumulated_gradients(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)

    def fn(x):
        layer(x).square().sum().backward()
        return layer.weight.grad.clone()

    return fn, lambda: layer.zero_grad()


@case
def clipped_gradients(device):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    box = Box(limit=1.0)

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(layer.parameters(), box.limit)
        optimizer.step()
        return layer.weight.detach() + norm

    return fn, lambda: setattr(box, "limit", 0.1)


@case
def exponential_moving_average(device):
    torch.manual_seed(0)
    layer, average = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
    box = Box(decay=0.9)

    def fn(x):
        with torch.no_grad():
            for a, p in zip(average.parameters(), layer.parameters()):
                a.mul_(box.decay).add_(p, alpha=1 - box.decay)
        return average.weight.detach().clone()

    return fn, lambda: setattr(box, "decay", 0.5)


@case
def custom_optimizer(device):
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})
            self.scale = 1.0

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"] * self.scale)

    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(device)
    optimizer = Plain(layer.parameters())

    def fn(x):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()

    return fn, lambda: setattr(optimizer, "scale", 0.25)


@case
def tensor_subclass_attribute(device):
    box = Box(weights={"w": torch.ones(4).to(device)}, active="w")

    def change():
        box.weights["v"] = torch.full((4,), 4.0).to(device)
        box.active = "v"

    return lambda x: x * box.weights[box.active], change


@case
def shape_of_a_tensor(device):
    box = Box(t=torch.ones(3).to(device))
    return lambda x: x * box.t.shape[0], lambda: setattr(box, "t", torch.ones(7).to(device))


@case
def type_of_a_tensor(device):
    box = Box(t=torch.ones(4).to(device))
    return (
        lambda x: x + (1 if box.t.dtype is torch.float32 else 2),
        lambda: setattr(box, "t", torch.ones(4, dtype=torch.float64).to(device)),
    )


@case
def requires_grad_of_a_tensor(device):
    box = Box(t=torch.ones(4).to(device))
    return (
        lambda x: x + (1 if box.t.requires_grad else 2),
        lambda: setattr(box, "t", torch.ones(4).to(device).requires_grad_()),
    )


@case
def isinstance_of_a_value(device):
    box = Box(v=1)
    return lambda x: x + (1 if isinstance(box.v, int) else 2), lambda: setattr(box, "v", "one")


@case
def equal_by_chance(device):
    box = Box(a=0.5, b=0.5)
    return lambda x: x * box.a + box.b, lambda: setattr(box, "b", 0.25)


@case
def negative_zero_and_nan(device):
    box = Box(a=0.0)
    return lambda x: torch.copysign(x, torch.tensor(box.a, device=x.device)), lambda: setattr(
        box, "a", -0.0
    )


@case
def true_becomes_one(device):
    box = Box(a=True)
    return lambda x: x.new_tensor([box.a, box.a]).sum() + x * box.a, lambda: setattr(box, "a", 3)


@case
def random_of_python(device):
    import random

    source = random.Random(0)
    return lambda x: x * source.random(), lambda: source.seed(5)


@case
def random_of_numpy(device):
    source = np.random.RandomState(0)
    return lambda x: x * float(source.rand()), lambda: source.seed(5)


@case
def clock(device):
    box = Box(now=1.0)

    def fn(x):
        import time

        time.perf_counter()
        return x * box.now

    return fn, lambda: setattr(box, "now", 2.0)


@case
def exception_caught(device):
    table = {}

    def fn(x):
        try:
            return x * table["scale"]
        except KeyError:
            return x

    return fn, lambda: table.update(scale=3.0)


@case
def lru_cache(device):
    box = Box(n=2.0)

    @functools.lru_cache
    def scale():
        return box.n

    def change():
        box.n = 3.0
        scale.cache_clear()

    return lambda x: x * scale(), change


@case
def weak_reference(device):
    import weakref

    holder = Box(t=Box(scale=2.0))
    r = weakref.ref(holder.t)

    def change():
        holder.__dict__.pop("t", None)

    return lambda x: x * (1.0 if r() is None else r().scale), change


@case
def saved_tensors_hooks(device):
    torch.manual_seed(0)
    w = torch.ones(4).to(device).requires_grad_()
    box = Box(scale=1.0)

    def fn(x):
        w.grad = None
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * box.scale, lambda t: t):
            y = (w * w).sum() * x.sum()
        y.backward()
        return w.grad.clone()

    return fn, lambda: setattr(box, "scale", 2.0)


@case
def custom_function(device):
    box = Box(scale=2.0)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * box.scale

        @staticmethod
        def backward(ctx, g):
            return g * box.scale

    w = torch.ones(4).to(device).requires_grad_()

    def fn(x):
        w.grad = None
        (Double.apply(w) * x).sum().backward()
        return w.grad.clone()

    return fn, lambda: setattr(box, "scale", 3.0)
