"""Runs compiled libraries in a process without torch and NumPy: `python -I bare.py LIBRARY.py
JOBS.json`.

A job is {"library", "inputs": [[file, dtype number, sizes]], "outputs": [file]}; arrays are files
of raw elements."""

import array
import ctypes
import importlib.util
import json
import sys


def main() -> None:
    spec = importlib.util.spec_from_file_location("library", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    sys.modules["library"] = module
    spec.loader.exec_module(module)
    with open(sys.argv[2]) as file:
        jobs = json.load(file)
    for job in jobs:
        library = module.Library(job["library"])
        memory = []
        for path, _, sizes in job["inputs"]:
            with open(path, "rb") as file:
                data = array.array("B", file.read())
            memory.append((data, (data.buffer_info()[0], len(data), sizes)))
        dtypes = [dtype for _, dtype, _ in job["inputs"]]
        shapes, _ = library.plan([sizes for _, _, sizes in job["inputs"]], dtypes)
        results = []
        for shape, a in zip(shapes, library.outputs):
            count = 1
            for n in shape:
                count *= n
            data = array.array(
                "B",
                bytes(
                    max(
                        1,
                        count * {1: 1, 5: 8, 10: 2, 11: 4, 12: 8, 16: 2, 2: 1, 4: 4}[a.dtype],
                    )
                ),
            )
            results.append((data, (data.buffer_info()[0], len(data), shape)))
        library.run([m for _, m in memory], [m for _, m in results], dtypes=dtypes)
        for path, (data, _) in zip(job["outputs"], results):
            with open(path, "wb") as file:
                file.write(data.tobytes())
    assert not {"torch", "numpy", "llvmlite"} & set(sys.modules)
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    print("done")


main()
