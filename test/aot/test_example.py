"""The digits example: trained, compiled, built with a C compiler and run; the same in JavaScript;
the command line."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from torch_hlo import aot
from torch_hlo.aot import link
from torch_hlo.tools.cli import main

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "aot"


def run(*command, code=0) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if link._has_zig():
        return [sys.executable, "-m", "ziglang", "cc"]
    pytest.skip("no C compiler: install gcc or ziglang")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    folder = tmp_path_factory.mktemp("digits")
    targets = ["host"]
    with contextlib.suppress(aot.LinkError):
        link.find("wasm", "wasm32")
        targets.append("wasm32")
    text = run(
        sys.executable,
        "-W",
        "ignore",
        EXAMPLE / "export_digits.py",
        "--output",
        folder,
        "--epochs",
        "8",
        "--target",
        *targets,
    )
    assert float(re.search(r"test accuracy ([\d.]+)%", text)[1]) > 95
    return folder


def check(text: str, images: list[pathlib.Path]) -> None:
    shown = re.findall(r"digit(\d)_\d+\.pgm: (\d) \([\d.]+%\)", text)
    assert len(shown) == len(images) == 10
    assert sum(name == found for name, found in shown) >= 9


def test_c_program(built):
    images = sorted(built.glob("digit*.pgm"))
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    run(
        *compiler(),
        *strict,
        f"-I{built}",
        EXAMPLE / "classify.c",
        built / "digits.so",
        f"-Wl,-rpath,{built}",
        "-o",
        built / "classify",
    )
    check(run(built / "classify", *images), images)
    (built / "bad.pgm").write_text("P5 9 9 255 ")
    assert "not a P5 image" in run(built / "classify", built / "bad.pgm", code=1)
    assert "must fulfil images_size0 <= 1024" in run(built / "classify", *["x"] * 1025, code=1)


def test_header_in_cplusplus(built):
    path = shutil.which("c++") or shutil.which("g++") or pytest.skip("no C++ compiler")
    (built / "main.cc").write_text(
        '#include "digits.h"\nint main() { return digits_model.abi != TORCH_HLO_ABI; }\n'
    )
    run(
        path,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        f"-I{built}",
        built / "main.cc",
        built / "digits.so",
        f"-Wl,-rpath,{built}",
        "-o",
        built / "main",
    )
    run(built / "main")


def test_javascript(built):
    node = shutil.which("node") or pytest.skip("node is not installed")
    if not (built / "digits.wasm").exists():
        pytest.skip("no linker for wasm32: install wasm-ld or ziglang")
    images = sorted(built.glob("digit*.pgm"))
    check(run(node, EXAMPLE / "classify.mjs", built / "digits.wasm", *images), images)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_models_in_one_program(tmp_path):
    x = torch.randn(3)
    for name, layer in (("first", nn.Tanh()), ("second", nn.Sigmoid())):
        aot.compile(layer, (x,), output=tmp_path / f"{name}.o")
    (tmp_path / "main.c").write_text("""
#include "first.h"
#include "second.h"
int main(void) {
    float x[3] = {1, 2, 3}, y[3], z[3];
    if (first(x, y, 0, 0, 0) || second(x, z, 0, 0, 0)) return 1;
    return !(y[0] > 0.7615f && y[0] < 0.7616f && z[0] > 0.7310f && z[0] < 0.7311f);
}
""")
    run(
        *compiler(),
        f"-I{tmp_path}",
        tmp_path / "main.c",
        tmp_path / "first.o",
        tmp_path / "second.o",
        "-o",
        tmp_path / "main",
    )
    run(tmp_path / "main")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_command_line(tmp_path, capsys):
    torch.manual_seed(0)
    linear = nn.Linear(3, 5)
    torch.export.save(
        torch.export.export(
            linear,
            (torch.randn(4, 3),),
            dynamic_shapes=({0: torch.export.Dim("rows")},),
        ),
        tmp_path / "linear.pt2",
    )
    assert (
        main(
            [
                "aot",
                str(tmp_path / "linear.pt2"),
                "-o",
                str(tmp_path / "linear.so"),
                "--weights",
                "beside",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.count(" bytes\n") == 3
    x = torch.randn(7, 3)
    torch.testing.assert_close(aot.load(tmp_path / "linear.so")(x), linear(x))
    (tmp_path / "add.hlo").write_text("""HloModule add
ENTRY main {
  x = f32[4] parameter(0)
  y = s32[] parameter(1)
  c = f32[] convert(y)
  b = f32[4] broadcast(c), dimensions={}
  s = f32[4] add(x, b)
  ROOT r = (f32[4], s32[]) tuple(s, y)
}
""")
    assert (
        main(
            [
                "aot",
                str(tmp_path / "add.hlo"),
                "-o",
                str(tmp_path / "add.so"),
                "--name",
                "plus",
            ]
        )
        == 0
    )
    total, number = aot.load(tmp_path / "add.so")(torch.ones(4), torch.tensor(2, dtype=torch.int32))
    assert total.tolist() == [3.0] * 4 and number.item() == 2
    assert "plus_run;" in (tmp_path / "add.h").read_text()
    assert main(["aot", str(tmp_path / "add.hlo"), "--target", "sparc"]) == 3
    assert "unknown target 'sparc'" in capsys.readouterr().err
    (tmp_path / "broken.pt2").write_bytes((tmp_path / "linear.pt2").read_bytes()[:300])
    assert main(["aot", str(tmp_path / "broken.pt2")]) == 2
