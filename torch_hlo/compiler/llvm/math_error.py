"""The error function, its complement and its inverse on vectors, as in math.py."""

from .emit import Typed
from .math import exp, exp_inside, log, odd_quotient
from .math_function import INF, Elementary, falls_back, quotient

# erf(x) / x of floats, as _TANH32
_ERF32 = (
    (2.0431696157174883e-06, 2.844473929144442e-4, 3.7673297338187695e-3, 5.269581452012062e-2,
     0.19032883644104004, 1.126805067062378),
    (3.799472324317321e-05, 1.162244938313961e-3, 1.496238075196743e-2, 0.1140238344669342,
     0.5015422701835632, 0.9986050128936768),
)  # fmt: skip

# erf(x) / x in powers of x^2 up to x = 0.51, and (1 + 2 x) exp(x^2) erfc(x) in powers of (x - 4) /
# (x + 4) up to x = 28 (M. Shepherd and J. Laframboise 1981), interpolated at Chebyshev's points
# with 50 digits: relative errors 2e-17 and 5e-17.
_ERF64_SMALL = (
    -1.455468386942428e-07, 1.6364053271433157e-06, -1.49226800024831e-05, 0.0001205527837909284,
    -0.0008548326400895787, 0.005223977621115625, -0.026866170644958408, 0.11283791670954775,
    -0.3761263890318375, 1.1283791670955126,
)  # fmt: skip
_ERFCX = (
    1.9717656765049794e-09, -9.652213521087604e-09, -1.8406671051403966e-08, 1.03256669073015e-07,
    7.540467350144586e-08, -8.195085083459565e-07, 2.9313186423696087e-07, 5.706494720146254e-06,
    -1.1221668942295945e-05, -2.4398057333996413e-05, 0.00015062155590137163,
    -0.00019925696553927866, -0.0007577732634973155, 0.00503197001856426, -0.016197734061059108,
    0.03716751553379472, -0.06633036581196795, 0.09373283499853434, -0.1010390660363143,
    0.06809705425468844, 0.015379652102619901, -0.1396211168405625, 1.2329951186255526,
)  # fmt: skip
# exp(x^2) erfc(x) of floats up to 9.34 as a quotient, like _TANH32: 2e-8
_ERFCX32 = (
    (0.032157194, 0.22616385, 0.72518325, 1.232265, 1.0),
    (0.056996327, 0.40089458, 1.313384, 2.3888774, 2.3606446, 1.0),
)


def _erfc_of_large(t: Typed, a: str, exact: bool) -> str:
    """erfc(a) of doubles for 1/2 < a, up to 28. One division serves both quotients. `exact`: also
    relative to small results, for which the square of `a` has to be known beyond its last place."""
    z = t.mul(a, a)
    under = t.add(a, 4.0)
    low = t.fma(a, 2.0, 1.0)
    inverse = quotient(t, t.const(1.0), t.mul(under, low))
    q = t.mul(t.mul(t.sub(a, 4.0), low), inverse)
    r = t.mul(t.mul(exp(t, t.neg(z)), t.mul(under, inverse)), t.horner(q, _ERFCX))
    return _exact_square(t, a, z, r) if exact else r


def _exact_square(t: Typed, a: str, z: str, r: str) -> str:
    """r = exp(-z) f, with z = a^2 before it was rounded."""
    return t.fma(t.neg(r), t.fma(a, a, t.neg(z)), r) if t.e.unit.fuses else r


def _erf64(t: Typed, x: str) -> str:
    """Errors below 2 ulp."""
    a = t.abs(x)
    a = t.select(t.cmp("ogt", a, 6.0), 6.0, a)
    big = t.copysign(t.sub(1.0, _erfc_of_large(t, a, False)), x)
    return t.select(t.cmp("ogt", a, 0.5), big, t.mul(x, t.poly(t.mul(a, a), _ERF64_SMALL)))


def erfc(t: Typed, x: str) -> str:
    """1 - erf(x), with all its digits where that is small."""
    last = t.const(9.34 if t.kind == "float" else 28.0)
    beyond = t.cmp("ogt", t.abs(x), last)
    a = t.select(beyond, last, t.abs(x))
    if t.kind == "float":
        z = t.mul(a, a)
        over, under = (t.horner(a, c) for c in _ERFCX32)
        tail = _exact_square(t, a, z, t.mul(exp_inside(t, t.neg(z)), t.div(over, under)))
        tail = t.select(beyond, 0.0, tail)
        return t.select(t.cmp("olt", x, 0.0), t.sub(2.0, tail), tail)
    tail = _erfc_of_large(t, a, True)
    near = t.mul(x, t.poly(t.mul(a, a), _ERF64_SMALL))
    big = t.select(t.cmp("olt", x, 0.0), t.sub(2.0, tail), tail)
    return t.select(t.cmp("ogt", a, 0.5), big, t.sub(1.0, near))


