"""The command line: `python -m torch_hlo COMMAND FILE …`. Programs are HLO or StableHLO text; the
format is recognised.

Exit codes: 0 fine, 1 the programs or values differ (or a fault was found), 2 bad usage or a file
that cannot be read, 3 the program does not compile or run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torch_hlo import profiler
from torch_hlo.compiler.pipeline import random_inputs
from torch_hlo.device import multi_device
from torch_hlo.hlo.evaluate.interpreter import EvaluateError
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.ir.verify import VerifyError
from torch_hlo.hlo.text.printer import module_text
from torch_hlo.hlo.text.scanner import ParseError

from . import (
    UsageError,
    ahead,
    bisect as bisection,
    caching,
    check,
    describe,
    devices,
    doctor,
    execute,
    optimise,
    per_device,
    reduce as reduction,
    scripts,
    view,
)
from .text_api import load, load_inputs

OK = 0
DIFFERENT = 1
USAGE = 2
FAILED = 3

EXAMPLES = """examples:
  python -m torch_hlo run model.hlo                     run on random inputs, print the results
  python -m torch_hlo run model.mlir --input x.npz --output y.npz      also HLO text and .mlirbc
  python -m torch_hlo run model.hlo --compare evaluator   exit 1 when the values differ
  python -m torch_hlo run model.hlo --time
  python -m torch_hlo run model.hlo --devices 8         carry out shardings on 8 virtual devices
  python -m torch_hlo profile model.hlo                 time and roofline share of every step
  python -m torch_hlo profile train.py -o profile.html -- --epochs 1    what a script does when
  python -m torch_hlo opt model.hlo                     the program after all passes
  python -m torch_hlo opt model.hlo --passes algebra,dce --emit stablehlo
  python -m torch_hlo opt model.hlo --emit asm
  python -m torch_hlo bisect model.hlo                  which pass changes the values?
  python -m torch_hlo reduce model.hlo -o small.hlo     the smallest program that goes wrong
  python -m torch_hlo reduce model.hlo --check './fails.sh {}' -o small.hlo
  python -m torch_hlo partition model.hlo               one device's program, from shardings
  python -m torch_hlo partition model.mlir --explain    why, and every collective with its bytes
  python -m torch_hlo view model.hlo -o view.html       its graph; also of a TORCH_HLO_DUMP folder
  python -m torch_hlo diff a.hlo b.hlo
  python -m torch_hlo explain model.hlo
  python -m torch_hlo explain train.py -o page.html -- --epochs 1    why did it compile?
  python -m torch_hlo aot model.hlo -o model.so         a C library; also .o, .wasm, .pt2 programs
  python -m torch_hlo check train.py                    does it train as on the CPU? one page
  python -m torch_hlo doctor                            versions, devices, and what to change
  python -m torch_hlo cache info                        programs on disk; also clear, verify, …
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    args = parsed(sys.argv[1:] if argv is None else argv)
    try:
        code: int = args.run(args)
        return code
    except (ParseError, VerifyError) as error:
        return _complain(f"{getattr(error, 'filename', args.file)}: {error}", USAGE)
    except (OSError, EvaluateError, UsageError) as error:
        return _complain(str(error), USAGE)
    except (ValueError, RuntimeError, NotImplementedError, MemoryError) as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        return _complain(f"{type(error).__name__}: {error}{notes}", FAILED)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; `rest` are those after `--`, a script's."""
    end = [*argv, "--"].index("--")
    return parser().parse_args(argv[:end], argparse.Namespace(rest=argv[end + 1 :]))


def _complain(message: str, code: int) -> int:
    print(f"torch_hlo: {message}", file=sys.stderr)
    return code


Run = Callable[[argparse.Namespace], int]


