"""ctc_loss on the device: values and gradients are the CPU's, no value is read."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import torch_hlo

from .support import no_recording

STEPS, BATCH, CLASSES, MOST = 12, 4, 7, 5
LENGTHS = {
    "equal": ([12] * 4, [5] * 4),
    "ragged": ([12, 8, 5, 0], [5, 3, 1, 0]),
    "impossible": ([12, 3, 12, 0], [5, 5, 0, 2]),
}


def targets(device="cpu"):
    # neither of the two blanks
    found = torch.arange(BATCH * MOST).reshape(BATCH, MOST) % (CLASSES - 2) + 1
    found[1, 1:3] = found[1, 0]  # repeated: a blank has to lie between
    return found.to(device)


def run(device, lengths, form, dtype, **options):
    x = (
        (torch.arange(STEPS * BATCH * CLASSES, dtype=dtype).view(STEPS, BATCH, CLASSES) * 0.7)
        .sin()
        .to(device)
        .requires_grad_()
    )
    given = [
        (
            tuple(n)
            if form == "numbers"
            else torch.tensor(n, device=device if form == "device" else "cpu")
        )
        for n in lengths
    ]
    log_probs = x.log_softmax(-1)
    log_probs.retain_grad()
    loss = F.ctc_loss(log_probs, targets(device), *given, **options)
    loss.sum().backward()
    return [t.detach().cpu() for t in (loss, log_probs.grad, x.grad)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("form", ["numbers", "cpu", "device"])
def test_values_and_gradients(lengths, form):
    for reduction, zero_infinity, blank in itertools.product(
        ("none", "mean", "sum"), (False, True), (0, 6)
    ):
        for dtype in (torch.float32, torch.float64):
            options = {
                "reduction": reduction,
                "zero_infinity": zero_infinity,
                "blank": blank,
            }
            want, got = (
                run(device, LENGTHS[lengths], form, dtype, **options) for device in ("cpu", "hlo")
            )
            for w, g in zip(want, got, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_nothing_is_read():
    before = dict.fromkeys(torch_hlo.metrics.counter_names())
    x = torch.randn(STEPS, BATCH, CLASSES, device="hlo", requires_grad=True)

    @torch_hlo.compile
    def step():
        x.grad = None
        loss = F.ctc_loss(
            x.log_softmax(-1),
            targets("hlo"),
            torch.full((BATCH,), STEPS),
            torch.full((BATCH,), MOST),
        )
        loss.backward()
        return loss.detach()

    found = [step().item() for _ in range(4)]
    assert len(set(found)) == 1
    assert not [
        n for n in torch_hlo.metrics.counter_names() if n.startswith("aten::") and n not in before
    ]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            ([13] * 4, [5] * 4),
            "input_lengths to have value at most 12, but got value 13",
        ),
        (([12] * 4, [5, 6, 5, 5]), "target_lengths"),
        (([12] * 3, [5] * 4), "one number for each of the 4"),
    ],
)
def test_lengths_that_do_not_fit(lengths, message):
    with pytest.raises(RuntimeError, match=message):
        run("hlo", lengths, "cpu", torch.float32)


def test_numbers_that_are_none_are_equal(monkeypatch):
    """A step that fills with nan is started again."""

    @torch_hlo.compile
    def step(x):
        return x.masked_fill(x < 0, float("nan"))

    x = torch.tensor([1.0, -1.0], device="hlo")
    for i in range(5):
        with monkeypatch.context() as m:
            if i > 2:
                no_recording(m)
            y = step(x)
        assert y.isnan().tolist() == [False, True]
