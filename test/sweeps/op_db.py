"""torch's op_db on "hlo" against CPU: forward, backward, in-place and out=.

    python -m test.sweeps.op_db [--ops REGEX] [--dtype float32] [--samples 3] [--json FILE]
        [--verbose]

An operator passes when every sample of every variant agrees; it is native when no aten op fell back
to the CPU meanwhile.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import signal
import sys
import traceback
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db

import torch_hlo
from test.sweeps import counted

# CUDA-only or needing what a strided dense device does not have.
SKIP = {
    "jiterator_unary": "CUDA only",
    "jiterator_binary": "CUDA only",
    "jiterator_binary_return_by_ref": "CUDA only",
    "jiterator_4inputs_with_extra_args": "CUDA only",
    "jiterator_2inputs_2outputs": "CUDA only",
}
# Random or uninitialised results: only shapes and dtypes are compared.
UNDEFINED_VALUES = re.compile(
    r"^(empty|empty_like|new_empty|empty_strided|new_empty_strided|empty_permuted|bernoulli|multinomial|normal|cauchy|exponential|geometric|log_normal|uniform|rand|randn"
    r"|randint|.*_like_?rand.*|rand_like|randn_like|randint_like|nn\.functional\.(alpha_|feature_alpha_)?dropout.*|nn\.functional\.feature.*|nn\.functional\.rrelu"
    r"|nn\.functional\.fractional_max_pool.*|svd_lowrank|pca_lowrank|torch\.ops\.aten\._efficient_attention_forward|nn\.functional\.multi_head_attention_forward)"
)


TOLERANCE = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}

# Where CPU and device differ, both are compared with the operator in this type: the device must not
# be much less exact.
WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
# PyTorch's own results in a given tensor are others than without (and other numbers in it the next
# time).
WRONG_OUT = {"fft.ihfftn"}
# Which of several equal elements they name is not defined; small integers, booleans and short
# floats often are equal.
TIES = {"sort", "argsort", "msort", "topk", "kthvalue", "mode", "median", "nanmedian"}


class Timeout(Exception):
    pass


def tensors(x):
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for v in x:
            yield from tensors(v)
    elif isinstance(x, dict):
        for v in x.values():
            yield from tensors(v)


def move(x, device, types: dict = {}):  # noqa: B006 - never written to
    """Copies on the device, with element types replaced as `types` says."""
    if isinstance(x, torch.Tensor):
        moved = x.detach().to(device, types.get(x.dtype, x.dtype))
        return (
            moved.requires_grad_(x.requires_grad)
            if x.is_leaf or not x.requires_grad
            else moved.requires_grad_(True)
        )
    if isinstance(x, (tuple, list)):
        moved = [move(v, device, types) for v in x]
        return type(x)(*moved) if hasattr(x, "_fields") else type(x)(moved)
    if isinstance(x, dict):
        return {
            k: torch.device(device) if k == "device" and v is not None else move(v, device, types)
            for k, v in x.items()
        }
    if isinstance(x, torch.dtype):
        return types.get(x, x)
    if isinstance(x, torch.device):
        return torch.device(device)
    return x


# Their tensor arguments are on the CPU on every device.
HOST_ARGUMENTS = {"tensor_split"}


def arguments(op, sample, device, types: dict = {}):  # noqa: B006
    """(input, args, kwargs) of a sample, copied to the device."""
    other = "cpu" if op.name in HOST_ARGUMENTS else device
    return (
        move(sample.input, device, types),
        move(sample.args, other, types),
        move(sample.kwargs, other, types),
    )


def compare(got, want, exact=None, values: bool = True, ties: bool = False) -> None:
    """Raise AssertionError unless the results agree. `exact()`: results in a wider type, asked for
    when they do not. Without `values` only shapes and types count; with `ties` indices may
    differ."""
    got, want = list(tensors(got)), list(tensors(want))
    assert len(got) == len(want), f"{len(got)} results, not {len(want)}"
    for i, (g, w) in enumerate(zip(got, want)):
        assert g.shape == w.shape, f"shape {tuple(g.shape)}, not {tuple(w.shape)}"
        assert g.dtype == w.dtype, f"dtype {g.dtype}, not {w.dtype}"
        if values and not (ties and w.dtype == torch.int64):
            g, w = (t.detach().cpu().resolve_conj().resolve_neg() for t in (g, w))
            tolerance = TOLERANCE.get(w.dtype, 2e-4)
            try:
                torch.testing.assert_close(
                    g,
                    w,
                    equal_nan=True,
                    rtol=tolerance,
                    atol=tolerance,
                    check_stride=False,
                )
            except AssertionError:
                if exact is None or not as_exact(g, w, list(tensors(exact()))[i]):
                    raise


def as_exact(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> bool:
    """True if `got` is not more than twice as far from the exact values as `want`."""
    if got.dtype not in WIDER or exact.shape != got.shape:
        return False
    far, near = ((t.to(exact.dtype) - exact.detach()).abs().max() for t in (got, want))
    limit = (
        2 * near + torch.finfo(got.dtype).eps
        if near.isfinite()
        else TOLERANCE.get(got.dtype, 2e-4) * exact.abs().max()
    )
    return bool(far <= limit)


def variants(op, sample):
    """(name, function of moved (input, args, kwargs)) for each way to call the op."""
    yield "forward", lambda i, a, k: op(i, *a, **k)
    inplace = op.get_inplace()
    if (
        inplace is not None
        and isinstance(sample.input, torch.Tensor)
        and not sample.broadcasts_input
    ):

        def run_inplace(i, a, k):
            x = i.detach().clone()
            return inplace(x, *a, **k)

        yield "inplace", run_inplace
    if op.supports_out:
        yield "out", None


def grads(op, sample, device, types: dict = {}):  # noqa: B006
    i, a, k = arguments(op, sample, device, types)
    leaves = [t for t in tensors((i, a, k)) if t.requires_grad]
    out = op(i, *a, **k)
    if sample.output_process_fn_grad is not None:
        out = sample.output_process_fn_grad(out)
    outs = [o for o in tensors(out) if o.requires_grad]
    if not outs or not leaves:
        return []
    found = torch.autograd.grad(
        sum(weighted(o).to(device) for o in outs), leaves, allow_unused=True
    )
    return [g for g in found if g is not None]


def weighted(x: torch.Tensor) -> torch.Tensor:
    """A sum in which every element counts differently."""
    weights = torch.linspace(0.5, 1.5, max(x.numel(), 1), dtype=torch.float64)[: x.numel()].reshape(
        x.shape
    )
    weights = weights.to(
        torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
    ).to(x.device)
    return ((x.abs() if x.is_complex() else x) * weights).sum()


def check(op, samples: int, dtype: torch.dtype = torch.float32) -> None:
    name = op.name
    defined = not UNDEFINED_VALUES.match(name)
    made = []
    differentiable = (
        op.supports_autograd
        and (dtype.is_floating_point or dtype.is_complex)
        and dtype in op.supported_backward_dtypes("cpu")
    )
    for s in op.sample_inputs("cpu", dtype, requires_grad=differentiable):
        made.append(s)
        if len(made) >= samples:
            break
    options = {"ties": name in TIES and dtype not in (torch.float32, torch.float64)}
    for s in made:
        options["values"] = values = defined and not s.kwargs.get("dropout_p")
        for variant, fn in variants(op, s):
            if variant == "out":
                if name not in WRONG_OUT:
                    check_out(op, s, options)
                continue
            try:
                want = fn(*arguments(op, s, "cpu"))
            except Exception:  # the sample does not suit this variant on the CPU either
                continue
            compare(
                fn(*arguments(op, s, "hlo")),
                want,
                lambda s=s, fn=fn: fn(*arguments(op, s, "cpu", WIDER)),
                **options,
            )
        # whose gradient it is follows from which element was taken
        if differentiable and values and not options["ties"]:
            try:
                want = grads(op, s, "cpu")
            except Exception:
                continue
            compare(grads(op, s, "hlo"), want, lambda s=s: grads(op, s, "cpu", WIDER))


def check_out(op, s, options: dict) -> None:
    def run(device, types: dict = {}):  # noqa: B006
        with torch.no_grad():
            i, a, k = arguments(op, s, device, types)
            result = op(i, *a, **k)
            outs = list(tensors(result))
            if not outs or len(outs) != (len(result) if isinstance(result, tuple) else 1):
                return None
            fresh = [torch.empty_like(o) for o in outs]
            op(i, *a, **k, out=tuple(fresh) if isinstance(result, tuple) else fresh[0])
            return fresh

    try:
        want = run("cpu")
    except Exception:
        return
    if want is not None:
        compare(run("hlo"), want, lambda: run("cpu", WIDER), **options)


def run(
    pattern: str,
    samples: int,
    seconds: int,
    verbose: bool,
    dtype: torch.dtype = torch.float32,
) -> dict:
    """status per operator: pass, pass-fallback, or fail with the reason."""
    report: dict[str, dict] = {}

    def alarm(*_):
        raise Timeout(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, alarm)
    for op in counted("operators", op_db):
        name = op.formatted_name if op.variant_test_name else op.name
        if (
            not re.search(pattern, name)
            or op.name in SKIP
            or dtype not in op.supported_dtypes("cpu")
        ):
            continue
        torch_hlo.metrics.clear_all()
        torch.manual_seed(0)
        signal.alarm(seconds)
        try:
            check(op, samples, dtype)
            row = {"status": "pass"}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            row = {
                "status": "fail",
                "reason": f"{type(error).__name__}: {str(error).strip()[:300]}",
            }
            if verbose:
                traceback.print_exc()
        finally:
            signal.alarm(0)
        row["fallbacks"] = [n for n in torch_hlo.metrics.counter_names() if n.startswith("aten::")]
        report[name] = row
        if verbose or row["status"] == "fail":
            print(name, row, flush=True)
    return report


def summary(report: dict) -> str:
    total = len(report)
    passed = sum(r["status"] == "pass" for r in report.values())
    native = sum(r["status"] == "pass" and not r["fallbacks"] for r in report.values())
    common = collections.Counter(f for r in report.values() for f in r["fallbacks"]).most_common(40)
    return (
        f"{total} operators: {passed} pass ({passed / total:.1%}), {native} without fallback"
        f" ({native / total:.1%})\nfallbacks: {common}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default="", help="regular expression on the operator's name")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="a name in torch: float64, int64, bool, bfloat16, complex64, ...",
    )
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=60, help="limit per operator")
    parser.add_argument("--json")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    report = run(args.ops, args.samples, args.seconds, args.verbose, getattr(torch, args.dtype))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report, f, indent=1)
    print(summary(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
