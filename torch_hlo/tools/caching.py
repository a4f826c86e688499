"""`cache`: look after the programs that are kept on disk between processes (TORCH_HLO_CACHE)."""

import argparse
import tarfile
from collections.abc import Callable

from torch_hlo.compiler import cache

from . import UsageError


def _info(args: argparse.Namespace) -> int:
    for name, value in cache.info().items():
        if value != "":
            print(f"{name:10s} {value}")
    return 0


def _clear(args: argparse.Namespace) -> int:
    print(f"{cache.clear()} entries removed")
    return 0


def _verify(args: argparse.Namespace) -> int:
    valid, damaged = cache.verify()
    print(
        f"{valid} entries are valid, {len(damaged)} were damaged and are removed"
        + "".join(f"\n  {name}" for name in damaged)
    )
    return int(bool(damaged))


def _export(args: argparse.Namespace) -> int:
    print(f"{cache.export_archive(_archive(args))} entries written to {args.archive}")
    return 0


def _import(args: argparse.Namespace) -> int:
    try:
        added, rejected = cache.import_archive(_archive(args))
    except tarfile.TarError as error:
        raise UsageError(f"{args.archive} is no exported cache: {error}") from None
    print(f"{added} entries added, {rejected} rejected")
    return int(bool(rejected))


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "info": _info,
    "clear": _clear,
    "verify": _verify,
    "export": _export,
    "import": _import,
}


def _archive(args: argparse.Namespace) -> str:
    if not args.archive:
        raise UsageError(f"cache {args.verb} needs the name of a tar file")
    return args.archive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "verb",
        choices=VERBS,
        help="info; clear; verify (removes damaged entries, exit 1); export or import FILE.tar",
    )
    parser.add_argument(
        "archive",
        nargs="?",
        metavar="FILE.tar",
        help="import only what you would run: entries are machine code",
    )
    parser.set_defaults(run=lambda args: VERBS[args.verb](args), file=None)
