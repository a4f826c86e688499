"""torch's optim_db on "hlo" against CPU: every optimizer with every set of options, a few steps of
a small model.

    python -m test.sweeps.optimizers [--only REGEX] [--verbose]
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import traceback
import warnings

import torch
from torch.testing._internal.common_optimizers import optim_db

import torch_hlo
from test.sweeps import counted

STEPS = 3


def optimize(kind: type, options: dict, device: str) -> list[torch.Tensor]:
    """The parameters after a few steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(
        device
    )
    if kind is torch.optim.LBFGS:  # its history amplifies rounding some 1e5 times
        model.double()
    parameters = [p for p in model.parameters() if kind.__name__ != "Muon" or p.dim() == 2]
    x = torch.randn(10, 6).to(device, next(model.parameters()).dtype)
    if kind.__name__ == "SparseAdam":
        raise NotImplementedError("sparse gradients")
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    optimizer = kind(parameters, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        if device == "hlo":
            torch_hlo.mark_step()
    again = kind(parameters, **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.step(closure)
    return [p.detach().cpu() for p in model.parameters()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression on the optimizer's name")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    passed = tried = 0
    for info in counted("optimizers", optim_db):
        kind = info.optim_cls
        if not re.search(args.only, kind.__name__):
            continue
        for case in info.optim_inputs_func(device="cpu"):
            name = f"{kind.__name__} {case.desc}"
            try:
                want = optimize(kind, case.kwargs, "cpu")
            except Exception as error:
                print(
                    f"{name}: skipped, on the CPU: {type(error).__name__}: {str(error)[:100]}",
                    flush=True,
                )
                continue
            tried += 1
            try:
                torch.testing.assert_close(
                    optimize(kind, case.kwargs, "hlo"), want, rtol=1e-3, atol=1e-4
                )
                passed += 1
            except Exception as error:
                print(
                    f"{name}: FAIL {type(error).__name__}: {str(error)[:300]}",
                    flush=True,
                )
                if args.verbose:
                    traceback.print_exc()
    print(f"{passed} of {tried} pass")
    return 0


if __name__ == "__main__":
    sys.exit(main())
