"""`doctor`: what this installation is made of, and what to change."""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import torch

import torch_hlo
from torch_hlo import config
from torch_hlo.compiler import cache
from torch_hlo.compiler.llvm import target
from torch_hlo.device import runtime

PACKAGES = ("torch", "llvmlite", "numpy", "jax", "transformers", "lightning", "keras")
FEATURES = ("amx-bf16", "avx512f", "avx512bf16", "avx512fp16", "avx2", "fma")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run, file=None)


def _run(args: argparse.Namespace) -> int:
    for name, value in facts():
        print(f"{name:12s} {value}")
    found = list(advice())
    print("\n".join(f"change: {text}" for text in found) or "nothing to change")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """(what, how it is here), a line each."""
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch_hlo", torch_hlo.__version__
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    cpu = target.host()
    there = [name for name in FEATURES if cpu.has(name)]
    yield "processor", f"{cpu.cpu}: {' '.join(there) or 'no vectors that we use'}"
    yield "threads", f"{_threads()} of {_cores()} cores (PyTorch: {torch.get_num_threads()})"
    free, total = torch.get_device_module("hlo").mem_get_info()
    yield "device", f"{runtime.backend_name()}, {free >> 20} of {total >> 20} MiB free"
    kept = cache.info()
    yield "cache", f"{kept['directory']}: {kept['entries']} programs, {kept['bytes']} bytes"
    changed = (f for f in config.FLAGS if config.variable(f"TORCH_HLO_{f}", None) is not None)
    yield "flags", " ".join(f"{f}={config.get(f)!r}" for f in changed) or "as they are"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> int:
    return config.get("THREADS") or torch.get_num_threads()


def advice() -> Iterator[str]:
    """What would make this installation faster, or work at all."""
    cores = _cores()
    threads = _threads()
    kept = cache.info()
    if threads > cores:
        yield f"{threads} threads share {cores} cores: set OMP_NUM_THREADS={cores}"
    elif threads < cores // 2:
        yield f"{threads} of {cores} cores are used: unset OMP_NUM_THREADS, or set it to {cores}"
    if kept["problem"]:
        yield f"programs are not kept on disk: {kept['problem']}"
    elif not config.get("CACHE"):
        yield "programs are compiled again by each process: unset TORCH_HLO_CACHE"
    if sys.dont_write_bytecode and not os.path.exists(torch_hlo.__cached__):
        folder = os.path.dirname(torch_hlo.__file__)
        yield f"each process compiles the package's sources: run python -m compileall -q {folder}"
    if not target.host().has("avx2"):
        yield "the processor has no AVX2: programs are slow here"
    if config.get("EAGER"):
        yield "TORCH_HLO_EAGER=1 runs one operation at a time: for debuggers"
    if config.get("CHECK"):
        yield "TORCH_HLO_CHECK makes every compile slower: for those who work on the compiler"