class _Commands:
    """The commands, each made by a method; `run` of the parsed arguments is its function."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(self, name: str, fn: Run, text: str, inputs: bool = False) -> Callable[..., object]:
        """A command on one file; gives what adds its arguments. `inputs`: it takes arrays."""
        p = self.parsers.add_parser(name, help=text, description=text)
        p.add_argument("file", help="HLO or StableHLO text")
        p.set_defaults(run=fn)
        if inputs:
            arrays = "arrays for the parameters, in order; default: random"
            p.add_argument("--input", metavar="X.npz", help=arrays)
            p.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
        return p.add_argument

    def running(self) -> None:
        run = self.add("run", _run, "compile and run a program", inputs=True)
        written = "write the results (out0, out1, …) instead of printing them"
        run("--output", metavar="Y.npz", help=written)
        run(
            "--compare",
            choices=("evaluator", "xla"),
            help="also compute the values there; exit 1 when they differ",
        )
        run(
            "--devices",
            type=int,
            metavar="N",
            help="on N virtual devices (or torchrun's N processes): shardings are carried out",
        )
        run("--time", action="store_true", help="print compile time and the best of several runs")
        timing = "time every step and compare with the machine's limits; of a script: a page"
        timed = self.add("profile", _profile, timing, inputs=True)
        timed("-o", "--output", metavar="PAGE.html", help="of a script (default profile.html)")
        timed("--trace", metavar="TRACE.json", help="of a script, for Perfetto")
        counts = "runs; the best time of each step counts (default 10)"
        timed("--runs", type=int, default=10, help=counts)
        timed("--rows", type=int, default=30, help="steps to show (default 30)")
        timed(
            "--clock",
            choices=("wall", "thread"),
            default="wall",
            help="thread: CPU time, for TORCH_HLO_THREADS=1 on a busy machine",
        )

    def faults(self) -> None:
        opt = self.add("opt", _opt, "run passes and print the program")
        known = f"in this order; default: the pipeline. Passes: {', '.join(optimise.passes())}"
        opt("--passes", metavar="A,B,…", help=known)
        opt("--emit", choices=optimise.EMITS, default="hlo", help="what to print (default hlo)")
        text = "find the pass that changes a program's values"
        find = self.add("bisect", _bisect, text, inputs=True)
        guilty = "write the program that the guilty pass was given"
        find("-o", "--output", metavar="FILE", help=guilty)
        shrink = self.add("reduce", _reduce, "shrink a program that goes wrong", inputs=True)
        shrink(
            "--check",
            metavar="COMMAND",
            help="exits 0 when the program in file {} still fails; default: compiled and evaluated"
            " values differ",
        )
        shrink("--budget", type=int, default=500, help="trials (default 500)")
        small = "write the small program instead of printing it"
        shrink("-o", "--output", metavar="FILE", help=small)

    def looking(self) -> None:
        cut = self.add(
            "partition",
            _partition,
            "the program of one device, from one with sharding annotations; a table of its"
            " collectives",
        )
        cut(
            "--explain",
            action="store_true",
            help="print why every array is cut as it is, and every collective, instead of the"
            " program",
        )
        axes = "mesh axes over which updates of weights and optimizer states are split"
        cut("--update-axes", metavar="X,Y", default="", help=axes)
        self.add("diff", _diff, "compare two programs; exit 1 when they differ")("other")
        text = "a page: the graph, what passes changed, fusions, memory, machine code"
        page = "default view.html"
        self.add("view", _view, text)("-o", "--output", metavar="PAGE.html", help=page)
        text = "what a program is made of; of a script: why each of its programs was compiled"
        page = "write a page; `-- ARGUMENTS` are the script's"
        self.add("explain", _explain, text)("-o", "--output", metavar="PAGE.html", help=page)

    def libraries(self) -> None:
        text = "compile into a library that needs no Python"
        ahead.add_arguments(self.parsers.add_parser("aot", help=text))
        text = "compiled programs kept on disk: info, clear, verify, export, import"
        caching.add_arguments(self.parsers.add_parser("cache", help=text))

    def scripts(self) -> None:
        text = "train with a script for a few steps, on hlo and on the CPU, and compare"
        check.add_arguments(self.parsers.add_parser("check", help=text, description=text))
        text = "versions, processor, devices, cache, and what to change"
        doctor.add_arguments(self.parsers.add_parser("doctor", help=text, description=text))


def parser() -> argparse.ArgumentParser:
    """Of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_hlo",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = _Commands(parser)
    commands.running()
    commands.faults()
    commands.looking()
    commands.libraries()
    commands.scripts()
    return parser


def _inputs(args: argparse.Namespace, module: Module) -> Sequence[Any]:
    return _given(args, module) or random_inputs(module, args.seed)


def _given(args: argparse.Namespace, module: Module) -> Sequence[Any]:
    return load_inputs(args.input, len(module.entry.params)) if args.input else ()


def _run(args: argparse.Namespace) -> int:
    module = load(args.file)
    start = time.perf_counter()
    first = True
    if args.devices is None:
        inputs = _inputs(args, module)
        run = execute.runner(module, inputs)
    else:
        first = multi_device.join()  # of several processes only one prints
        several = devices.OnDevices(module, args.devices)
        inputs = _given(args, module) or several.random_inputs(args.seed)
        run = several.runner(inputs)
    compiled = time.perf_counter() - start
    results = run()
    best = _best(run, 20 if args.devices else 200) if args.time else 0.0
    if not first:
        return OK
    if args.time:
        print(f"compile {compiled * 1e3:.1f} ms, run {best * 1e3:.3f} ms")
    if args.output:
        np.savez(args.output, **{f"out{i}": np.asarray(a) for i, (a, _) in enumerate(results)})
    elif not args.compare and not args.time:
        for i, (array, dtype) in enumerate(results):
            for name, part in (
                [(f"output {i}", array)]
                if isinstance(array, np.ndarray)
                else [(f"output {i} of device {d}", a) for d, a in enumerate(array)]
            ):
                print(f"{name}: {dtype}{list(part.shape)}")
                print(np.array2string(part, threshold=200))
    if args.compare:
        wrong = _wrong(args, module, inputs, results)
        print(f"differs from {args.compare}: {wrong}" if wrong else f"agrees with {args.compare}")
        return DIFFERENT if wrong else OK
    return OK


