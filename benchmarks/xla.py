"""The engine "jax": XLA's CPU compiler, as JAX ships it, on the very step that the lazy device
recorded.

    python -m benchmarks.xla WORKLOAD FOLDER          # here: writes the step, before any pass of
                                                      # ours, and its inputs
    JAX_PYTHON benchmarks/xla.py FOLDER THREADS DEVICE    # there: benchmarks.worker's protocol;
                                                      # needs jax, and neither torch nor torch_hlo

What it measures: StableHLO of a whole training or inference step in XLA's own pipeline, parameters
and optimizer state donated, called through PJRT without any tracing. Not measured: what JAX's own
lowering of the same model might say differently (our attention is a function of plain ops here),
and the host time of a framework around it. The first step is reading the text, compiling and
running.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

PROGRAM, DESCRIPTION = "step.mlir", "step.json"


def export(workload: str, folder: str) -> None:
    """Write the steady step of a workload: its StableHLO, and each parameter's values as raw
    bytes."""
    import benchmarks.gpu
    import benchmarks.models  # noqa: F401  (their rows)
    import torch_hlo
    from benchmarks.workloads import WORKLOADS
    from torch_hlo.compiler.simplify.legalize import legalize
    from torch_hlo.hlo.stablehlo import stablehlo_text

    w = WORKLOADS[workload]("hlo")
    for _ in range(2):  # optimizer state is made in the first
        w.step()
        torch_hlo.sync()
    result = w.step()  # alive at the cut: what nobody holds is not computed
    module, arrays = torch_hlo.debug.pending_step()
    del result
    with open(os.path.join(folder, PROGRAM), "w") as f:
        f.write(stablehlo_text(legalize.run(module)))
    for i, array in enumerate(arrays):
        array.tofile(os.path.join(folder, f"{i}.bin"))
    description = {
        "parameters": [(p.shape.dtype, p.shape.dims) for p in module.entry.params],
        "aliases": module.aliases,
        "flops": w.flops,
        "bytes": w.bytes,
    }
    with open(os.path.join(folder, DESCRIPTION), "w") as f:
        json.dump(description, f)


class Step:
    """A compiled step and its present inputs; running it replaces those that the program
    updates."""

    def __init__(self, folder: str, description: dict, device: str) -> None:
        import jax
        import jax.extend.backend
        import ml_dtypes
        import numpy as np

        jax.config.update("jax_enable_x64", True)
        names = {
            "pred": np.bool_,
            "bf16": ml_dtypes.bfloat16,
            "f16": np.float16,
            "f32": np.float32,
            "f64": np.float64,
        }
        names |= {
            f"{k}{bits}": f"{name}{bits}"
            for k, name in (("s", "int"), ("u", "uint"))
            for bits in (8, 16, 32, 64)
        }
        self.aliases = description["aliases"]
        self.inputs = [
            jax.device_put(
                np.fromfile(os.path.join(folder, f"{i}.bin"), np.uint8)
                .view(names[dtype])
                .reshape(dims)
            )
            for i, (dtype, dims) in enumerate(description["parameters"])
        ]
        jax.block_until_ready(self.inputs)
        self.folder, self.backend, self.results = (
            folder,
            jax.extend.backend.get_backend(device),
            [],
        )

    def compile(self) -> None:
        from jax._src.lib import xla_client

        with open(os.path.join(self.folder, PROGRAM)) as f:
            text = f.read()
        options = xla_client.CompileOptions()
        devices = xla_client.DeviceList(tuple(self.backend.local_devices()[:1]))
        self.program = self.backend.compile_and_load(text, devices, options)

    def __call__(self) -> None:
        """Start a step."""
        self.results = self.program.execute(self.inputs)
        for o, i in self.aliases:
            self.inputs[i] = self.results[o]

    def wait(self) -> None:
        for r in self.results:
            r.block_until_ready()


def serve(folder: str, device: str) -> None:
    """benchmarks.worker's protocol on stdin and stdout."""
    with open(os.path.join(folder, DESCRIPTION)) as f:
        description = json.load(f)
    step = Step(folder, description, device)
    start = time.perf_counter()
    step.compile()
    step()
    step.wait()
    print(
        json.dumps(
            {
                "ready": True,
                "first_step": time.perf_counter() - start,
                "flops": description["flops"],
                "bytes": description["bytes"],
            }
        ),
        flush=True,
    )
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "quit":
            break
        seconds = []
        for _ in range(int(rest[0])):
            start = time.perf_counter()
            step()
            step.wait()
            seconds.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    if __spec__ is not None:  # as a module: the half that exports
        export(sys.argv[1], sys.argv[2])
    else:
        os.environ["NPROC"] = sys.argv[2]  # threads of XLA's pool
        serve(sys.argv[1], sys.argv[3])
