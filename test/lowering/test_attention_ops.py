"""What scaled_dot_product_attention of torch.cuda tensors has become when torch.compile sees it.
Traced without a GPU, from the operators themselves."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from torch_hlo import metrics

aten = torch.ops.aten
# the arguments after query, key and value
CALLS = {
    "flash": lambda bias, p, causal: (p, causal),
    "efficient": lambda bias, p, causal: (bias, True, p, causal),
    "cudnn": lambda bias, p, causal: (bias, True, p, causal),
}


def compiled(kind, bias=None, p=0.0, causal=False):
    torch._dynamo.reset()
    op = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    more = CALLS[kind](bias, p, causal)
    return torch.compile(lambda q, k, v: op(q, k, v, *more)[0], backend="hlo")


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    # 33 rows: efficient attention keeps the sums of 64
    return [torch.randn(2, 3, 33, 16).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("kind", CALLS)
def test_values_and_gradients(kind, causal, inputs):
    bias = None if causal or kind == "flash" else torch.randn(2, 3, 33, 33)
    out = compiled(kind, bias, causal=causal)(*inputs)
    wanted = scaled_dot_product_attention(*inputs, attn_mask=bias, is_causal=causal)
    slopes, wanted_slopes = (torch.autograd.grad(x.sin().sum(), inputs) for x in (out, wanted))
    torch.testing.assert_close((out, *slopes), (wanted, *wanted_slopes), rtol=1e-4, atol=1e-5)
    fallbacks = [name for name in metrics.counter_names() if "attention" in name]
    assert not fallbacks


@pytest.mark.parametrize("kind", CALLS)
def test_the_gradient_drops_what_the_forward_pass_dropped(kind, inputs):
    value = inputs[2]
    out = compiled(kind, p=0.5)(*inputs)
    (slope,) = torch.autograd.grad(out.sum(), value)
    # the output is linear in the value
    torch.testing.assert_close((slope * value).sum(), out.sum(), rtol=1e-4, atol=1e-4)
    assert not torch.equal(out, scaled_dot_product_attention(*inputs))


def test_the_mask_for_debugging_is_refused(inputs):
    op = aten._scaled_dot_product_flash_attention.default
    with pytest.raises(Exception, match="return_debug_mask=True is not supported"):
        torch.compile(lambda q, k, v: op(q, k, v, 0.5, False, True)[0], backend="hlo")(*inputs)