# erf^-1(x) / x in powers of w - m with w = -log(1 - x^2), or of sqrt(w) - m (M. Giles 2012): (least
# w, m, coefficients), interpolated as above.
_ERFINV = {
    "float": (
        (
            0.0,
            2.5,
            (
                -8.931925970244222e-09,
                2.3335967195708108e-08,
                4.6813134805534123e-07,
                -3.4639852686373717e-06,
                -4.9724196894547514e-06,
                0.00021834938623976644,
                -0.001252726391773229,
                -0.004177392875203149,
                0.24664027905463662,
                1.501409360450329,
            ),
        ),
        (
            5.0,
            3.0,
            (
                9.527436123972328e-05,
                -0.00028612573938933031,
                -2.8793231325546568e-05,
                0.0014541435007642796,
                -0.0036112488267266846,
                0.005699765844630982,
                -0.007634389065366351,
                0.009443614916308544,
                1.0016747754923148,
                2.8329768340495427,
            ),
        ),
    ),
    "double": (
        (
            0.0,
            3.125,
            (
                3.240704459379902e-21,
                -1.113483769832702e-21,
                -3.4996044354754177e-19,
                1.150022252066253e-18,
                1.557432024623325e-17,
                -1.3016928016796445e-16,
                -4.0282154327661744e-17,
                6.596407712420834e-15,
                -4.001237735091896e-14,
                -8.118399443074353e-14,
                2.6304834740560442e-12,
                -1.2976885526532075e-11,
                -5.414287198084716e-11,
                1.0512181539804126e-09,
                -4.11266082002324e-09,
                -2.9070382262927266e-08,
                4.234788173782339e-07,
                -1.3654691850603575e-06,
                -1.3882523394405316e-05,
                0.00018673420802464837,
                -0.000740702534154477,
                -0.00603367087142785,
                0.2401581824255883,
                1.6536545626831027,
            ),
        ),
        (
            6.25,
            3.25,
            (
                -1.5203888688781036e-08,
                1.2624062807231146e-09,
                1.3128950060152076e-07,
                -2.727160303751978e-07,
                -2.7252622358771328e-08,
                1.5000933017864582e-06,
                -3.985949578841803e-06,
                2.9249826523816672e-06,
                1.246512467501792e-05,
                -4.731874979311099e-05,
                6.828709437700798e-05,
                2.4031214021786534e-05,
                -0.0003550378105661784,
                0.0009532893681493988,
                -0.0016882755356923275,
                0.0024914420967571027,
                -0.003751208508216373,
                0.005370914553576055,
                1.0052589676941652,
                3.0838856104922208,
            ),
        ),
        (
            16.0,
            5.0,
            (
                -1.596285487847468e-11,
                4.3547563550381574e-11,
                4.901063411557162e-11,
                -4.4043583975389765e-10,
                1.3557364929794777e-09,
                -3.4663201607644923e-09,
                7.780039294292095e-09,
                -1.5259708847705086e-08,
                2.904374099042755e-08,
                -6.755373526262315e-08,
                2.2904390363504735e-07,
                -9.930301319015092e-07,
                4.526054299644136e-06,
                -1.9681770578455828e-05,
                7.599527792068192e-05,
                -0.00021503011983686486,
                -0.0001387193183734458,
                1.0103004648645455,
                4.849906401408584,
            ),
        ),
    ),
}


def _erf_inv(t: Typed, x: str, ranges: int) -> str:
    w = t.neg(log(t, t.mul(t.sub(1.0, x), t.add(1.0, x))))
    r = ""
    root = ""
    for least, middle, coefficients in _ERFINV[t.kind][:ranges]:
        if least and not root:
            root = t.sqrt(w)
        p = t.poly(t.sub(root or w, middle), coefficients)
        r = t.select(t.cmp("oge", w, least), p, r) if r else p
    r = t.select(t.cmp("oeq", t.abs(x), 1.0), INF, r)
    return t.mul(r, x)


@falls_back(
    lambda t, x: t.cmp("ogt", t.abs(x), 0.996 if t.kind == "float" else 0.999),
    lambda t, x: _erf_inv(t, x, 3),
)
def erf_inv(t: Typed, x: str) -> str:
    """NaN beyond -1 and 1. All lanes are mostly in the first range."""
    return _erf_inv(t, x, 1)


def erf(t: Typed, x: str) -> str:
    return _erf64(t, x) if t.kind == "double" else odd_quotient(t, x, 3.95, *_ERF32)


FUNCTIONS: dict[str, Elementary] = {"erf": erf, "erfc": erfc, "erf-inv": erf_inv}
