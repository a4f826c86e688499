"""Text programs compiled and run, and the command line."""

from pathlib import Path

import numpy as np
import pytest
import torch

import torch_hlo
from torch_hlo.hlo.text.parser import ParseError, parse_module
from torch_hlo.tools import bisect, cli, execute, reduce
from torch_hlo.tools.adopt import adopted

SAMPLES = Path(__file__).parent.parent / "hlo" / "samples"
SUM = """HloModule sums
add { x = f32[] parameter(0)
 y = f32[] parameter(1)
 ROOT z = f32[] add(x, y) }
ENTRY main {
 p = f32[s0,3] parameter(0)
 q = bf16[3] parameter(1)
 zero = f32[] constant(0)
 r = f32[3] reduce(p, zero), dimensions={0}, to_apply=add
 c = bf16[3] convert(r)
 s = bf16[3] add(c, q)
 ROOT t = (f32[3], (bf16[3])) tuple(r, (bf16[3]) u)
}"""
SUM = SUM.replace(
    " ROOT t = (f32[3], (bf16[3])) tuple(r, (bf16[3]) u)",
    " u = (bf16[3]) tuple(s)\n ROOT t = (f32[3], (bf16[3])) tuple(r, u)",
)


def inputs():
    return np.ones((4, 3), "f"), np.float32([1, 2, 256.5])


def test_run_text_on_arrays_tensors_and_lists():
    x, y = inputs()
    for given in ((x, y), ([x, y],)):
        r, s = torch_hlo.run_text(SUM, *given)
        assert r.tolist() == [4, 4, 4] and s.tolist() == [5, 6, 260]
    r, s = torch_hlo.run_text(SUM, torch.from_numpy(x), torch.from_numpy(y).bfloat16())
    assert r.dtype is torch.float32 and s.dtype is torch.bfloat16 and s.tolist() == [5, 6, 260]


def test_run_text_reads_stablehlo():
    (y,) = torch_hlo.run_text(
        "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n%0 = stablehlo.add %a, %a :"
        " tensor<2xf32>\nreturn %0 : tensor<2xf32>\n}",
        np.float32([1, 2]),
    )
    assert y.tolist() == [2, 4]


def test_parse_text_says_where():
    with pytest.raises(ParseError, match="line 1, column 6"):
        torch_hlo.parse_text("hello")


def test_wrong_inputs():
    with pytest.raises(ValueError, match="takes 2 arrays, got 1"):
        torch_hlo.run_text(SUM, np.ones((4, 3), "f"))
    with pytest.raises(ValueError, match="convert it to float32"):
        torch_hlo.run_text(SUM, np.ones((4, 3)), np.ones(3, "f"))


@pytest.mark.parametrize(
    "name", ["tpu_v5e_optimized_hlo", "xla_gpu_h100_optimized_hlo", "jax_hlo_after_opt"]
)
def test_programs_that_xla_optimised_for_other_machines_run(name):
    module = adopted(parse_module((SAMPLES / f"{name}.txt").read_text()))
    assert "fusion(" not in str(module)
    assert cli.main(["run", str(SAMPLES / f"{name}.txt"), "--compare", "evaluator"]) == cli.OK


def test_run_writes_and_reads_arrays(tmp_path, capsys):
    program = tmp_path / "sum.hlo"
    program.write_text(SUM)
    np.savez(tmp_path / "x.npz", *inputs())
    assert (
        cli.main(
            [
                "run",
                str(program),
                "--input",
                str(tmp_path / "x.npz"),
                "--output",
                str(tmp_path / "y.npz"),
            ]
        )
        == cli.OK
    )
    with np.load(tmp_path / "y.npz") as results:
        assert results["out0"].tolist() == [4, 4, 4]
    assert cli.main(["run", str(program), "--time"]) == cli.OK
    assert "compile" in capsys.readouterr().out
    np.savez(tmp_path / "one.npz", np.ones(3))
    assert cli.main(["run", str(program), "--input", str(tmp_path / "one.npz")]) == cli.USAGE


