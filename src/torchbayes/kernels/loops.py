"""The loops, compiled by numba; the compiled code is kept on disk, so this takes seconds once.

Everything is written so that LLVM computes several entries at once: no branches, no calls of the C library,
float32 throughout. All is in one file because numba looks at a function's own file alone to see whether what
it kept is stale.

Random numbers are Philox-4x32-10's (J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011):
a number is a function of a key and of its place, so that it does not matter which thread draws it. Normal
ones are made of them by Box and Muller's transform.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from torchbayes.kernels.names import Loop

__all__ = ["CHUNK", "walk"]

# Entries for which normal numbers are drawn at a time: they stay in the fastest cache. The four normal
# numbers of a counter lie a quarter of it apart, so that a vector register holds those of several counters.
CHUNK = 1024
_QUARTER = CHUNK // 4

_Function = TypeVar("_Function", bound=Callable[..., Any])
_f = np.float32
_FASTMATH = {"contract", "nsz", "arcp"}  # a·b + c may be rounded once, and a/b may be a·(1/b)
_u = np.uint32


def _compiled(
    signature: str | None = None, fastmath: set[str] = _FASTMATH
) -> Callable[[_Function], _Function]:
    # Division by zero gives what it gives in torch: numba's own check would be a branch.
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": fastmath,
    }
    if signature is None:
        return cast(Callable[[_Function], _Function], numba.njit(inline="always", **options))

    def compiled(function: _Function) -> _Function:
        try:
            return cast(_Function, numba.njit(signature, cache=True, **options)(function))
        except RuntimeError:  # there is no folder to keep it in
            return cast(_Function, numba.njit(signature, **options)(function))

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
    """Log x of a positive number, by the polynomial of the Cephes library."""
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
    """Exp x between the logarithms of the least and the greatest float32, by Cephes' polynomial."""
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
    """Tanh y / y, 1 at 0; a rational function where tanh y is not ±1 in float32."""
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
    """Four random words of 32 bits."""
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
    """Two normal numbers: √(−2 log u) cos 2πv and √(−2 log u) sin 2πv."""
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


