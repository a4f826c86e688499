"""Window of reduce-window, select-and-scatter and convolution: `{size=3x3 stride=2x2
pad=1_1x1_1}`."""

from torch_hlo.frozen import frozen

from .dim import Size


@frozen
class WindowDim:
    """One dimension. `base_dilation` is XLA's lhs_dilate, `window_dilation` its rhs_dilate."""

    size: Size
    stride: int = 1
    pad_low: Size = 0
    pad_high: Size = 0
    base_dilation: int = 1
    window_dilation: int = 1
    reversal: bool = False

    @property
    def is_trivial(self) -> bool:
        """Whether the window does not mix elements of this dimension."""
        return (
            self.stride == 1
            and self.size == 1
            and self.pad_low == 0
            and self.pad_high == 0
            and self.base_dilation == 1
        )

    def output_size(self, size: Size) -> Size:
        """Number of window positions over a base dimension of `size`."""
        base = (size - 1) * self.base_dilation + 1 if size != 0 else 0
        window = (self.size - 1) * self.window_dilation + 1
        padded = base + self.pad_low + self.pad_high
        if isinstance(padded, int) and isinstance(window, int) and padded < window:
            return 0
        return (padded - window) // self.stride + 1


Window = tuple[WindowDim, ...]