@pytest.mark.parametrize(
    "emit, expected",
    [
        ("hlo", "HloModule"),
        ("short", "ENTRY"),
        ("stablehlo", "stablehlo."),
        ("llvm", "define"),
        ("asm", "ret"),
    ],
)
def test_opt_emits(emit, expected, capsys):
    names = ["--passes", "algebra,dce"] if emit == "stablehlo" else []
    assert (
        cli.main(["opt", str(SAMPLES / "jax_hlo_before_opt.txt"), "--emit", emit, *names]) == cli.OK
    )
    assert expected in capsys.readouterr().out


def test_errors_have_exit_codes(tmp_path, capsys):
    bad = tmp_path / "bad.hlo"
    bad.write_text("HloModule m\nENTRY e {\n  ROOT x = f32[2] negate(y)\n}")
    assert cli.main(["opt", str(bad)]) == cli.USAGE
    assert "line 3, column 26" in capsys.readouterr().err
    assert cli.main(["run", str(tmp_path / "missing.hlo")]) == cli.USAGE
    assert cli.main(["opt", str(SAMPLES / "tf_hlo.txt"), "--passes", "nope"]) == cli.USAGE
    capsys.readouterr()
    assert cli.main(["diff", str(SAMPLES / "tf_hlo.txt"), str(bad)]) == cli.USAGE
    assert f"{bad}: " in capsys.readouterr().err  # not the other file
    bad.write_bytes(b"HloModule \xf8")
    assert cli.main(["run", str(bad)]) == cli.USAGE
    assert f"{bad}: neither text nor StableHLO bytecode: byte 10 is 0xf8" in capsys.readouterr().err
    bad.write_text('ROOT x = f32[2] custom-call(), custom_call_target="nobody"')
    assert cli.main(["run", str(bad)]) == cli.FAILED
    bad.write_text("ROOT x = f32[400000000000] parameter(0)")
    capsys.readouterr()
    assert cli.main(["run", str(bad)]) == cli.FAILED
    assert "400000000000" in capsys.readouterr().err


def test_diff_ignores_names(tmp_path, capsys):
    with_names, without = (
        str(SAMPLES / "tf_hlo.txt"),
        str(SAMPLES / "tf_hlo_no_metadata.txt"),
    )
    assert cli.main(["diff", with_names, without]) == cli.OK
    other = tmp_path / "other.hlo"
    other.write_text((SAMPLES / "tf_hlo_no_metadata.txt").read_text().replace("tanh(", "sine("))
    assert cli.main(["diff", without, str(other)]) == cli.DIFFERENT
    assert "+  %sine" in capsys.readouterr().out


def test_explain_counts(capsys):
    assert cli.main(["explain", str(SAMPLES / "jax_hlo_before_opt.txt")]) == cli.OK
    assert "about 8,192 multiplications" in capsys.readouterr().out


def test_bisect_names_the_guilty_pass(monkeypatch):
    from torch_hlo.compiler.hlo_pass import Pass, fixpoint
    from torch_hlo.hlo.ir.intern import instr, rewrite_bottom_up

    def wrong(module):
        return module.with_root(
            rewrite_bottom_up(
                module.entry.root,
                lambda x: instr("sine", x.operands) if x.op == "tanh" else x,
            )
        )

    honest = Pass("honest", lambda m: m, "")
    passes = [honest, fixpoint(honest, Pass("wrong", wrong, ""))]
    monkeypatch.setattr(bisect, "passes_for", lambda target: passes)
    module = parse_module((SAMPLES / "jax_hlo_before_opt.txt").read_text())
    arrays = [np.ones((8, 16), "f"), np.eye(16, 32, dtype="f")]
    found = bisect.bisect(module, arrays, compiled=False)
    assert found.culprit == "wrong" and "elements differ" in found.reason and found.before is module


def test_reduce_finds_the_instruction():
    module = parse_module((SAMPLES / "jax_hlo_before_opt.txt").read_text())
    small = reduce.shrink(module, lambda m: " tanh(" in str(m))
    assert reduce.size(small) <= 3 and "dot" not in str(small)


def test_differences_are_described():
    one = [(np.float32([1, 2]), "f32")]
    assert execute.difference(one, one) == ""
    assert "1 of 2 elements differ, first at [1]: 3.0" in execute.difference(
        [(np.float32([1, 3]), "f32")], one
    )
    assert "sizes" in execute.difference([(np.float32([1]), "f32")], one)
