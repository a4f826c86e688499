"""TORCH_HLO_DUMP=dir, and JAX's --xla_dump_to=dir: a folder per compile with everything the
compiler made on the way.

    dir/1234/0007_step_7/reason.txt  00_input.hlo  01_algebra.hlo (passes that changed something)
        50_kernels.ll  51_code.s  52_buffers.txt
The first level is the process, so that several may write to one directory. Any .hlo is a valid
input for the command line tools.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_hlo import config, log
from torch_hlo.hlo.ir import Module
from torch_hlo.hlo.text.printer import module_text

Observe = Callable[[str, object], None]
# stage -> file name; passes are numbered as they come
_FILES = {
    "stablehlo": "40_program.mlir",
    "llvm": "50_kernels.ll",
    "asm": "51_code.s",
    "buffers": "52_buffers.txt",
}
_folders: dict[tuple[str, int], int] = {}


@contextlib.contextmanager
def recording(name: str, reason: str, directory: str = "") -> Iterator[Observe | None]:
    """An `observe(stage, value)` for runtime.compile_program that writes files and logs; None if
    nobody wants to see anything.

    A directory that cannot be written costs a warning, never the compile.
    """
    directory = directory or config.get("DUMP")
    folder = _make_folder(directory, name, reason) if directory else None
    if folder is None and config.get("LOG") < 3:
        yield None
        return
    recorder = _Recorder(folder)
    try:
        yield recorder
    except BaseException as error:
        recorder.write(
            "error.txt",
            f"{type(error).__name__}: {error}\n"
            + "\n".join(getattr(error, "__notes__", ()))
            + "\n",
        )
        raise


class _Recorder:
    """`recorder(stage, value)`. Code comes in several parts, which one file gathers."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.number = 0
        self.text = ""

    def __call__(self, stage: str, value: object) -> None:
        text = module_text(value, "full") if isinstance(value, Module) else str(value)
        if stage.startswith("hlo:"):
            number, self.number = self.number, self.number + 1
            if text == self.text:
                return
            self.text = text
            self.write(f"{number:02d}_{stage[4:]}.hlo", text)
            log.say(3, f"after {stage[4:]}:\n{text}")
        else:
            self.write(_FILES.get(stage, stage + ".txt"), text, "a")
            if stage == "llvm":
                log.say(4, text)

    def write(self, file: str, text: str, mode: str = "w") -> None:
        if self.folder is None:
            return
        try:
            with open(self.folder / file, mode) as f:
                f.write(text if text.endswith("\n") else text + "\n")
        except OSError as error:
            log.warn_once("dump", f"TORCH_HLO_DUMP: cannot write {self.folder / file}: {error}")
            self.folder = None


def _make_folder(directory: str, name: str, reason: str) -> Path | None:
    key = (directory, os.getpid())
    _folders[key] = number = _folders.get(key, 0) + 1
    folder = Path(directory) / str(os.getpid()) / f"{number:04d}_{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reason.txt").write_text(reason + "\n")
    except OSError as error:
        log.warn_once("dump", f"TORCH_HLO_DUMP: cannot write {folder}: {error}")
        return None
    return folder
