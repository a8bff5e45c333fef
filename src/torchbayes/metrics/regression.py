r"""Scores of a regression predictive: an equal-weight mixture of Gaussians, one per draw.

`means` and `stds` have the draws along dimension 0, (S, N) or (S, N, D) for `targets` (N,) or
(N, D); `stds` may be anything that broadcasts to `means`, such as one fixed noise level. Scores
are means over all numbers in `targets`: several outputs are scored separately, by their marginal
distributions.

The continuous ranked probability score is $\int (F(x) - 1\{x \ge y\})^2 dx$. With
$A(m, s) = E|m + s Z| = 2 s \varphi(m / s) + m (2 \Phi(m / s) - 1)$, where $Z$ is a standard normal
variable, that of the mixture is (Grimit et al. 2006)

$$\frac1S \sum_i A(y - \mu_i, \sigma_i)
- \frac1{2 S^2} \sum_{i, j} A\left(\mu_i - \mu_j, \sqrt{\sigma_i^2 + \sigma_j^2}\right).$$
"""

import math

import torch
from torch import Tensor

from torchbayes.metrics import _inputs
from torchbayes.metrics.mixture import mixture_log_prob, mixture_quantile


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Compute the root mean squared error.

    Args:
        mean: Predicted means, of the shape of `targets`.
        targets: True values.

    Example:
        >>> import torch
        >>> rmse(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 7.0]))
        5.0
    """
    # Imported here because it takes over a second, which `import torchbayes` should not.
    from torchmetrics.functional.regression import mean_squared_error

    mean, targets = _inputs.finite(mean, "mean"), _inputs.finite(targets, "targets")
    _inputs.same_shape(mean, "mean", targets, "targets")
    return float(mean_squared_error(mean.flatten(), targets.flatten(), squared=False))


def gaussian_mixture_nll(means: Tensor, stds: Tensor, targets: Tensor) -> float:
    """Compute the mean negative log-density of the targets under the mixture, in nats.

    Args:
        means: Component means (S, ...).
        stds: Component standard deviations, positive, broadcast to `means`.
        targets: True values (...).

    Example:
        >>> import torch
        >>> round(gaussian_mixture_nll(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(1)), 4)
        0.9189
    """
    means, stds, targets = _mixture(means, stds, targets)
    if bool((stds == 0).any()):
        raise ValueError(
            "stds contains 0, expected positive numbers because the density is infinite there: "
            "add the observation noise"
        )
    each = torch.distributions.Normal(means, stds, validate_args=False).log_prob(targets)
    return -float(mixture_log_prob(each).mean())


def gaussian_crps(mean: Tensor, std: Tensor, targets: Tensor) -> float:
    """Compute the mean CRPS of one Gaussian per example, in closed form; lower is better.

    Args:
        mean: Predicted means, of the shape of `targets`.
        std: Predicted standard deviations, broadcast to `mean`; 0 scores the absolute error.
        targets: True values.

    Example:
        >>> import torch
        >>> round(gaussian_crps(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
        0.2337
    """
    std = _inputs.real(std, "std")
    return gaussian_mixture_crps(
        _inputs.real(mean, "mean")[None], std[None] if std.ndim > 0 else std, targets
    )


def gaussian_mixture_crps(means: Tensor, stds: Tensor, targets: Tensor) -> float:
    """Compute the mean CRPS of the mixture, in closed form; time grows with the square of S.

    Args:
        means: Component means (S, ...).
        stds: Component standard deviations, broadcast to `means`; 0 scores the bare means.
        targets: True values (...).

    Example:
        >>> import torch
        >>> gaussian_mixture_crps(torch.tensor([[0.0], [1.0]]), torch.tensor(0.0), torch.zeros(1))
        0.25
    """
    means, stds, targets = _mixture(means, stds, targets)
    draws = len(means)
    error = _expected_distance(targets - means, stds).mean(dim=0)
    variances = stds.square()
    # The pairs i = j contribute 2 sigma_i / sqrt(pi); the others are computed once and count twice. The
    # loop runs over draws because all S * S * N pairs at once need not fit in memory.
    spread = (2 / math.sqrt(math.pi)) * stds.sum(dim=0)
    for i in range(draws - 1):
        between = (variances[i] + variances[i + 1 :]).sqrt()
        spread += 2 * _expected_distance(means[i] - means[i + 1 :], between).sum(dim=0)
    return float((error - spread / (2 * draws**2)).mean())


def gaussian_mixture_quantile(means: Tensor, stds: Tensor, q: float) -> Tensor:
    """Compute the quantile of each mixture (...).

    Args:
        means: Component means (S, ...).
        stds: Component standard deviations, broadcast to `means`.
        q: Probability below the result, between 0 and 1.

    Example:
        >>> import torch
        >>> round(float(gaussian_mixture_quantile(torch.zeros(3, 1), torch.ones(3, 1), 0.975)), 4)
        1.96
    """
    means, stds = _components(means, stds)
    each = means + stds * torch.special.ndtri(torch.tensor(q, dtype=torch.float64))

    def cdf(values: Tensor) -> Tensor:
        below: Tensor = torch.special.ndtr(_standardised(values - means, stds))
        return below

    return mixture_quantile(q, each, cdf)


def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> float:
    """Compute the fraction of targets inside their interval, ends included.

    Args:
        lower: Lower ends, of the shape of `targets`.
        upper: Upper ends, of the shape of `targets`.
        targets: True values.

    Example:
        >>> import torch
        >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0]))
        0.5
    """
    lower, upper = _interval(lower, upper)
    targets = _inputs.finite(targets, "targets")
    _inputs.same_shape(lower, "lower", targets, "targets")
    return float(((lower <= targets) & (targets <= upper)).double().mean())


def interval_width(lower: Tensor, upper: Tensor) -> float:
    """Compute the mean width of intervals.

    Args:
        lower: Lower ends.
        upper: Upper ends, of the shape of `lower`.

    Example:
        >>> import torch
        >>> interval_width(torch.zeros(2), torch.tensor([1.0, 2.0]))
        1.5
    """
    lower, upper = _interval(lower, upper)
    return float((upper - lower).mean())


def _components(means: Tensor, stds: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and stds in float64 and one shape, checked."""
    means, stds = _inputs.finite(means, "means"), _inputs.finite(stds, "stds")
    if bool((stds < 0).any()):
        raise ValueError(
            f"stds contains the negative value {float(stds.min()):.6g}, expected standard "
            "deviations: take the square root of variances, the exponential of logarithms"
        )
    if means.ndim == 0:
        raise ValueError("means is a scalar, expected draws along dimension 0: use means[None]")
    try:
        return means, stds.expand_as(means)
    except RuntimeError:
        raise ValueError(
            f"stds has shape {tuple(stds.shape)}, expected one that broadcasts to that of means, "
            f"{tuple(means.shape)}: give one standard deviation per mean"
        ) from None


def _mixture(means: Tensor, stds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return checked components (S, ...) and targets (...)."""
    means, stds = _components(means, stds)
    targets = _inputs.finite(targets, "targets")
    _inputs.same_shape(means[0], "each draw of means", targets, "targets")
    return means, stds, targets


def _interval(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked interval ends in float64."""
    lower, upper = _inputs.finite(lower, "lower"), _inputs.finite(upper, "upper")
    _inputs.same_shape(lower, "lower", upper, "upper")
    if bool((lower > upper).any()):
        raise ValueError("lower exceeds upper somewhere, expected lower <= upper: swap the ends")
    return lower, upper


def _standardised(difference: Tensor, std: Tensor) -> Tensor:
    """Return difference / std; a std of 0 gives a huge number of the right sign, 0 / 0 gives 0."""
    return difference / std.clamp(min=torch.finfo(torch.float64).tiny)


def _expected_distance(mean: Tensor, std: Tensor) -> Tensor:
    """Return E|X| of X ~ Normal(mean, std)."""
    z = _standardised(mean, std)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return 2 * std * density + mean * torch.erf(z / math.sqrt(2))
