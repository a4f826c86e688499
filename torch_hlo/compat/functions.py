"""torch_xla.core.functions: collectives with gradients."""

import torch

from . import communication, hardware, spawning


class AllReduce(torch.autograd.Function):
    """The gradient is what PyTorch/XLA defines: no communication."""

    @staticmethod
    def forward(ctx, x, kind, scale, groups):
        out: torch.Tensor = communication.all_reduce(kind, x, scale, groups)
        ctx.kind, ctx.scale = kind, scale
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        if ctx.kind == "mul":
            grad = grad * torch.where(x != 0, out / x, torch.zeros_like(x))
        elif ctx.kind in ("min", "max"):
            grad = torch.where(x == out, grad, torch.zeros_like(grad))
        elif ctx.kind != "sum":
            raise RuntimeError(f"Unsupported reduce type: {ctx.kind}")
        return grad * ctx.scale, None, None, None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        out: torch.Tensor = communication.all_gather(x, dim)
        return out

    @staticmethod
    def backward(ctx, grad):
        parts = grad.chunk(hardware.world_size(), ctx.dim)
        return parts[hardware.global_ordinal()].clone(), None


def all_reduce(reduce_type, value, scale=1.0, groups=None):
    return AllReduce.apply(value, reduce_type, scale, groups)


def all_gather(value, dim=0):
    return AllGather.apply(value, dim)


def distributed_mm(w, x, split=1):
    """`w @ x` where the columns of `w` and of `x` are spread over the processes."""
    rank = hardware.global_ordinal()
    results = []
    for part in x.chunk(split, 1):
        rows = all_gather(part, 1).narrow(0, rank * w.size(1), w.size(1))
        whole = all_reduce("sum", w @ rows)
        results.append(whole.narrow(1, rank * part.size(1), part.size(1)))
    return torch.cat(results, 1)


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """PyTorch's, which knows all processes once torch.distributed has begun."""

    def forward(self, input):
        spawning.join()
        return super().forward(input)
