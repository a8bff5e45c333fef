"""The compiled loops, each found by the pure function whose update it computes.

A loop takes the columns and the scalars of its pure function, by the same names and in the same order; the
name `eta` stands for standard normal numbers and `sums` for a row of sums to add to. Compiling takes a few
seconds at a loop's first use; after that the machine code is on disk.

Everything is written so that LLVM computes several entries at once: no branches, no calls of the C library,
float32 throughout. It is all in one file because numba checks only a function's own file to see whether its
cached code is stale.

Random numbers come from Philox-4x32-10 (J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC
2011): a number is a function of a key and of its place, so that it does not matter which thread draws it. The
Box–Muller transform turns them into normal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from torchbayes.kernels.cache import keep_compiled

__all__ = ["CHUNK", "LOOPS", "Loop"]

Column = Any
"""A stretch of float32 memory."""

Scalar = Any
"""A float64, to be rounded to float32 before the loop."""

Scalars = Any
"""A row of float64 numbers, to be rounded to float32; the last of a loop's scalars."""

Sums = Any
"""A row of float64 numbers to add to."""

# Entries for which normal numbers are drawn at once: they stay in the fastest cache. The four normal
# numbers of a counter lie a quarter of a chunk apart, so that a vector register holds those of several
# counters.
CHUNK = 1024
_QUARTER = CHUNK // 4

_Function = TypeVar("_Function", bound=Callable[..., Any])
_f = np.float32
_FASTMATH = {"contract", "nsz", "arcp"}  # a·b + c may be rounded once, and a/b may be a·(1/b)
_u = np.uint32


def _compiled(
    signature: str | None = None, fastmath: set[str] = _FASTMATH
) -> Callable[[_Function], _Function]:
    # Division by zero behaves as in torch: numba's own check would be a branch.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    if signature is None:
        return cast(Callable[[_Function], _Function], numba.njit(inline="always", **options))

    def compiled(function: _Function) -> _Function:
        made = numba.njit(**options)(function)
        if made is not function:  # with NUMBA_DISABLE_JIT it is
            keep_compiled(made)
            made.compile(signature)
            made.disable_compile()
        return cast(_Function, made)

    return compiled