def _wrong(
    args: argparse.Namespace,
    module: Module,
    inputs: Sequence[Any],
    results: Sequence[tuple[Any, str]],
) -> str:
    """How the results differ. On several devices, results of an annotated program from those of one
    device, others from the evaluator's."""
    if args.devices is None or devices.is_annotated(module):
        return execute.difference(results, execute.ENGINES[args.compare](module, inputs))
    want = devices.evaluate_on_devices(module, inputs, args.devices)
    return execute.difference(
        *(
            [(a, t) for v, t in r for a in (v if isinstance(v, list) else [v])]
            for r in (results, want)
        )
    )


def _profile(args: argparse.Namespace) -> int:
    if args.file.endswith(".py"):
        output = args.output or "profile.html"
        return OK if scripts.profile(args.file, args.rest, output, args.trace) else FAILED
    module = load(args.file)
    with profiler.profile(args.clock) as report:
        run = execute.runner(module, _inputs(args, module))
        for _ in range(max(args.runs, 1)):
            run()
    print(report.table(args.rows))
    return OK


def _best(run: Callable[[], object], runs: int = 200) -> float:
    """Seconds of the fastest run, of 20 (as often on every device) or within about a second."""
    best = float("inf")
    total = 0.0
    for _ in range(runs):
        start = time.perf_counter()
        run()
        elapsed = time.perf_counter() - start
        best = min(best, elapsed)
        total = total + elapsed
        if total > 1 and runs > 20:
            break
    return best


def _opt(args: argparse.Namespace) -> int:
    print(optimise.emitted(load(args.file), args.emit, args.passes), end="")
    return OK


def _bisect(args: argparse.Namespace) -> int:
    module = load(args.file)
    found = bisection.bisect(module, _inputs(args, module))
    if found is None:
        print("every pass and the compiled program keep the values")
        return OK
    print(f"{found.culprit}: {found.reason}")
    if args.output and found.before is not None:
        Path(args.output).write_text(module_text(found.before))
        print(f"the program it was given is in {args.output}")
    return DIFFERENT


def _reduce(args: argparse.Namespace) -> int:
    module = load(args.file)
    given = load_inputs(args.input, len(module.entry.params)) if args.input else None
    fails = _checked_by(args.check) if args.check else _goes_wrong(module, given, args.seed)
    small = reduction.shrink(
        module,
        fails,
        log=lambda line: print(line, file=sys.stderr),
        budget=args.budget,
    )
    text = module_text(small)
    if args.output:
        Path(args.output).write_text(text)
    else:
        print(text, end="")
    return OK


def _goes_wrong(original: Module, given: Sequence[Any] | None, seed: int) -> reduction.Fails:
    """Whether compiled and evaluated values differ, or compiling fails."""

    def fails(module: Module) -> bool:
        inputs = (
            given
            if given is not None and module.entry.params == original.entry.params
            else random_inputs(module, seed)
        )
        want = execute.run_evaluator(module, inputs)
        try:
            return bool(execute.difference(execute.run_module(module, inputs), want))
        except Exception:  # a compiler that fails is what is being reduced
            return True

    return fails


def _checked_by(command: str) -> reduction.Fails:
    def fails(module: Module) -> bool:
        with tempfile.NamedTemporaryFile("w", suffix=".hlo", delete=False) as file:
            file.write(module_text(module))
        try:
            shown = (
                command.replace("{}", file.name) if "{}" in command else f"{command} {file.name}"
            )
            return (
                subprocess.run(shown, shell=True, capture_output=True, timeout=600).returncode == 0
            )
        finally:
            Path(file.name).unlink()

    return fails


def _partition(args: argparse.Namespace) -> int:
    show = per_device.explain if args.explain else per_device.program
    print(show(load(args.file), tuple(a for a in args.update_axes.split(",") if a)))
    return OK


def _diff(args: argparse.Namespace) -> int:
    text = describe.diff(load(args.file), load(args.other), (args.file, args.other))
    print(text or "the same program")
    return DIFFERENT if text else OK


def _view(args: argparse.Namespace) -> int:
    output = args.output or "view.html"
    view.save(args.file, output)
    print(output)
    return OK


def _explain(args: argparse.Namespace) -> int:
    if args.file.endswith(".py"):
        return OK if scripts.explain(args.file, args.rest, args.output) else FAILED
    print(describe.explain(load(args.file)))
    return OK
