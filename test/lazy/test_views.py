"""Views, mutation and aliasing: every case is run on CPU tensors and on hlo tensors and must end
with the same values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def grid(X, *size):
    n = 1
    for s in size:
        n *= s
    return X(torch.arange(float(n)).view(size))


@case
def select_add(X):
    x = grid(X, 2, 3)
    x[0].add_(1)
    return x


@case
def flat_stride_zero(X):
    x = grid(X, 2, 3)
    x.view(-1)[::2] = 0
    return x


@case
def transpose_multiply(X):
    x = grid(X, 2, 3)
    y = x.t()
    y.mul_(2)
    x[0].add_(5)
    return x, y


@case
def data_copy(X):
    x = grid(X, 6)
    x.data.copy_(torch.ones(6))
    return x


@case
def data_assign(X):
    x, y = grid(X, 6), grid(X, 2, 2)
    x.data = y
    y.add_(1)
    x.data = x.data.double()
    return x, y


@case
def out(X):
    x, o = grid(X, 3), grid(X, 3)
    torch.add(x, 1, out=o)
    return o


@case
def out_view(X):
    x, b = grid(X, 3), grid(X, 2, 3)
    torch.mul(x, 4, out=b[1])
    return b


@case
def out_resize(X):
    x, o = grid(X, 3), X(torch.zeros(0))
    torch.add(x, 1, out=o)
    return o


@case
def out_two(X):
    x = grid(X, 2, 3)
    values, indices = X(torch.zeros(0)), X(torch.zeros(0, dtype=torch.long))
    torch.max(x, 1, out=(values, indices))
    return values, indices


@case
def out_dtype(X):
    x, o = grid(X, 3), X(torch.zeros(3, dtype=torch.double))
    torch.add(x, 1, out=o)
    return o


@case
def resize_smaller(X):
    x = grid(X, 4)
    x.resize_(2)
    return x


@case
def resize_larger(X):
    x = grid(X, 4)
    x.resize_(3, 2)
    x.view(-1)[4:] = 7
    return x


@case
def set_tensor(X):
    x, y = grid(X, 4), grid(X, 2)
    x.set_(y)
    y.add_(1)
    return x, y


@case
def as_strided_write(X):
    x = grid(X, 6)
    v = x.as_strided((2, 2), (3, 1), 1)
    v.zero_()
    return x, v


@case
def as_strided_of_transpose(X):
    x = grid(X, 6)
    v = x.view(2, 3).t().as_strided((2, 2), (3, 1), 0)
    x.add_(1)
    return v


@case
def as_strided_overlapping_read(X):
    x = grid(X, 6)
    v = x.as_strided((4, 3), (1, 1))
    x[2] = 9
    return v


@case
def as_strided_channels_last(X):
    x = grid(X, 1, 2, 3, 4).to(memory_format=torch.channels_last)
    v = x.as_strided((24,), (1,))
    v[3:7] = -1
    return x, v


@case
def transpose_in_place(X):
    x = grid(X, 2, 3)
    x.t_()
    x[0].mul_(3)
    return x


@case
def unsqueeze_in_place(X):
    x = grid(X, 2, 3)
    x.unsqueeze_(0)
    x.squeeze_().transpose_(0, 1).add_(1)
    return x


@case
def split(X):
    x = grid(X, 6)
    a, b = x.split(3)
    a.add_(10)
    b.mul_(2)
    return x, a, b


@case
def split_sizes(X):
    x = grid(X, 2, 6)
    a, b, c = x.split([1, 3, 2], dim=-1)
    b.add_(a)
    c.zero_()
    return x, b


@case
def chunk(X):
    x = grid(X, 7)
    for i, c in enumerate(x.chunk(3)):
        c.mul_(i)
    return x


@case
def unbind(X):
    x = grid(X, 2, 3)
    a, b = x.unbind()
    a.zero_()
    c = x.unbind(-1)[-1]
    c.add_(100)
    return x, c


@case
def diagonal(X):
    x = X(torch.zeros(3, 3))
    x.diagonal().fill_(1)
    x.diagonal(1).add_(2)
    return x


@case
def fill_diagonal(X):
    x = grid(X, 3, 4)
    x.fill_diagonal_(5)
    return x


@case
def expand_read(X):
    x = X(torch.ones(1, 3))
    y = x.expand(2, 3)
    x.add_(1)
    return y


@case
def expand_fill(X):
    x = grid(X, 1, 3)
    x.expand(4, 2, 3).fill_(7)
    return x


@case
def unfold_read_write(X):
    x = grid(X, 8)
    x.unfold(0, 2, 2).mul_(2)
    return x, x.unfold(0, 3, 1)


@case
def movedim_flatten(X):
    x = grid(X, 2, 3, 4)
    x.movedim(0, 2)[1].add_(1)
    x.flatten(1)[0, 5:7] = 50
    return x


@case
def narrow_negative(X):
    x = grid(X, 5, 4)
    x.narrow(-1, 1, 2).neg_()
    x[-2:, -1] = 0
    x[1:4:2].add_(0.5)
    return x


@case
def view_chain(X):
    x = grid(X, 4, 6)
    v = x[1:3].t()[2:5].reshape(3, 2)
    v = x.view(2, 2, 6).permute(2, 0, 1)[1:, 0]
    v.add_(100)
    v[0, 0] = -5
    return x, v


@case
def dtype_in_place(X):
    x = X(torch.ones(3, dtype=torch.bfloat16))
    x.add_(X(torch.ones(3)) * 0.5)
    return x


@case
def copy_broadcast(X):
    x = X(torch.zeros(2, 3))
    x.copy_(X(torch.arange(3)))
    x[0].copy_(torch.tensor([1, 2, 3]))
    x[1, 1:].copy_(torch.tensor(9.0))
    return x


@case
def index_put(X):
    x = X(torch.zeros(4))
    x[X(torch.tensor([1, 2]))] = 5.0
    x[torch.tensor([0])] = 3.0
    return x


@case
def index_put_accumulate(X):
    x = X(torch.zeros(3))
    x.index_put_((X(torch.tensor([0, 0, 2])),), X(torch.tensor([1.0, 2.0, 3.0])), accumulate=True)
    return x


@case
def mask_scalar(X):
    x = grid(X, 4)
    x[x > 1] = 0
    return x


@case
def mask_rows(X):
    x = grid(X, 3, 2)
    m = X(torch.tensor([True, False, True]))
    x[m] = -1.0
    x[:, X(torch.tensor([True, False]))] = 8.0
    return x, x[m]


@case
def mask_values(X):
    x = grid(X, 4)
    x[x > 1] = X(torch.tensor([10.0, 20.0]))
    return x, x[x > 5]


@case
def masked_fill_scatter(X):
    x = grid(X, 4)
    m = x > 1
    x.masked_fill_(m, 3)
    x.masked_scatter_(m, X(torch.tensor([7.0, 8.0, 9.0])))
    return x


@case
def detach_write(X):
    x = X(torch.zeros(4))
    x.detach()[1:].fill_(3)
    return x


@case
def foreach(X):
    x = X(torch.zeros(4))
    torch._foreach_add_([x[:2], x[2:]], 1.5)
    torch._foreach_mul_([x[:1], x[1:]], [2.0, 3.0])
    return x


@case
def foreach_twice(X):
    x = X(torch.ones(2))
    torch._foreach_mul_([x, x], 3.0)
    return x


@case
def foreach_aliases(X):
    """What a list is updated with may be what the update before it wrote."""
    x, y, z, w, v = (grid(X, 4) for _ in range(5))
    torch._foreach_add_([x, x.view(2, 2)], 1)
    torch._foreach_mul_([y[:3], y[1:]], 2.0)
    torch._foreach_add_([z[:2], z[2:]], [z[2:], z[:2]])
    torch._foreach_copy_([w, v], [v, w])
    torch._foreach_addcmul_([v], [v], [v])
    return x, y, z, w, v


@case
def foreach_out_of_place(X):
    a, b = torch._foreach_add([grid(X, 2), grid(X, 3)], [grid(X, 2), grid(X, 3)], alpha=2)
    return a, b, *torch._foreach_norm([a, b]), *torch._foreach_sqrt([a, b])


@case
def clone_is_a_copy(X):
    x = grid(X, 4)
    y = x.clone()
    z = y.contiguous()
    x.add_(1)
    y[0] = 9
    return x, y, z


@case
def overlapping_copy(X):
    x = grid(X, 6)
    x[1:].copy_(x[:-1].clone())
    return x


@case
def one_complex_number_as_another_dtype(X):
    x = X(torch.tensor(5))
    x.view(torch.complex64).mul_(2)
    return x, X(torch.tensor(1 + 2j)).view(torch.float64)


@case
def resize_as_in_its_memory_format(X):
    like = grid(X, 1, 2, 3, 2).contiguous(memory_format=torch.channels_last)
    x = grid(X, 12).resize_as_(like, memory_format=torch.preserve_format)
    assert x.stride() == like.stride()
    return x


@case
def memory_of_a_typed_storage(X):
    x = grid(X, 3, 4)
    y = x.new_empty(0).set_(x.storage(), 1, (2, 3), (4, 1))
    assert x.storage().data_ptr() == y.storage().data_ptr()
    assert len(x.storage()) == x.storage().size() == 12
    assert x.storage().tolist() == [*range(12)]
    assert x.untyped_storage().tolist()[4:8] == [0, 0, 128, 63]
    y.add_(1)
    return x, y


@case
def complex_views(X):
    x = X(torch.complex(torch.arange(4.0), torch.ones(4)))
    torch.view_as_real(x)[:, 0].add_(1)
    x.real.mul_(2)
    x.imag[1:] = 5
    y = torch.view_as_complex(grid(X, 3, 2))
    y.mul_(1j)
    return x, y, x.conj() * x, x.conj().imag


@case
def conj_write(X):
    x = X(torch.complex(torch.arange(4.0), torch.ones(4)))
    x.conj()[1:3] = 2 + 3j
    return x


@case
def bitcast(X):
    x = grid(X, 4)
    v = x.view(torch.int32)
    w = x.view(torch.int16)
    v[0] = 1065353216
    return x, v, w


@case
def real_flat(X):
    x = X(torch.complex(torch.arange(4.0), torch.ones(4)))
    return torch.view_as_real(x).as_strided((8,), (1,))


@case
def channels_last(X):
    x = grid(X, 1, 2, 3, 4).to(memory_format=torch.channels_last)
    x[:, 0].add_(1)
    y = x * 2
    return (
        x,
        torch.tensor(x.stride()),
        torch.tensor(y.stride()),
        torch.tensor(x.contiguous().stride()),
    )


@case
def batch_norm_buffers(X):
    m = nn.BatchNorm1d(3)
    for name in list(m._buffers):
        m._buffers[name] = X(m._buffers[name])
    for name in list(m._parameters):
        m._parameters[name] = nn.Parameter(X(m._parameters[name].detach()))
    m(grid(X, 2, 3)).sum().backward()
    y = m.eval()(grid(X, 2, 3))
    return m.running_mean, m.running_var, m.num_batches_tracked, m.weight.grad, y


@case
def rrelu_and_prelu(X):
    x = grid(X, 4) - 2
    return nn.functional.prelu(x, X(torch.tensor([0.25]))), nn.functional.leaky_relu_(x, 0.1)


@case
def empty_strided_gaps(X):
    x = X(torch.zeros(1)).new_empty_strided((2, 2), (5, 1))
    x.fill_(2)
    x[0, 1] = 3
    return x, torch.tensor(x.stride())


@case
def swap_rows(X):
    x = grid(X, 3, 2)
    x[[0, 2]] = x[[2, 0]]
    return x


@case
def cumulative(X):
    x = grid(X, 2, 3)
    x.cumsum_(1)
    x.clamp_(max=6).tril_()
    return x


def _tuple(value):
    return value if isinstance(value, (tuple, list)) else (value,)


def same(expected, got):
    assert len(_tuple(expected)) == len(_tuple(got))
    for e, g in zip(_tuple(expected), _tuple(got)):
        assert e.shape == g.shape and e.dtype == g.dtype and e.stride() == g.stride()
        torch.testing.assert_close(g.detach().cpu(), e.detach())


@pytest.mark.parametrize("name", CASES)
def test_view(name, recorded):
    fn = CASES[name]
    same(fn(lambda t: t.clone()), fn(lambda t: t.to("hlo")))


@pytest.mark.parametrize(
    "name",
    [
        "view_chain",
        "as_strided_write",
        "mask_scalar",
        "channels_last",
        "split",
        "batch_norm_buffers",
        "foreach",
    ],
)
def test_view_on_device(name):
    fn = CASES[name]
    same(fn(lambda t: t.clone()), fn(lambda t: t.to("hlo")))


def test_view_after_a_step(recorded):
    x = torch.arange(6.0).to("hlo")
    v = x.view(2, 3)[1]
    recorded.mark_step()
    v.add_(1)
    recorded.mark_step()
    x.mul_(2)
    assert v.tolist() == [8.0, 10.0, 12.0]
    assert x.tolist() == [0.0, 2.0, 4.0, 8.0, 10.0, 12.0]


def test_expanded_write_is_refused(recorded):
    x = torch.zeros(1, 3).to("hlo").expand(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.copy_(torch.ones(2, 3))


def test_as_strided_out_of_bounds(recorded):
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 24"):
        torch.zeros(6).to("hlo").as_strided((7,), (1,))


def test_storage_identity(recorded):
    x = torch.zeros(6).to("hlo")
    assert (
        x.untyped_storage().data_ptr()
        == x[2:].untyped_storage().data_ptr()
        != x.clone().untyped_storage().data_ptr()
    )
    assert x.data_ptr() != x[2:].data_ptr() == x[2:4].data_ptr()
    assert x.untyped_storage().size() == 24 and len(x.untyped_storage()) == 24
