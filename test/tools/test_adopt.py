"""Library calls of other compilers: those that are not well formed are named."""

import pytest

from torch_hlo.hlo.ir.verify import VerifyError
from torch_hlo.hlo.read import parse_text
from torch_hlo.tools.adopt import adopted

SOLVE = """HloModule m
ENTRY main {
  a = f32[3,3] parameter(0)
  b = f32[DIMS] parameter(1)
  ROOT x = f32[DIMS] custom-call(a, b), custom_call_target="lapack_strsm_ffi",
    api_version=API_VERSION_TYPED_FFI,
    backend_config={diag = 78 : ui8, side = 76 : ui8, trans_x = 78 : ui8, uplo = 85 : ui8}
}
"""


def test_a_solve_has_an_opcode():
    assert adopted(parse_text(SOLVE.replace("DIMS", "3,2"))).entry.root.op == "triangular-solve"


@pytest.mark.parametrize(
    ("dims", "option", "said"),
    [
        ("3,2", "Side", "lapack_strsm_ffi of .f32.3,3., f32.3,2.. with .*KeyError: 'side'"),
        ("4,2", "side", "lapack_strsm_ffi of .f32.3,3., f32.4,2.. with .*ShapeError"),
    ],
)
def test_a_call_that_is_not_well_formed_is_named(dims, option, said):
    text = SOLVE.replace("DIMS", dims).replace("side", option)
    with pytest.raises(VerifyError, match=said):
        adopted(parse_text(text))
