"""Functions written line by line."""

import llvmlite.binding as llvm

from torch_hlo.compiler.llvm import Function, item_parameters


def test_masked_accesses_have_the_form_that_every_llvm_reads():
    f = Function("f", "ptr p, i64 n")
    for lanes in (8, 16):
        mask = f.lane_mask(lanes, 0, "%n")
        f.masked_store("float", lanes, f.masked_load("float", lanes, "%p", mask), "%p", mask)
        assert f"@llvm.masked.load.v{lanes}f32.p0(ptr %p, i32 4, <{lanes} x i1> " in f.text()
    v = f.typed("float", 8)
    offsets = f.splat("i64", 8, "%n")
    v.scatter(v.gather("%p", offsets, "i64"), "%p", offsets, "i64")
    llvm.parse_assembly(f.text() + "attributes #0 = { nounwind }\n").verify()


def test_numbers_are_computed_at_once_and_items_are_a_range():
    f = Function("f", item_parameters("x", ["n"]))
    assert f.divmod(7, 2) == (3, 1) and f.round_up(5, 4) == 8 and f.round_up("%n", 1) == "%n"
    assert not f.lines
    with f.items():
        pass
    text = f.text()
    assert "@f(i64 %lo, i64 %hi, ptr %x, i64 %n)" in text and "phi i64 [%lo, %entry]" in text