_FLAT = "float32[::1]"


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _gaussian(x: Any, mean: Any, std: Any, eta: Any) -> None:
    for i in range(x.size):
        x[i] = mean[i] + std[i] * eta[i]


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _sgld(theta: Any, grad: Any, eta: Any, numbers: Any) -> None:
    keep, rate, spread = numbers[0], numbers[1], numbers[2]
    for i in range(theta.size):
        theta[i] = keep * theta[i] - rate * grad[i] + spread * eta[i]


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _psgld(theta: Any, v: Any, grad: Any, eta: Any, numbers: Any) -> None:
    n, delta, alpha, share = numbers[0], numbers[1], numbers[2], numbers[3]
    correction, lam, half, spread = numbers[4], numbers[5], numbers[6], numbers[7]
    for i in range(theta.size):
        force = n * grad[i] + delta * theta[i]
        mean = alpha * v[i] + share * force * force
        v[i] = mean
        g = _f(1) / (_f(math.sqrt(mean * correction)) + lam)
        theta[i] = theta[i] - half * g * force + spread * _f(math.sqrt(g)) * eta[i]


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _sghmc(theta: Any, p: Any, grad: Any, eta: Any, numbers: Any) -> None:
    keep, rate, pull, spread, speed = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    for i in range(theta.size):
        momentum = keep * p[i] - rate * grad[i] - pull * theta[i] + spread * eta[i]
        p[i] = momentum
        theta[i] = theta[i] + speed * momentum


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, boolean)")
def _thermostat(
    theta: Any, p: Any, xi: Any, grad: Any, eta: Any, numbers: Any, adaptive: Any
) -> None:
    """SGNHT, and ATMC if adaptive; the formulas are those of `torchbayes.optim.thermostat`."""
    h, d, inverse, hn = numbers[0], numbers[1], numbers[2], numbers[3]
    hdelta, spread, speed = numbers[4], numbers[5], numbers[6]
    half = _f(0.5) * h
    for i in range(theta.size):
        x, q = xi[i], p[i]
        beta = max(d, x) if adaptive else d + x
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
        xi[i] = x + (speed * velocity * velocity - h * root * root * root)


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _draw(theta: Any, mu: Any, s: Any, eta: Any, numbers: Any) -> None:
    shift, spread = numbers[0], numbers[1]
    for i in range(theta.size):
        theta[i] = mu[i] + spread * eta[i] / _f(math.sqrt(s[i] + shift))


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _vogn(mu: Any, m: Any, s: Any, g: Any, h: Any, numbers: Any) -> None:
    alpha, beta1, keep, new = numbers[0], numbers[1], numbers[2], numbers[3]
    delta, shift = numbers[4], numbers[5]
    for i in range(mu.size):
        momentum = beta1 * m[i] + g[i] + delta * mu[i]
        precision = keep * s[i] + new * h[i]
        m[i] = momentum
        s[i] = precision
        mu[i] = mu[i] - alpha * momentum / (precision + shift)


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _ivon(mu: Any, m: Any, h: Any, g: Any, theta: Any, numbers: Any) -> None:
    new1, new2, lam, delta = numbers[0], numbers[1], numbers[2], numbers[3]
    pull, debias, rate, xi = numbers[4], numbers[5], numbers[6], numbers[7]
    for i in range(mu.size):
        momentum = m[i] + new1 * (g[i] - m[i])
        u = h[i] + delta
        off = h[i] - lam * g[i] * (theta[i] - mu[i]) * u  # h − ĥ
        curvature = h[i] - new2 * off + _f(0.5) * new2 * new2 * off * off / u
        step = debias * (momentum + pull * mu[i]) / (curvature + delta)
        m[i] = momentum
        h[i] = curvature
        mu[i] = mu[i] - rate * min(max(step, -xi), xi)


@_compiled()
def _log1p_of(e: Any, u: Any) -> Any:
    """Log(1 + e) where u is 1 + e as rounded: log u, put right by what u has lost of e."""
    kept = u - _f(1)
    return e if kept == _f(0) else _log(u) * (e / kept)


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _softplus(std: Any, slope: Any, rho: Any, numbers: Any) -> None:
    low, high = numbers[0], numbers[1]
    for i in range(std.size):
        e = _exp(min(max(rho[i], low), high))
        u = _f(1) + e
        slope[i] = e / u
        std[i] = _log1p_of(e, u)


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _sample(w: Any, epsilon: Any, std: Any, mean: Any, eta: Any) -> None:
    for i in range(w.size):
        epsilon[i] = eta[i]
        w[i] = mean[i] + std[i] * eta[i]


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, float64[::1])", {*_FASTMATH, "reassoc"})
def _kl_sums(std: Any, mean: Any, eta: Any, sums: Any) -> None:
    """Σσ², Σμ², Σ log σ and Σε²; a sum over a chunk at most may be in any order, and in float32."""
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


@_compiled(f"void({_FLAT}, {_FLAT}, {_FLAT}, {_FLAT})")
def _mixture(pull: Any, share: Any, w: Any, numbers: Any) -> None:
    wide, excess, odds, low, high = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    for i in range(w.size):
        e = _exp(min(max(odds - _f(0.5) * excess * w[i] * w[i], low), high))
        u = _f(1) + e
        share[i] = _log1p_of(e, u)
        pull[i] = w[i] * (wide + excess * (e / u))


@_compiled(f"void({_FLAT}, {_FLAT}, float64[::1])", {*_FASTMATH, "reassoc"})
def _mixture_sums(w: Any, share: Any, sums: Any) -> None:
    squares, shares = _f(0), _f(0)
    for i in range(w.size):
        squares += w[i] * w[i]
        shares += share[i]
    sums[0] += squares
    sums[1] += shares


