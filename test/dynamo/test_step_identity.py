"""torch_hlo.compile: one object that has two names, and what is left of it when one of them changes.

A case is a function of a device and of what captures; it returns what each call gave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_hlo

SHARED = None
CASES = {}


class Box:
    pass


def case(run):
    CASES[run.__name__.replace("_", " ")] = run
    return run


def network(device):
    torch.manual_seed(0)
    layers = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    return nn.Sequential(*layers).to(device)


def stepping(model, optimizer, x):
    def step():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@case
def a_parameter_that_the_optimizer_does_not_get(device, wrap):
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = wrap(stepping(model, optimizer, torch.ones(2, 4).to(device)))
    for i in range(7):
        if i == 4:
            model[0].weight = nn.Parameter(torch.ones(4, 4).to(device))
        if i == 5:
            optimizer.param_groups[0]["params"][0] = model[0].weight
        yield step()


@case
def parameters_tied_later(device, wrap):
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = wrap(stepping(model, optimizer, torch.ones(2, 4).to(device)))
    for i in range(7):
        if i == 4:
            model[1].weight = model[0].weight
        yield step()


@case
def parameters_tied_without_an_optimizer(device, wrap):
    first, second = network(device)
    x = torch.ones(2, 4).to(device)

    def step():
        first.weight.grad = second.weight.grad = None
        (first(x) * second(x)).sum().backward()
        with torch.no_grad():
            first.weight.sub_(0.1 * first.weight.grad)
            second.weight.sub_(0.1 * second.weight.grad)
        return second.weight.sum()

    step = wrap(step)
    for i in range(7):
        if i == 4:
            second.weight = first.weight
        yield step()


@case
def a_global_tensor_given_as_argument(device, wrap):
    global SHARED
    SHARED = torch.ones(3).to(device)
    step = wrap(lambda x: x * 2 + SHARED)
    for i in range(6):
        yield step(SHARED if i < 4 else torch.full((3,), 5.0).to(device))


@case
def another_tensor_that_becomes_the_global_one(device, wrap):
    global SHARED
    SHARED = torch.ones(3).to(device)
    step = wrap(lambda x: x.add_(1) * 2 + SHARED)
    for i in range(6):
        yield step(torch.full((3,), 5.0).to(device) if i < 4 else SHARED)


@case
def a_global_object_given_as_argument(device, wrap):
    global SHARED
    SHARED = Box()
    SHARED.scale = 2.0
    x = torch.ones(3).to(device)
    step = wrap(lambda box: x * box.scale + SHARED.scale)
    for i in range(6):
        box = SHARED
        if i >= 4:
            box = Box()
            box.scale = 2.0
        if i == 5:
            SHARED.scale = 7.0
        yield step(box)


@case
def a_model_given_as_argument_to_a_global_optimizer(device, wrap):
    global SHARED
    models = network(device), network(device)
    SHARED = torch.optim.SGD(models[0].parameters(), 0.01)
    x = torch.ones(2, 4).to(device)

    def step(model):
        SHARED.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        SHARED.step()
        return loss.detach()

    step = wrap(step)
    for i in range(7):
        yield step(models[i >= 4])
    yield models[0][0].weight
    yield models[1][0].weight.grad


@case
def a_frozen_parameter(device, wrap):
    layer, _ = network(device)
    x = torch.ones(2, 4).to(device)
    step = wrap(lambda: layer(x).sum())
    for i in range(6):
        layer.weight.requires_grad_(i < 4)
        result = step()
        assert result.requires_grad == (i < 4)
        yield result.detach()


@case
def a_parameter_that_gets_another_shape_and_dtype(device, wrap):
    layer, _ = network(device)
    x = torch.ones(2, 4).to(device)
    step = wrap(lambda: F.linear(x.to(layer.weight.dtype), layer.weight).detach())
    for i in range(6):
        if i == 4:
            layer.weight.data = torch.ones(3, 4).to(device)
        if i == 5:
            layer.weight.data = torch.ones(3, 4).to(device).double()
        yield step()


@pytest.mark.parametrize("name", CASES)
def test_each_name_is_looked_up(name):
    found = [
        [result.cpu().clone() for result in CASES[name](device, wrap)]
        for device, wrap in (("cpu", lambda fn: fn), ("hlo", torch_hlo.compile))
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("block", [torch.no_grad, lambda: torch.autocast("hlo", torch.bfloat16)])
def test_an_error_leaves_what_the_function_has_entered(block):
    layer, _ = network("hlo")
    x = torch.ones(2, 4).to("hlo")

    @torch_hlo.compile
    @block()
    def step():
        return F.linear(x, layer.weight)

    for _ in range(3):
        step()
    layer.weight = nn.Parameter(layer.weight.data.double())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            step()
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("hlo")
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