def _intrinsic(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return cast(Callable[[Any], Any], intrinsic(function))


@_intrinsic
def _bits(_context: Any, _number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@_intrinsic
def _number(_context: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@_intrinsic
def _memory(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    pointer: Any = types.CPointer
    return pointer(types.float32)(types.int64), generate


@_compiled()
def _log(x: Any) -> Any:
    """Compute log x of a positive number, by the polynomial of the Cephes library."""
    shifted = _u(_bits(x) - _u(0x3F3504F3))  # so that the mantissa is in [√½, √2)
    e = _f(np.int32(shifted) >> np.int32(23))
    m = _number(_u((shifted & _u(0x007FFFFF)) + _u(0x3F3504F3))) - _f(1)
    y = _f(7.0376836292e-2)
    y = y * m + _f(-1.1514610310e-1)
    y = y * m + _f(1.1676998740e-1)
    y = y * m + _f(-1.2420140846e-1)
    y = y * m + _f(1.4249322787e-1)
    y = y * m + _f(-1.6668057665e-1)
    y = y * m + _f(2.0000714765e-1)
    y = y * m + _f(-2.4999993993e-1)
    y = y * m + _f(3.3333331174e-1)
    z = m * m
    y = y * m * z + e * _f(-2.12194440e-4) - _f(0.5) * z
    return m + y + e * _f(0.693359375)


@_compiled()
def _exp(x: Any) -> Any:
    """Compute exp x between the logarithms of the least and greatest float32, by Cephes' polynomial."""
    n = np.floor(x * _f(1.44269504088896341) + _f(0.5))
    r = x - n * _f(0.693359375) - n * _f(-2.12194440e-4)
    y = _f(1.9875691500e-4)
    y = y * r + _f(1.3981999507e-3)
    y = y * r + _f(8.3334519073e-3)
    y = y * r + _f(4.1665795894e-2)
    y = y * r + _f(1.6666665459e-1)
    y = y * r + _f(5.0000001201e-1)
    y = y * r * r + r + _f(1)
    return y * _number(_u(_u(np.int32(n) + np.int32(127)) << _u(23)))


@_compiled()
def _tanh_ratio(y: Any) -> Any:
    """Compute tanh y / y, 1 at 0, by a rational function where tanh y is not ±1 in float32."""
    x = min(abs(y), _f(7.9053111))
    z = x * x
    p = _f(-2.76076847742355e-16)
    p = p * z + _f(2.00018790482477e-13)
    p = p * z + _f(-8.60467152213735e-11)
    p = p * z + _f(5.12229709037114e-08)
    p = p * z + _f(1.48572235717979e-05)
    p = p * z + _f(6.37261928875436e-04)
    p = p * z + _f(4.89352455891786e-03)
    q = _f(1.19825839466702e-06)
    q = q * z + _f(1.18534705686654e-04)
    q = q * z + _f(2.26843463243900e-03)
    q = q * z + _f(4.89352518554385e-03)
    return _f(1) / abs(y) if abs(y) > x else p / q


@_compiled()
def _philox(place: Any, k0: Any, k1: Any) -> Any:
    """Return four random words of 32 bits."""
    c0, c1, c2, c3 = _u(place), _u(place >> np.uint64(32)), _u(0), _u(0)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * np.uint64(c0)
        b = np.uint64(0xCD9E8D57) * np.uint64(c2)
        c0, c1 = _u(b >> np.uint64(32)) ^ c1 ^ k0, _u(b)
        c2, c3 = _u(a >> np.uint64(32)) ^ c3 ^ k1, _u(a)
        k0, k1 = _u(k0 + _u(0x9E3779B9)), _u(k1 + _u(0xBB67AE85))
    return c0, c1, c2, c3


@_compiled()
def _normal_pair(first: Any, second: Any) -> Any:
    """Return two normal numbers: √(−2 log u) cos 2πv and √(−2 log u) sin 2πv."""
    radius = _f(math.sqrt(_f(-2) * _log((_f(first) + _f(0.5)) * _f(2.0**-32))))
    # The angle is a quarter of the circle and a rest between −π/4 and π/4, exact in whole numbers.
    quarter = _u(_u(second + _u(1 << 29)) >> _u(30))
    rest = np.int32(_u(second - _u(quarter << _u(30))))
    t = _f(rest) * _f(math.pi * 2.0**-31)
    z = t * t
    s = _f(-1.9515295891e-4) * z + _f(8.3321608736e-3)
    s = (s * z + _f(-1.6666654611e-1)) * z * t + t
    c = _f(2.443315711809948e-5) * z + _f(-1.388731625493765e-3)
    c = (c * z + _f(4.166664568298827e-2)) * z * z - _f(0.5) * z + _f(1)
    turned = (quarter & _u(1)) != 0
    cosine, sine = (s if turned else c), (c if turned else s)
    cosine = _number(_u(_bits(cosine) ^ _u(((quarter + _u(1)) & _u(2)) << _u(30))))
    sine = _number(_u(_bits(sine) ^ _u((quarter & _u(2)) << _u(30))))
    return radius * cosine, radius * sine


@_compiled("void(float32[::1], uint64, uint32, uint32)")
def _normals(eta: Any, place: Any, k0: Any, k1: Any) -> None:
    for i in range(_QUARTER):
        w0, w1, w2, w3 = _philox(np.uint64(place + np.uint64(i)), k0, k1)
        eta[i], eta[_QUARTER + i] = _normal_pair(w0, w1)
        eta[2 * _QUARTER + i], eta[3 * _QUARTER + i] = _normal_pair(w2, w3)


@_compiled()
def _column(addresses: Any, tensor: Any, number: Any, offset: Any, size: Any) -> Any:
    return carray(_memory(addresses[tensor, number] + offset), size)


_TYPES = {
    "Column": "float32[::1]", "Scalar": "float64", "Scalars": "float64[::1]", "Sums": "float64[::1]"
}  # fmt: skip

_WALK = """
def walk_{name}(addresses, ends, places, first, last, k0, k1, scalars, sums):
    eta = np.empty(CHUNK, np.float32)
    tensor, drawn = 0, -1
    for chunk in range(first, last):
        position, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, ends[-1])
        while position < stop:
            while ends[tensor] <= position:
                tensor += 1
            begin = ends[tensor - 1] if tensor > 0 else 0
            until = min(stop, ends[tensor])
            start = 0
            if {draws}:
                place = places[tensor] + position - begin
                number = place // CHUNK
                start = place - number * CHUNK
                until = min(until, position + CHUNK - start)
                if number != drawn:
                    _normals(eta, np.uint64(number * _QUARTER), k0, k1)
                    drawn = number
            size, offset = until - position, 4 * (position - begin)
            {name}({arguments})
            position = until
"""


class Loop:
    """A loop over the entries of tensors, taken end to end, in chunks.

    Args:
        function: The loop over a stretch that lies in one tensor and one chunk.
        sums: Number of sums over all entries that it computes.

    Attributes:
        scalars: Names of its scalars.
        draws: Whether it takes random numbers.
        sums: Number of its sums.
    """

    def __init__(self, function: Callable[..., None], sums: int) -> None:
        kinds = {n: k for n, k in function.__annotations__.items() if n != "return"}
        self._function, self._kinds, self.sums = function, kinds, sums
        self.scalars = [name for name, kind in kinds.items() if kind in ("Scalar", "Scalars")]
        self.draws = "eta" in kinds

    @cached_property
    def walk(self) -> Callable[..., None]:
        """The compiled loop over some chunks, with the arguments of `_WALK`.

        `addresses` has a row for every tensor to change, with its address and those of the tensors that
        belong to it; `ends` is where every tensor ends, counted from the start of the first; `places` is
        where its random numbers begin among all of them; `last` is one past the last chunk to process; `k0`
        and `k1` are the key of the random numbers; `sums` has a row for every chunk.
        """
        columns = [n for n, kind in self._kinds.items() if kind == "Column" and n != "eta"]
        places = {
            n: f"_column(addresses, tensor, {i}, offset, size)" for i, n in enumerate(columns)
        }
        rows = {"Scalar": "scalars[{}]", "Scalars": "scalars[{}:]"}
        places |= {n: rows[self._kinds[n]].format(i) for i, n in enumerate(self.scalars)}
        places |= {"eta": "eta[start : start + size]", "sums": "sums[chunk]"}
        name = self._function.__name__
        source = _WALK.format(
            name=name, draws=self.draws, arguments=", ".join(places[n] for n in self._kinds)
        )
        signature = f"void({', '.join(_TYPES[kind] for kind in self._kinds.values())})"
        space = {**globals(), name: _compiled(signature)(self._function)}
        # numba cannot cache a closure over a compiled function on disk. It can cache this: to numba it is a
        # function of this file.
        exec(compile(source, __file__, "exec"), space)
        walk: Callable[..., None] = space[f"walk_{name}"]
        return _compiled(
            "void(int64[:,::1], int64[::1], int64[::1], int64, int64, uint32, uint32, float64[::1], "
            "float64[:,::1])"
        )(walk)


LOOPS: dict[tuple[str, str], Loop] = {}
"""The loops, by the module and the name of the pure function."""


def _loop_of(module: str, sums: int = 0) -> Callable[[_Function], _Function]:
    """Register a loop for the function of the same name in a module of torchbayes."""

    def register(function: _Function) -> _Function:
        LOOPS[f"torchbayes.{module}", function.__name__] = Loop(function, sums)
        return function

    return register


# Random numbers.


@_loop_of("core.noise")
def normals_(x: Column, eta: Column) -> None:
    x[:] = eta


@_loop_of("core.noise")
def gaussians_(x: Column, mean: Column, std: Column, eta: Column) -> None:
    for i in range(x.size):
        x[i] = mean[i] + std[i] * eta[i]


# Samplers.


@_loop_of("optim.sgld")
def sgld_update(
    theta: Column, grad: Column, eta: Column, epsilon: Scalar, n: Scalar, delta: Scalar
) -> None:
    keep, rate = _f(1 - epsilon / 2 * delta), _f(epsilon / 2 * n)
    spread = _f(math.sqrt(epsilon))
    for i in range(theta.size):
        theta[i] = keep * theta[i] - rate * grad[i] + spread * eta[i]


@_loop_of("optim.psgld")
def psgld_update(
    theta: Column, v: Column, grad: Column, eta: Column,
    epsilon: Scalar, alpha: Scalar, lam: Scalar, n: Scalar, delta: Scalar, size: Scalar, t: Scalar,
) -> None:  # fmt: skip
    keep, share = _f(alpha), _f((1 - alpha) / (size * size))
    correction = _f(1 / -math.expm1(t * math.log(alpha)))
    count, precision, floor = _f(n), _f(delta), _f(lam)
    half, spread = _f(epsilon / 2), _f(math.sqrt(epsilon))
    for i in range(theta.size):
        force = count * grad[i] + precision * theta[i]
        mean = keep * v[i] + share * force * force
        v[i] = mean
        g = _f(1) / (_f(math.sqrt(mean * correction)) + floor)
        theta[i] = theta[i] - half * g * force + spread * _f(math.sqrt(g)) * eta[i]


@_loop_of("optim.sghmc")
def sghmc_update(
    theta: Column, p: Column, grad: Column, eta: Column,
    h: Scalar, m: Scalar, d: Scalar, variance: Scalar, n: Scalar, delta: Scalar,
) -> None:  # fmt: skip
    keep, rate, pull = _f(1 - h * d), _f(h * n), _f(h * delta)
    spread, speed = _f(math.sqrt(2 * h * d * m - h * h * variance)), _f(h / m)
    for i in range(theta.size):
        momentum = keep * p[i] - rate * grad[i] - pull * theta[i] + spread * eta[i]
        p[i] = momentum
        theta[i] = theta[i] + speed * momentum


@_compiled()
def _thermostat(
    theta: Any, p: Any, xi: Any, grad: Any, eta: Any,
    h: Any, m: Any, c: Any, d: Any, n: Any, delta: Any, adaptive: Any,
) -> None:  # fmt: skip
    """SGNHT, and ATMC if adaptive; the formulas are those of `torchbayes.optim.thermostat`."""
    inverse, hn, hdelta = _f(1 / ((m * c) * (m * c))), _f(h * n), _f(h * delta)
    spread, speed, half = _f(2 * m * h), _f(h / m), _f(0.5) * _f(h)
    friction, rest = _f(d), _f(h)
    for i in range(theta.size):
        x, q = xi[i], p[i]
        beta = max(friction, x) if adaptive else friction + x
        alpha = beta - x  # SGNHT: D
        y = half * beta / _f(math.sqrt(_f(1) + inverse * q * q))
        gain = _tanh_ratio(y)
        t = gain * y
        below = _f(1) / (_f(1) + t)
        pull = hn * grad[i] + hdelta * theta[i]
        noise = _f(math.sqrt(spread * alpha * gain)) * eta[i]
        q = below * ((_f(1) - t) * q - gain * pull + noise)
        root = _f(1) / _f(math.sqrt(_f(1) + inverse * q * q))
        velocity = q * root
        p[i] = q
        theta[i] = theta[i] + speed * velocity
        xi[i] = x + (speed * velocity * velocity - rest * root * root * root)


@_loop_of("optim.sgnht")
def sgnht_update(
    theta: Column, p: Column, xi: Column, grad: Column, eta: Column,
    h: Scalar, m: Scalar, c: Scalar, d: Scalar, n: Scalar, delta: Scalar,
) -> None:  # fmt: skip
    _thermostat(theta, p, xi, grad, eta, h, m, c, d, n, delta, False)


@_loop_of("optim.atmc")
def atmc_update(
    theta: Column, p: Column, xi: Column, grad: Column, eta: Column,
    h: Scalar, m: Scalar, c: Scalar, d: Scalar, n: Scalar, delta: Scalar,
) -> None:  # fmt: skip
    _thermostat(theta, p, xi, grad, eta, h, m, c, d, n, delta, True)


# Natural gradients.


@_loop_of("optim.vogn")
def vogn_draw(
    theta: Column, mu: Column, s: Column, eta: Column,
    delta: Scalar, gamma: Scalar, tau: Scalar, n: Scalar,
) -> None:  # fmt: skip
    shift, spread = _f(delta + gamma), _f(math.sqrt(tau / n))
    for i in range(theta.size):
        theta[i] = mu[i] + spread * eta[i] / _f(math.sqrt(s[i] + shift))


@_loop_of("optim.vogn")
def vogn_update(
    mu: Column, m: Column, s: Column, g: Column, h: Column,
    alpha: Scalar, beta1: Scalar, beta2: Scalar, delta: Scalar, gamma: Scalar, prior_mean: Scalar,
    h_factor: Scalar,
) -> None:  # fmt: skip
    rate, decay, keep, new = _f(alpha), _f(beta1), _f(1 - beta2), _f(beta2 * h_factor)
    pull, shift, centre = _f(delta), _f(delta + gamma), _f(prior_mean)
    for i in range(mu.size):
        momentum = decay * m[i] + g[i] + pull * (mu[i] - centre)
        precision = keep * s[i] + new * h[i]
        m[i] = momentum
        s[i] = precision
        mu[i] = mu[i] - rate * momentum / (precision + shift)


@_loop_of("optim.natural_gradient")
def bounded_draw(
    theta: Column, mu: Column, s: Column, eta: Column, delta: Scalar, least: Scalar, n: Scalar
) -> None:
    shift, low, spread = _f(delta), _f(least), _f(1 / math.sqrt(n))
    for i in range(theta.size):
        theta[i] = mu[i] + spread * eta[i] / _f(math.sqrt(max(s[i] + shift, low)))


@_loop_of("optim.vogn")
def vogn_scaled_update(
    mu: Column, m: Column, s: Column, g: Column, h: Column,
    alpha: Scalar, beta1: Scalar, beta2: Scalar, delta: Scalar, debias: Scalar, batch: Scalar,
    prior_mean: Scalar, h_factor: Scalar,
) -> None:  # fmt: skip
    rate, decay, keep, new = _f(alpha), _f(beta1), _f(1 - beta2), _f(beta2 * h_factor)
    pull, centre, whole, share = _f(delta), _f(prior_mean), _f(debias), _f(1 / batch)
    most, tiny = _f(3), _f(1e-30)
    for i in range(mu.size):
        momentum = decay * m[i] + g[i] + pull * (mu[i] - centre)
        precision = keep * s[i] + new * h[i]
        step = whole * momentum / _f(math.sqrt(share * precision + tiny))
        m[i] = momentum
        s[i] = precision
        mu[i] = mu[i] - rate * min(max(step, -most), most)


@_loop_of("optim.ivon")
def ivon_scaled_update(
    mu: Column, m: Column, h: Column, v: Column, g: Column, product: Column,
    alpha: Scalar, beta1: Scalar, beta2: Scalar, t: Scalar, lam: Scalar, delta: Scalar, least: Scalar,
    prior_mean: Scalar,
) -> None:  # fmt: skip
    new1, new2, new3, count = _f(1 - beta1), _f(1 - beta2), _f(1 - 0.999), _f(lam)
    shift, low, centre, tiny = _f(delta), _f(least), _f(prior_mean), _f(1e-15)
    rate, whole = _f(alpha / (1 - beta1**t)), _f(1 / (1 - 0.999**t))
    for i in range(mu.size):
        u = max(h[i] + shift, low)
        off = h[i] - count * product[i] * u  # h − ĥ
        h[i] = h[i] - new2 * off + _f(0.5) * new2 * new2 * off * off / u
        pulled = g[i] + shift * (mu[i] - centre)
        momentum = m[i] + new1 * (pulled - m[i])
        square = v[i] + new3 * (pulled * pulled - v[i])
        m[i] = momentum
        v[i] = square
        mu[i] = mu[i] - rate * momentum / (_f(math.sqrt(whole * square)) + tiny)


@_loop_of("optim.ivon")
def ivon_draw(
    theta: Column, mu: Column, h: Column, eta: Column, delta: Scalar, lam: Scalar
) -> None:
    shift, spread = _f(delta), _f(1 / math.sqrt(lam))
    for i in range(theta.size):
        theta[i] = mu[i] + spread * eta[i] / _f(math.sqrt(h[i] + shift))


@_loop_of("optim.ivon")
def ivon_update(
    mu: Column, m: Column, h: Column, g: Column, theta: Column,
    alpha: Scalar, beta1: Scalar, beta2: Scalar, t: Scalar, lam: Scalar, delta: Scalar, h0: Scalar,
    xi: Scalar, prior_mean: Scalar,
) -> None:  # fmt: skip
    kept = 1 - beta1**t
    new1, new2, count, shift = _f(1 - beta1), _f(1 - beta2), _f(lam), _f(delta)
    pull, debias, rate = _f(delta * kept), _f(1 / kept), _f(alpha * (h0 + delta))
    most, centre = _f(xi), _f(prior_mean)
    for i in range(mu.size):
        momentum = m[i] + new1 * (g[i] - m[i])
        u = h[i] + shift
        off = h[i] - count * g[i] * (theta[i] - mu[i]) * u  # h − ĥ
        curvature = h[i] - new2 * off + _f(0.5) * new2 * new2 * off * off / u
        step = debias * (momentum + pull * (mu[i] - centre)) / (curvature + shift)
        m[i] = momentum
        h[i] = curvature
        mu[i] = mu[i] - rate * min(max(step, -most), most)


# Bayes by backprop.


@_compiled()
def _log1p_of(e: Any, u: Any) -> Any:
    """Compute log(1 + e) where u is 1 + e rounded: log u, corrected for what u has lost of e."""
    kept = u - _f(1)
    return e if kept == _f(0) else _log(u) * (e / kept)


@_compiled()
def _softplus(std: Any, slope: Any, rho: Any, low: Any, high: Any) -> None:
    for i in range(std.size):
        e = _exp(min(max(rho[i], low), high))
        u = _f(1) + e
        slope[i] = e / u
        std[i] = _log1p_of(e, u)


@_loop_of("variational.softplus")
def softplus(std: Column, slope: Column, rho: Column, low: Scalar, high: Scalar) -> None:
    _softplus(std, slope, rho, _f(low), _f(high))


# Sums over at most a chunk may be in any order, and in float32.
_summing = {*_FASTMATH, "reassoc"}


@_compiled("void(float32[::1], float32[::1], float32[::1], float64[::1])", _summing)
def _kl_sums(std: Any, mean: Any, eta: Any, sums: Any) -> None:
    stds, means, logs, squares = _f(0), _f(0), _f(0), _f(0)
    for i in range(std.size):
        stds += std[i] * std[i]
        means += mean[i] * mean[i]
        logs += _log(std[i])
        squares += eta[i] * eta[i]
    sums[0] += stds
    sums[1] += means
    sums[2] += logs
    sums[3] += squares


@_loop_of("variational.draw", sums=4)
def bbb_draw(
    w: Column, epsilon: Column, std: Column, slope: Column, mean: Column, rho: Column, eta: Column,
    low: Scalar, high: Scalar, sums: Sums,
) -> None:  # fmt: skip
    _softplus(std, slope, rho, _f(low), _f(high))
    for i in range(w.size):
        epsilon[i] = eta[i]
        w[i] = mean[i] + std[i] * eta[i]
    _kl_sums(std, mean, eta, sums)


@_loop_of("variational.draw")
def bbb_gradients(
    to_mean: Column, to_rho: Column, g: Column, epsilon: Column, std: Column, slope: Column,
    mean: Column, scale: Scalar, m: Scalar, delta: Scalar,
) -> None:  # fmt: skip
    weight, pull, constant = _f(scale), _f(scale * delta), _f(scale * delta * m)
    for i in range(g.size):
        to_mean[i] = g[i] + pull * mean[i] - constant
        to_rho[i] = slope[i] * (g[i] * epsilon[i] + pull * std[i] - weight / std[i])


# Within the logarithms of the least and the greatest float32.
_LEAST, _MOST = _f(-87), _f(80)


@_compiled("void(float32[::1], float32[::1], float64[::1])", _summing)
def _mixture_sums(w: Any, share: Any, sums: Any) -> None:
    squares, shares = _f(0), _f(0)
    for i in range(w.size):
        squares += w[i] * w[i]
        shares += share[i]
    sums[0] += squares
    sums[1] += shares


# Hypernetworks.


@_compiled("void(float32[::1], float32[::1], float64[::1])", _summing)
def _product(w: Any, g: Any, sums: Any) -> None:
    total = _f(0)
    for i in range(w.size):
        total += w[i] * g[i]
    sums[0] += total


@_compiled("void(float32[::1], float64[::1])", _summing)
def _total(x: Any, sums: Any) -> None:
    total = _f(0)
    for i in range(x.size):
        total += x[i]
    sums[0] += total


@_compiled(
    "void(float32[::1], float32[::1], float32[::1], float64, float64, float64, float64, float64, "
    "float64[::1])"
)
def _step_of_unit(
    w: Any, v: Any, g: Any, a: Any, alpha: Any, mu: Any, decay: Any, nesterov: Any, sums: Any
) -> None:
    _product(w, g, sums)
    on, rate, keep, pull = _f(a), _f(alpha), _f(mu), _f(decay)
    near, far = _f(nesterov), _f(mu if nesterov != 0 else 1)
    for i in range(w.size):
        d = on * g[i] + pull * w[i]
        velocity = keep * v[i] + d
        v[i] = velocity
        w[i] = w[i] - rate * (near * d + far * velocity)


@_loop_of("variational.hidden_units", sums=4)
def four_steps(
    w0: Column, w1: Column, w2: Column, w3: Column, v0: Column, v1: Column, v2: Column, v3: Column,
    g: Column, a0: Scalar, a1: Scalar, a2: Scalar, a3: Scalar,
    alpha: Scalar, mu: Scalar, decay: Scalar, nesterov: Scalar, sums: Sums,
) -> None:  # fmt: skip
    _step_of_unit(w0, v0, g, a0, alpha, mu, decay, nesterov, sums[0:])
    _step_of_unit(w1, v1, g, a1, alpha, mu, decay, nesterov, sums[1:])
    _step_of_unit(w2, v2, g, a2, alpha, mu, decay, nesterov, sums[2:])
    _step_of_unit(w3, v3, g, a3, alpha, mu, decay, nesterov, sums[3:])


@_loop_of("variational.hidden_units", sums=1)
def unit_step(
    w: Column, v: Column, g: Column,
    a: Scalar, alpha: Scalar, mu: Scalar, decay: Scalar, nesterov: Scalar, sums: Sums,
) -> None:  # fmt: skip
    _step_of_unit(w, v, g, a, alpha, mu, decay, nesterov, sums)


@_loop_of("variational.hidden_units")
def coast(w: Column, v: Column, steps: Scalars) -> None:
    for step in range(steps.size // 4):
        rate, keep, pull = _f(steps[4 * step]), _f(steps[4 * step + 1]), _f(steps[4 * step + 2])
        nesterov = steps[4 * step + 3]
        near, far = _f(nesterov), keep if nesterov != 0 else _f(1)
        for i in range(w.size):
            d = pull * w[i]
            velocity = keep * v[i] + d
            v[i] = velocity
            w[i] = w[i] - rate * (near * d + far * velocity)


@_loop_of("variational.hidden_units")
def add_units(
    total: Column, w0: Column, w1: Column, w2: Column, w3: Column, w4: Column, w5: Column, w6: Column,
    w7: Column, a0: Scalar, a1: Scalar, a2: Scalar, a3: Scalar, a4: Scalar, a5: Scalar, a6: Scalar,
    a7: Scalar,
) -> None:  # fmt: skip
    b0, b1, b2, b3, b4, b5, b6, b7 = (
        _f(a0), _f(a1), _f(a2), _f(a3), _f(a4), _f(a5), _f(a6), _f(a7)
    )  # fmt: skip
    for i in range(total.size):
        first = b0 * w0[i] + b1 * w1[i] + b2 * w2[i] + b3 * w3[i]
        total[i] += first + (b4 * w4[i] + b5 * w5[i] + b6 * w6[i] + b7 * w7[i])


@_loop_of("variational.hypernet_sgd", sums=1)
def bounded_gradient(
    bounded: Column, square: Column, g: Column, keep: Scalar, debias: Scalar, share: Scalar,
    tiny: Scalar, sums: Sums,
) -> None:  # fmt: skip
    new, whole, size, least = _f(1 - keep), _f(debias), _f(share), _f(tiny)
    root = np.empty(g.size, np.float32)
    for i in range(g.size):
        mean = square[i] + new * (g[i] * g[i] - square[i])
        square[i] = mean
        root[i] = _f(math.sqrt(whole * mean)) + least
        bounded[i] = size * g[i] / root[i]
    _total(root, sums)


@_loop_of("variational.kl", sums=2)
def mixture(
    pull: Column, w: Column, wide: Scalar, excess: Scalar, odds: Scalar, sums: Sums
) -> None:
    base, more, start = _f(wide), _f(excess), _f(odds)
    share = np.empty(w.size, np.float32)
    for i in range(w.size):
        e = _exp(min(max(start - _f(0.5) * more * w[i] * w[i], _LEAST), _MOST))
        u = _f(1) + e
        share[i] = _log1p_of(e, u)
        pull[i] = w[i] * (base + more * (e / u))
    _mixture_sums(w, share, sums)