@_compiled(f"void({', '.join([_FLAT] * 8)})")
def _bbb_gradients(
    to_mean: Any, to_rho: Any, g: Any, eta: Any, std: Any, slope: Any, mean: Any, numbers: Any
) -> None:
    scale, pull, constant = numbers[0], numbers[1], numbers[2]
    for i in range(g.size):
        to_mean[i] = g[i] + pull * mean[i] - constant
        to_rho[i] = slope[i] * (g[i] * eta[i] + pull * std[i] - scale / std[i])


@_compiled()
def _column(addresses: Any, tensor: Any, number: Any, offset: Any, size: Any) -> Any:
    return carray(_memory(addresses[tensor, number] + offset), size)


@_compiled(
    "void(int64, int64[:,::1], int64[::1], int64, int64, uint32, uint32, float32[::1], float64[:,::1])"
)
def walk(
    loop: Any,
    addresses: Any,
    ends: Any,
    first: Any,
    last: Any,
    k0: Any,
    k1: Any,
    numbers: Any,
    sums: Any,
) -> None:
    """Apply a loop to the chunks from `first` to before `last` of tensors that are taken end to end.

    Args:
        loop: Its number in `torchbayes.kernels.Loop`.
        addresses: For every tensor to change a row of addresses: its own and those of what belongs to it.
        ends: Where every tensor ends, counted from the start of the first.
        first: The first chunk.
        last: The first chunk of somebody else.
        k0: Half of the key of the random numbers.
        k1: The other half.
        numbers: The loop's scalars.
        sums: A row for every chunk, to which `Loop.BBB` adds.
    """
    eta = np.empty(CHUNK, np.float32)
    tensor = 0
    for chunk in range(first, last):
        if loop <= Loop.BBB:
            _normals(eta, np.uint64(chunk * _QUARTER), k0, k1)
        start = chunk * CHUNK
        position, stop = start, min(start + CHUNK, ends[-1])
        while position < stop:
            while ends[tensor] <= position:
                tensor += 1
            begin = ends[tensor - 1] if tensor > 0 else 0
            until = min(stop, ends[tensor])
            size, offset = until - position, 4 * (position - begin)
            part = eta[position - start : until - start]
            a = _column(addresses, tensor, 0, offset, size)
            b = _column(addresses, tensor, 1, offset, size)
            c = _column(addresses, tensor, 2, offset, size)
            d = _column(addresses, tensor, 3, offset, size)
            e = _column(addresses, tensor, 4, offset, size)
            f = _column(addresses, tensor, 5, offset, size)
            g = _column(addresses, tensor, 6, offset, size)
            if loop == Loop.NORMAL:
                a[:] = part
            elif loop == Loop.GAUSSIAN:
                _gaussian(a, b, c, part)
            elif loop == Loop.SGLD:
                _sgld(a, b, part, numbers)
            elif loop == Loop.PSGLD:
                _psgld(a, b, c, part, numbers)
            elif loop == Loop.SGHMC:
                _sghmc(a, b, c, part, numbers)
            elif loop == Loop.SGNHT or loop == Loop.ATMC:
                _thermostat(a, b, c, d, part, numbers, loop == Loop.ATMC)
            elif loop == Loop.DRAW:
                _draw(a, b, c, part, numbers)
            elif loop == Loop.VOGN:
                _vogn(a, b, c, d, e, numbers)
            elif loop == Loop.IVON:
                _ivon(a, b, c, d, e, numbers)
            elif loop == Loop.SOFTPLUS:
                _softplus(a, b, c, numbers)
            elif loop == Loop.BBB:
                _softplus(c, d, f, numbers)
                _sample(a, b, c, e, part)
                _kl_sums(c, e, part, sums[chunk])
            elif loop == Loop.MIXTURE:
                share = eta[: until - position]
                _mixture(a, share, b, numbers)
                _mixture_sums(b, share, sums[chunk])
            else:
                _bbb_gradients(a, b, c, d, e, f, g, numbers)
            position = until
