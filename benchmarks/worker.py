"""One engine running one workload in a process of its own, told by lines on stdin what to do.

python -m benchmarks.worker ENGINE WORKLOAD THREADS DEVICE   ->   {"ready": …}, then for each
    "steps N" line {"seconds": [...]}, "quit" ends it.
"""

from __future__ import annotations

import json
import resource
import sys
import time


def engine_hlo(make, device):
    import torch_hlo

    w = make("hlo")

    def step():
        result = w.step()
        torch_hlo.mark_step()
        return result

    return step, lambda: torch_hlo.sync(), w


def engine_hlo_captured(make, device):
    import torch_hlo

    w = make("hlo")
    return torch_hlo.compile(w.step), torch_hlo.sync, w


def _compiled(backend):
    def engine(make, device):
        import torch

        w = make(device)
        return (
            w.compiled(lambda f: torch.compile(f, backend=backend)),
            _waiting(device),
            w,
        )

    return engine


def engine_eager(make, device):
    w = make(device)
    return w.step, _waiting(device), w


def _waiting(device):
    """What waits for PyTorch's own work on a device."""
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def engine_torch_xla(make, device):
    import torch_xla.core.xla_model as xm

    w = make("xla")

    def step():
        result = w.step()  # alive at the cut: what nobody holds is not computed
        xm.mark_step()
        return result

    return step, xm.wait_device_ops, w


ENGINES = {
    "eager": engine_eager,
    "inductor": _compiled("inductor"),
    "hlo": engine_hlo,
    "hlo_captured": engine_hlo_captured,
    "hlo_compile": _compiled("hlo"),
    "torch_xla": engine_torch_xla,
}


def main() -> None:
    engine, name, threads, device = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        sys.argv[4],
    )
    out, sys.stdout = sys.stdout, sys.stderr
    import torch

    torch.set_num_threads(threads)
    if engine.startswith("hlo"):
        import torch_hlo  # noqa: F401  (an import is no part of the first step)
    import benchmarks.gpu
    import benchmarks.models  # noqa: F401  (their rows)
    from benchmarks.workloads import WORKLOADS

    step, wait, w = ENGINES[engine](WORKLOADS[name], device)
    wait()
    start = time.perf_counter()
    step()
    wait()
    first = time.perf_counter() - start
    print(
        json.dumps({"ready": True, "first_step": first, "flops": w.flops, "bytes": w.bytes}),
        file=out,
        flush=True,
    )
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "quit":
            break
        seconds, host = [], []
        for _ in range(int(rest[0])):
            # of this thread: not what preempts it
            start, host_start = time.perf_counter(), time.thread_time()
            step()
            host.append(time.thread_time() - host_start)
            wait()
            seconds.append(time.perf_counter() - start)
        peak = (
            torch.cuda.max_memory_allocated()
            if device == "cuda" and engine != "hlo"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        if device == "cuda" and engine == "hlo":
            peak = torch.hlo.max_memory_allocated()
        print(
            json.dumps(
                {
                    "seconds": seconds,
                    "host": host,
                    "peak_bytes": peak,
                    **counters(engine),
                }
            ),
            file=out,
            flush=True,
        )


def counters(engine: str) -> dict:
    if not engine.startswith("hlo"):
        return {}
    import torch_hlo

    m = torch_hlo.metrics
    ops = m.metric_data("TensorsGraphSize")
    return {
        "ops": int(ops[2][-1][1]) if ops else 0,
        "compiles": m.counter_value("UncachedCompile") or 0,
        "fallbacks": [n for n in m.counter_names() if n.startswith("aten::")],
    }


if __name__ == "__main__":
    main()
