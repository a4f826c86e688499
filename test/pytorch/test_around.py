"""Functions that are called through ours."""

from torch_hlo.pytorch.around import around


class Holder:
    def double(self, x: int) -> int:
        """Twice x."""
        return 2 * x

    def half(self, x: int) -> float:
        return x / 2


def test_the_original_comes_first():
    class Own(Holder):
        pass

    around(Own, "double half", lambda original, self, x: original(self, x + 1))
    assert (Own().double(3), Own().half(x=3)) == (8, 2.0)
    assert (Own.double.__name__, Own.double.__doc__) == ("double", "Twice x.")
    assert Holder().double(3) == 6
