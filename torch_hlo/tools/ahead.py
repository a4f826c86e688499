"""`aot`: programs as shared libraries, object files and WebAssembly modules. See
docs/guide/ahead_of_time.md."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch_hlo.compiler.llvm import PLATFORMS

from . import UsageError
from .text_api import load

if TYPE_CHECKING:  # text programs do not need PyTorch
    from torch.export import ExportedProgram


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cpus = "; ".join(f"{name}: {', '.join(p.cpus)}" for name, p in PLATFORMS.items())
    parser.add_argument(
        "file",
        help="HLO or StableHLO text, or a program saved by torch.export.save (.pt2)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=(
            "MODEL.so, MODEL.o or MODEL.wasm; the header is written beside it (default: the input's"
            " name)"
        ),
    )
    parser.add_argument("--target", default="host", help=f"host (default), {', '.join(PLATFORMS)}")
    parser.add_argument(
        "--cpu",
        help=f"the least processor that has to run it: {cpus}; default for host: this machine",
    )
    parser.add_argument("--name", help="prefix of the C names (default: the output's name)")
    parser.add_argument(
        "--weights",
        choices=("embed", "beside"),
        default="embed",
        help="constants in the library (default) or in a file beside it",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from torch_hlo import aot

    options = {
        "target": args.target,
        "cpu": args.cpu,
        "output": args.output or _default(args),
        "name": args.name,
        "weights": args.weights,
    }
    if zipfile.is_zipfile(args.file):
        files = aot.compile(_exported(args.file), **options)
    else:
        files = aot.compile_hlo(load(args.file), **options)
    for path in (files.library, files.header, files.weights):
        if path is not None:
            print(f"{path}: {path.stat().st_size} bytes")
    return 0


def _default(args: argparse.Namespace) -> str:
    return Path(args.file).stem + (".wasm" if args.target.startswith("wasm") else ".so")


def _exported(path: str) -> ExportedProgram:
    import torch

    try:
        return torch.export.load(path)
    except Exception as error:
        raise UsageError(f"{path} is no program that this PyTorch can load: {error}") from None
