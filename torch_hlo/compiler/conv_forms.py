"""The forms of a convolution that have kernels whose sums a fusion may finish: convolution/ brings
convolutions into them, fusion/ puts what reads them into their kernels."""

from torch_hlo.hlo.ir import Instruction

NARROW = 8  # pixels of a row: fewer leave most lanes empty where lanes are pixels


def sides(x: Instruction) -> tuple[str, str, str]:
    """The labels of input, kernel and result."""
    lhs, rest = x["dim_labels"].split("_")
    rhs, out = rest.split("->")
    return lhs, rhs, out


def digits_of(x: Instruction) -> str:
    """The labels of the pixels: "01" of an image."""
    return "".join(map(str, range(len(x["window"]))))


def is_channels_last(x: Instruction) -> bool:
    """Whether the result is a matrix of pixels and features, computed from pixels of the input as
    they lie in memory."""
    digits = digits_of(x)
    lhs, _, out = sides(x)
    return (
        digits != ""
        and lhs == out == f"b{digits}f"
        and all(w.base_dilation == 1 for w in x["window"])
    )


def is_planar(x: Instruction) -> bool:
    """Whether channels come first and each is filtered on its own: the form of
    compiler/convolution/conv_depthwise.py."""
    window = x["window"]
    digits = digits_of(x)
    channels = x["feature_group_count"]
    return (
        len(window) in (1, 2)
        and x["dim_labels"] == f"bf{digits}_oi{digits}->bf{digits}"
        and x["batch_group_count"] == 1
        and all(o.is_static and o.dtype == x.dtype and o.size for o in (*x.operands, x))
        and x.dtype in ("f32", "f64")
        and x.operand.dims[1] == channels
        and all(w.base_dilation == 1 for w in window)
        and window[-1].stride <= 2
        and x.shape.sizes[-1] >= NARROW
    )
