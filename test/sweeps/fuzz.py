"""Random programs with views, in-place updates, mixed dtypes, zero-size tensors, autograd and
random mark_step placement.

    python -m test.sweeps.fuzz [--programs 2000] [--seed 0] [--one SEED]

Each program is a list of statements run on the CPU and on "hlo"; every live tensor is compared at
the end. A failing program is printed as Python, ready to paste.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch

import torch_hlo

DTYPES = [
    "float32",
    "float32",
    "float32",
    "float64",
    "int64",
    "int32",
    "bool",
    "bfloat16",
    "float16",
    "uint8",
]
UNARY = [
    "{a}.abs()", "{a}.neg()", "{a}.relu()", "torch.sigmoid({a})", "torch.tanh({a})",
    "torch.exp({a}.clamp(max=4))", "torch.sin({a})", "{a}.square()", "torch.floor({a})",
    "torch.sign({a})", "{a}.to(torch.{dtype})", "{a}.float()", "{a}.clone()", "{a}.contiguous()",
    "{a} == {a}", "torch.isnan({a})", "{a}.clamp(-1, 1)", "torch.nn.functional.gelu({a})",
    "{a}.bool()", "{a} * 2", "{a} + 1.5", "1 - {a}", "{a} / 3", "{a}.cumsum({d})",
    "torch.where({a} > 0, {a}, -{a})",
]  # fmt: skip
BINARY = [
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})",
    "{a} < {b}", "{a} == {b}", "torch.where({a} > 0, {a}, {b})", "torch.add({a}, {b}, alpha=2)",
    "{a} / ({b}.abs() + 1)", "torch.atan2({a}, {b})", "torch.logical_and({a}, {b})",
    "torch.lerp({a}, {b}, 0.3)",
]  # fmt: skip
REDUCE = [
    "{a}.sum()", "{a}.sum({d})", "{a}.mean()", "{a}.mean({d}, keepdim=True)", "{a}.amax({d})",
    "{a}.max()", "{a}.argmax({d})", "{a}.var()", "{a}.softmax({d})", "{a}.any()", "{a}.all({d})",
    "{a}.prod({d})", "{a}.norm()", "{a}.log_softmax({d})", "{a}.sum({d}, keepdim=True)",
    "{a}.std({d})", "{a}.flip({d})", "{a}.sort({d})[0]", "{a}.roll(1, {d})",
]  # fmt: skip
VIEWS = [
    "{a}.t()", "{a}.transpose(0, -1)", "{a}[{i}]", "{a}[..., {j}]", "{a}[::2]", "{a}[1:]",
    "{a}[..., :-1]", "{a}.reshape(-1)", "{a}.unsqueeze({d})", "{a}.squeeze()",
    "{a}.view({a}.shape)", "{a}.expand(2, *{a}.shape)", "{a}.flatten()", "{a}.chunk(2, {d})[-1]",
    "{a}.unbind({d})[0]", "{a}.narrow({d}, 0, 1)", "{a}.detach()", "{a}.diagonal()",
    "{a}.permute(*range({a}.dim() - 1, -1, -1))", "{a}.view_as({a})", "{a}.movedim(0, -1)",
    "{a}.unfold({d}, 1, 1)", "{a}.as_strided({a}.shape, {a}.stride(), {a}.storage_offset())",
]  # fmt: skip
INPLACE = [
    "{a}.add_(1)", "{a}.mul_(2)", "{a}.add_({b})", "{a}.zero_()", "{a}.fill_(3)", "{a}.copy_({b})",
    "{a}[0] = 1", "{a}[..., -1] = 2", "{a}[::2] += 1", "{a}.relu_()", "{a}.neg_()", "{a}.sub_({b})",
    "{a}.clamp_(-2, 2)", "{a}.t_()", "{a}.transpose_(0, -1)", "{a}.unsqueeze_(0)", "{a}.squeeze_()",
    "{a}.masked_fill_({a} > 0, 0)",
    "{a}.index_fill_({d}, torch.zeros(1, dtype=torch.long, device=dev), 5)",
    "{a}.view(-1)[::2] = 4", "{a}.data.mul_(2)", "{a}.t().add_(1)", "{a}.div_(2)",
    "{a}.diagonal().fill_(7)", "{a}[{a} > 1] = 0", "torch._foreach_add_([{a}], 1)",
    "torch.add({a}, 1, out={a})", "{a}.lerp_({b}, 0.5)", "{a}.addcmul_({b}, {b})",
    "{a}.requires_grad_({a}.is_floating_point())", "{a}.set_({b})", "{a}.resize_(2, 2).fill_(1)",
    "{a}.expand(2, *{a}.shape)[0].add_(1)",
]  # fmt: skip
OTHER = [
    "{a} @ {b}",
    "torch.cat([{a}, {b}])",
    "torch.stack([{a}, {a}])",
    "torch.cat([{a}.reshape(-1), {b}.reshape(-1)])",
    "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.long))",
    "torch.nn.functional.pad({a}, (1, 1))",
    "{a}.index_select({d}, torch.zeros(2, dtype=torch.long, device=dev))",
    "{a}.tril()",
    "torch.outer({a}.reshape(-1)[:3], {b}.reshape(-1)[:3])",
    "{a}.repeat(2, *[1] * ({a}.dim() - 1))",
    "torch.zeros_like({a})",
    "torch.ones_like({a})",
    "torch.arange({a}.numel(), device=dev)",
    "torch.full({a}.shape, 2.5, device=dev)",
    "{a}.new_zeros({a}.shape)",
    (
        "torch.autograd.grad(({a}.detach().float().requires_grad_(True) * 2).tanh().sum(), [],"
        " allow_unused=True) or {a}"
    ),
    "grad_of(lambda t: (t * t).sum(), {a})",
    "grad_of(lambda t: t.softmax(-1).square().sum(), {a})",
    "grad_of(lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:], eps=1.0).sin().sum(), {a})",
    "{a}.masked_select({a} > 0)",
    "torch.tensor({a}.float().sum().clamp(-9, 9).item() > 0, device=dev)",
    "{a}[[0, 0]]",
    "{a}.nonzero()",
    "{a}.sum().item() * {b}",
]
GROUPS = [(UNARY, 5), (BINARY, 5), (REDUCE, 3), (VIEWS, 7), (INPLACE, 7), (OTHER, 3)]


def grad_of(fn, x):
    leaf = x.detach().float().requires_grad_(True)
    return torch.autograd.grad(fn(leaf), leaf)[0]


def program(seed: int) -> list[str]:
    """The statements; variables are v0, v1, …; `dev` is the device."""
    r = random.Random(seed)
    lines = []
    count = r.randint(1, 3)
    for i in range(count):
        dims = tuple(
            r.choice([0, 1, 2, 3, 4, 5, 7, 17]) if r.random() > 0.08 else 0
            for _ in range(r.randint(0, 3))
        )
        if r.random() < 0.85:
            dims = tuple(d or 3 for d in dims)
        lines.append(f"v{i} = make({r.randrange(10**6)}, {dims}, torch.{r.choice(DTYPES)}, dev)")
    for _ in range(r.randint(3, 25)):
        if r.random() < 0.12:
            lines.append("mark()")
            continue
        group = r.choices([g for g, _ in GROUPS], [w for _, w in GROUPS])[0]
        text = r.choice(group).format(
            a=f"v{r.randrange(count)}",
            b=f"v{r.randrange(count)}",
            d=r.choice([0, -1]),
            i=r.choice([0, -1]),
            j=r.choice([0, -1]),
            dtype=r.choice(DTYPES),
        )
        if group is INPLACE:
            lines.append(text)
        else:
            lines.append(f"v{count} = {text}")
            count += 1
    return lines


def make(seed: int, dims, dtype, dev):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(dims, generator=g) * 2
    return (
        (x > 0 if dtype == torch.bool else x.abs() if dtype == torch.uint8 else x).to(dtype).to(dev)
    )


def run(lines: list[str], device: str) -> tuple[dict, list[str | None]]:
    """Variables after the program, and for each statement the type of the exception it raised
    (statements that fail are skipped)."""
    scope = {
        "torch": torch,
        "make": make,
        "dev": device,
        "grad_of": grad_of,
        "mark": torch_hlo.mark_step if device == "hlo" else (lambda: None),
    }
    errors: list[str | None] = []
    for line in lines:
        try:
            exec(line, scope)
            errors.append(None)
        except Exception as error:
            errors.append(type(error).__name__)
            name = line.split(" = ")[0]
            if name.startswith("v") and name[1:].isdigit():
                scope[name] = torch.zeros(2, 3).to(device)
    return {k: v for k, v in scope.items() if k[0] == "v" and k[1:].isdigit()}, errors


def check(seed: int) -> str | None:
    """None when "hlo" agrees with the CPU, else what differs."""
    lines = program(seed)
    want, want_errors = run(lines, "cpu")
    got, got_errors = run(lines, "hlo")
    for line, w, g in zip(lines, want_errors, got_errors):
        if w != g:
            return f"`{line}`: CPU {w or 'ran'}, hlo {g or 'ran'}"
    for name, w in want.items():
        g = got[name]
        if not isinstance(w, torch.Tensor):
            continue
        if g.shape != w.shape or g.dtype != w.dtype or g.stride() != w.stride() and w.numel():
            return (
                f"{name}: {g.dtype} {tuple(g.shape)} {g.stride()}, CPU {w.dtype} {tuple(w.shape)}"
                f" {w.stride()}"
            )
        # what is computed from such a value has no more digits than it
        low = any("float16" in line for line in lines)
        try:
            torch.testing.assert_close(
                g.detach().cpu(),
                w.detach(),
                equal_nan=True,
                rtol=4e-2 if low else 1e-3,
                atol=4e-2 if low else 1e-4,
                check_stride=False,
            )
        except AssertionError as error:
            return f"{name}: {str(error)[:400]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", type=int, help="run this seed only")
    parser.add_argument("--stop", type=int, default=20, help="stop after so many failures")
    args = parser.parse_args()
    import warnings

    warnings.simplefilter("ignore")
    seeds = [args.one] if args.one is not None else range(args.seed, args.seed + args.programs)
    failures = done = 0
    for seed in seeds:
        try:
            problem = check(seed)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        done += 1
        if problem:
            failures += 1
            print(
                f"--- seed {seed}: {problem}\n" + "\n".join("    " + x for x in program(seed)),
                flush=True,
            )
            if failures >= args.stop:
                break
    print(f"{done} programs, {failures} mismatches")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
