"""torch's module_db on "hlo" against CPU: outputs and gradients of every module with every sample
of arguments.

    python -m test.sweeps.modules [--only REGEX] [--samples 4] [--verbose]
"""

from __future__ import annotations

import argparse
import copy
import re
import signal
import sys
import traceback
import warnings

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db

from test.sweeps import counted
from test.sweeps.op_db import compare, move, tensors

RANDOM = re.compile("Dropout|RReLU|FractionalMaxPool")


def run(module: torch.nn.Module, call, device: str) -> list[torch.Tensor]:
    """Outputs and gradients of parameters and inputs."""
    torch.manual_seed(1)
    module = copy.deepcopy(module)
    # its parameters are drawn at the first call: numbers of the CPU's generator for both
    if isinstance(module, LazyModuleMixin):
        module(*move(call.args, "cpu"), **move(call.kwargs, "cpu"))
    module = module.to(device)
    args, kwargs = move(call.args, device), move(call.kwargs, device)
    out = module(*args, **kwargs)
    leaves = [t for t in (*module.parameters(), *tensors((args, kwargs))) if t.requires_grad]
    outs = [t for t in tensors(out) if t.requires_grad]
    total = sum(((t.abs() if t.is_complex() else t).double().square()).sum() for t in outs)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if outs and leaves else ()
    return [*tensors(out), *[g for g in gradients if g is not None]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression on the module's name")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=60, help="limit per module")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    def alarm(*_):
        raise TimeoutError(f"more than {args.seconds} s")

    signal.signal(signal.SIGALRM, alarm)
    passed = tried = 0
    for info in counted("modules", module_db):
        if not re.search(args.only, info.name):
            continue
        tried += 1
        signal.alarm(args.seconds)
        try:
            for training in (True, False):
                samples = info.module_inputs_func(
                    info,
                    device="cpu",
                    dtype=torch.float32,
                    requires_grad=True,
                    training=training,
                )
                for _, sample in zip(range(args.samples), samples):
                    if sample.forward_input is None:
                        continue
                    build = sample.constructor_input
                    torch.manual_seed(0)
                    try:
                        module = info.module_cls(*build.args, **build.kwargs).train(training)
                        want = run(module, sample.forward_input, "cpu")
                    except Exception:  # the sample does not suit the CPU either
                        continue
                    compare(
                        run(module, sample.forward_input, "hlo"),
                        want,
                        values=not (training and RANDOM.search(info.name)),
                    )
            passed += 1
        except Exception as error:
            print(
                f"{info.name}: FAIL {type(error).__name__}: {str(error)[:300]}",
                flush=True,
            )
            if args.verbose:
                traceback.print_exc()
        finally:
            signal.alarm(0)
    print(f"{passed} of {tried} pass")
    return 0


if __name__ == "__main__":
    sys.exit(main())
