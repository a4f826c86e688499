"""ctc_loss without reading a value: for targets [batch, places], whose width bounds the lengths.
(Of targets in one row only their lengths say where each begins: those are PyTorch's, on the
CPU.)"""

import math

import torch
from torch import Tensor

from torch_hlo.lowering.nn.ctc import CTC, CTC_BACKWARD

from ..aten import dispatch
from ..record import HloTensor, conditions, from_cpu


class _Loss(torch.autograd.Function):
    """Negative log-likelihood of each sequence. The gradient is PyTorch's: that of log_softmax's
    argument."""

    @staticmethod
    def forward(
        ctx,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        zero_infinity: bool,
    ) -> Tensor:
        steps, batch, classes = log_probs.shape
        blanks = targets.new_full((batch, 1), blank)
        labels = torch.stack([blanks.expand_as(targets), targets.clamp(0, classes - 1)], 2).flatten(
            1
        )
        labels = torch.cat([labels, blanks], 1)
        # never a blank: there is one two places before
        skip = torch.cat([labels[:, :2] < 0, labels[:, 2:] != labels[:, :-2]], 1)
        index = labels.expand(steps, -1, -1)
        picked = log_probs.gather(2, index)
        alpha = dispatch.handle(CTC, (), (picked, skip))
        place = torch.arange(labels.shape[1], device=labels.device)
        end = 2 * target_lengths[:, None]
        ends = (place == end) | (place == end - 1)
        at = (input_lengths - 1).clamp(min=0).view(1, -1, 1).expand(1, -1, labels.shape[1])
        loss = -torch.where(ends, alpha.gather(0, at)[0], -math.inf).logsumexp(1)
        loss = torch.where(
            input_lengths > 0,
            loss,
            torch.where(target_lengths > 0, math.inf, 0.0).to(loss.dtype),
        )
        ctx.zero_infinity = zero_infinity
        ctx.save_for_backward(log_probs, index, picked, skip, alpha, ends, input_lengths, loss)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, index, picked, skip, alpha, ends, input_lengths, loss = ctx.saved_tensors
        time = torch.arange(log_probs.shape[0], device=log_probs.device)[:, None]
        last = (time == input_lengths - 1)[:, :, None] & ends
        seeds = torch.where(last, (alpha + loss[:, None]).exp(), 0.0)
        passed = dispatch.handle(CTC_BACKWARD, (), (seeds, picked, skip, alpha))
        found = (
            log_probs.exp() - torch.zeros_like(log_probs).scatter_add(2, index, passed)
        ) * grad[:, None]
        # no path is as short as the input
        found = torch.where(
            (loss == math.inf)[:, None],
            0.0 if ctx.zero_infinity else math.nan,
            found,
        )
        return torch.where((time < input_lengths)[:, :, None], found, 0.0), *[None] * 5


def takes(log_probs: Tensor, targets: Tensor, blank: int) -> bool:
    """Whether these are for `ctc_loss`: a batch with a row of targets for each sequence."""
    if (
        type(log_probs) is not HloTensor
        or type(targets) is not HloTensor
        or log_probs.dim() != 3
        or targets.dim() != 2
        or targets.is_floating_point()
    ):
        return False
    return (
        log_probs.dtype in (torch.float32, torch.float64)
        and 0 <= blank < log_probs.shape[2]
        and log_probs.numel() > 0
        and targets.numel() > 0
    )


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: list[int] | Tensor,
    target_lengths: list[int] | Tensor,
    blank: int,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """What `takes` takes. Lengths that the host knows are checked; lengths on the device are
    believed."""
    lengths = [
        _lengths(n, name, log_probs.shape[1], most)
        for n, name, most in (
            (input_lengths, "input_lengths", log_probs.shape[0]),
            (target_lengths, "target_lengths", targets.shape[1]),
        )
    ]
    loss = _Loss.apply(log_probs, targets.long(), *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == math.inf, 0.0, loss)
    if reduction == 1:
        return (loss / lengths[1].clamp(min=1).to(loss.dtype)).mean()
    return loss.sum() if reduction == 2 else loss


def _lengths(n: list[int] | Tensor, name: str, batch: int, most: int) -> Tensor:
    known = n if isinstance(n, Tensor) else torch.tensor(n, dtype=torch.int64)
    if known.dim() != 1 or known.shape[0] != batch:
        raise RuntimeError(
            f"ctc_loss: {name} {tuple(known.shape)} must be one number for each of the {batch}"
            " sequences"
        )
    given, known = (
        known,
        conditions.known(known) if type(known) is HloTensor else known,
    )
    if known is None:
        return given.long()
    for wrong, bound in (
        (known > most, f"at most {most}"),
        (known < 0, "at least 0"),
    ):
        if wrong.any():
            raise RuntimeError(
                f"Expected {name} to have value {bound}, but got value {int(known[wrong][0])}"
                " (while checking arguments for ctc_loss)"
            )
    return given.long() if type(given) is HloTensor else from_cpu(known.long())
