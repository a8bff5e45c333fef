"""Priors: densities over a dictionary of weights.

A prior is one distribution over all the weights it is given: `log_prob` is a sum over weights, not a mean,
so that it can be added to the log-likelihood of the whole training set. A loss that is a *mean* over
examples takes `log_prob / train_size`.

| symbol | here | from |
| --- | --- | --- |
| N(0, I/δ) | `GaussianPrior(precision=δ)` | VOGN, Algorithm 1 |
| N(0, I/(δf)), f the fan-in | `GaussianPrior(precision=δ, by_fan_in=True)` | R. Neal's thesis, 1995 |
| πN(0, σ₁²) + (1−π)N(0, σ₂²) | `ScaleMixturePrior` | Bayes by Backprop, scale mixture prior |
| exp(−‖θᵢ‖/b) | `GroupLaplacePrior(scale=b)` | ATMC, section 5 |
| exp(−d/2·(‖φ‖²−1)²) | `UnitDirectionPrior` | ATMC, section 4.3 (d: the dimension of φ) |
| one for each kind of weight | `PriorByName`, `resnetpp_prior` | ATMC, sections 4.3 and 5 |
"""

from __future__ import annotations

import glob
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from torchbayes.core import shards
from torchbayes.core.names import named_modules, named_parameters
from torchbayes.posterior import Gaussian, Posterior, Weights

__all__ = [
    "GaussianPrior",
    "GroupLaplacePrior",
    "Prior",
    "PriorByName",
    "ScaleMixturePrior",
    "UnitDirectionPrior",
    "as_prior",
    "resnetpp_prior",
]


def _positive(name: str, value: float) -> float:
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{name} is {value:g}: expected a finite number above 0")
    return float(value)


class Prior(ABC):
    """A density over weights. A subclass defines the log-density of one named weight tensor."""

    @abstractmethod
    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        """Return the log-density of one weight tensor, summed over its entries."""

    def log_prob(self, weights: Weights) -> Tensor:
        """Return the log-density of all `weights`, a differentiable scalar."""
        if not weights:
            return torch.zeros((), dtype=torch.float64)
        # Squares and their sums overflow in half precision.
        single = {n: w.float() if w.element_size() < 4 else w for n, w in weights.items()}
        return torch.stack([self.log_prob_of(n, w).double() for n, w in single.items()]).sum()

    def grad(self, weights: Weights) -> Weights:
        """Return the gradient of `log_prob` at `weights`."""
        if not weights:
            return {}
        leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.log_prob(leaves), list(leaves.values()))
        return dict(zip(leaves, gradients, strict=True))

    def __repr__(self) -> str:
        """Return the prior's name and numbers, by which a run folder identifies its prior."""
        numbers = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({numbers})"

    def kl(self, posterior: Gaussian) -> Tensor:
        """Return KL(posterior ‖ prior) in closed form, summed over the posterior's random weights.

        Raises:
            TypeError: If there is no closed form for this prior.
        """
        raise TypeError(
            f"there is no closed-form KL from a Gaussian to a {type(self).__name__}: "
            "average log q(w) − log p(w) over draws instead"
        )


class GaussianPrior(Prior):
    """An independent Gaussian on every weight.

    The gradient of the mean loss gains `precision · (w − mean) / train_size`: with a zero mean this is
    torch's L2 `weight_decay = precision / train_size` (of SGD and Adam, not AdamW).

    Args:
        mean: Mean: one number for all weights, or a tensor for each.
        precision: Inverse variance: one number for all weights, or a tensor for each. 0 means no prior on
            that weight.
        by_fan_in: Whether the precision of a matrix or kernel is multiplied by its fan-in, the number of its
            entries per output, so that what a unit sums up has the same spread in a wide layer as in a narrow
            one. Vectors, such as biases, keep the precision. Of a transposed convolution and of an embedding
            the first dimension counts as outputs too.

    Example:
        >>> import torch, torchbayes as tb
        >>> prior = tb.GaussianPrior(precision=4.0)
        >>> round(prior.log_prob({"w": torch.zeros(1)}).item(), 4)   # log N(0; 0, 1/4)
        -0.2258
        >>> wide = tb.GaussianPrior(precision=4.0, by_fan_in=True)
        >>> wide.moments("w", torch.zeros(2, 100))[1].item()
        400.0
    """

    def __init__(
        self, *, mean: float | Weights = 0.0, precision: float | Weights = 1.0,
        by_fan_in: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(precision, dict) and not 0 <= precision < math.inf:
            raise ValueError(
                f"precision (1/std²) is {precision:g}: expected a finite number of at least 0 "
                "(0 for no prior)"
            )
        for name, value in precision.items() if isinstance(precision, dict) else ():
            bad = value[~((value >= 0) & (value < math.inf))]
            if bad.numel():
                raise ValueError(
                    f"precision of {name!r} has the entry {bad[0].item():g}: expected finite numbers "
                    "from 0 (1/std²; 0 for no prior)"
                )
        self.mean, self.precision, self.by_fan_in = mean, precision, by_fan_in

    @classmethod
    def from_posterior(cls, posterior: Posterior) -> GaussianPrior:
        """Turn the posterior of one task into the prior of the next.

        The prior has the mean and the standard deviation of every weight; correlations are dropped. Weights
        that are deterministic in the posterior have no prior.
        """
        marginals = getattr(posterior, "std", None)
        if marginals is None:
            raise TypeError(
                f"a {type(posterior).__name__} has no standard deviations to make a prior of: pass a Gaussian"
                " posterior, such as that of vogn, ivon, bbb or noisy-kfac"
            )
        mean, std = posterior.mean(), marginals()
        precision = {
            name: std[name].square().reciprocal() if name in std else torch.zeros_like(value)
            for name, value in mean.items()
            if value.is_floating_point()
        }
        for name, value in precision.items():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"posterior weight {name!r} has a standard deviation of 0 and cannot become a prior: "
                    "leave it out of the posterior's std"
                )
        return cls(mean={name: mean[name] for name in precision}, precision=precision)

    def __repr__(self) -> str:
        """Return what a run folder records, to check that a run is resumed with its own prior."""
        scaled = ", by_fan_in=True" if self.by_fan_in else ""
        if not isinstance(self.mean, dict) and not isinstance(self.precision, dict):
            return f"GaussianPrior(mean={self.mean:g}, precision={self.precision:g}{scaled})"
        check = 0
        for part in (self.mean, self.precision):
            for name, value in part.items() if isinstance(part, dict) else [("", part)]:
                values = torch.as_tensor(value).detach().cpu().double().contiguous().numpy()
                check = zlib.crc32(values.tobytes(), zlib.crc32(name.encode(), check))
        return f"GaussianPrior(of single weights, checksum {check:08x}{scaled})"

    def moments(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prior's mean and precision of one weight tensor, as tensors that broadcast with it."""
        mean = self._of(self.mean, "mean", name, weight)
        precision = self._of(self.precision, "precision", name, weight)
        if self.by_fan_in and weight.dim() > 1:
            precision = precision * math.prod(weight.shape[1:])
        return mean, precision

    @staticmethod
    def _of(value: float | Weights, what: str, name: str, weight: Tensor) -> Tensor:
        if not isinstance(value, dict):
            return weight.new_tensor(value)
        if name not in value:
            raise ValueError(
                f"the prior has no {what} for weight {name!r}: give one for every weight, or one number"
            )
        shape = value[name].shape
        pairs = zip(reversed(shape), reversed(weight.shape), strict=False)
        if len(shape) > weight.dim() or any(own not in (1, size) for own, size in pairs):
            raise ValueError(
                f"the prior's {what} of weight {name!r} has shape {tuple(shape)} but the weight has "
                f"{tuple(weight.shape)}: give one number per weight"
            )
        return value[name].to(weight)

    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        """Return log N(weight; mean, 1/precision)."""
        mean, precision = self.moments(name, weight)
        log_normaliser = 0.5 * torch.log(precision / (2 * math.pi))
        density = log_normaliser - 0.5 * precision * (weight - mean) ** 2
        # A precision of 0 is an improper flat prior: it adds nothing, in particular no −∞.
        return torch.where(precision > 0, density, torch.zeros_like(weight)).sum()

    def grad(self, weights: Weights) -> Weights:
        """Return −precision · (w − mean)."""
        result: Weights = {}
        for name, weight in weights.items():
            mean, precision = self.moments(name, weight)
            result[name] = (mean - weight.detach()) * precision
        return result

    def kl(self, posterior: Gaussian) -> Tensor:
        """Return the KL between two diagonal Gaussians, by `torch.distributions.kl_divergence`."""
        if not isinstance(posterior, Gaussian):
            raise TypeError(
                f"a {type(posterior).__name__} is not a diagonal Gaussian: pass a torchbayes.Gaussian"
            )
        means, stds = posterior.mean(), posterior.std()
        terms = []
        for name, std in stds.items():
            mean, precision = self.moments(name, std)
            proper = (precision > 0).expand_as(std)
            if not bool(proper.any()):
                continue
            # Unvalidated, because a standard deviation of 0 has a KL, namely infinity.
            q = Normal(means[name][proper], std[proper], validate_args=False)
            scale = precision.expand_as(std)[proper].reciprocal().sqrt()
            p = Normal(mean.expand_as(std)[proper], scale, validate_args=False)
            terms.append(kl_divergence(q, p).double().sum())
        return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)

    @property
    def shared(self) -> tuple[float, float] | None:
        """The mean and the precision if they are the same for every weight, otherwise None."""
        if isinstance(self.precision, dict) or isinstance(self.mean, dict) or self.by_fan_in:
            return None
        return float(self.mean), float(self.precision)

    @property
    def scalar(self) -> float | None:
        """The precision δ if this is N(0, 1/δ) for every weight, otherwise None."""
        same = self.shared
        return None if same is None or same[0] != 0 else same[1]


class ScaleMixturePrior(Prior):
    """Two zero-mean Gaussians, a wide and a narrow one, on every weight (Bayes by Backprop).

    p(w) = π N(w; 0, std1²) + (1−π) N(w; 0, std2²), with the logarithm taken by logaddexp.

    Args:
        pi: Weight of the first, wide component, between 0 and 1.
        std1: Standard deviation of the first component.
        std2: Standard deviation of the second, narrow component.

    Example:
        >>> import torch, torchbayes as tb
        >>> prior = tb.ScaleMixturePrior(pi=0.5, std1=1.0, std2=0.01)
        >>> bool(prior.log_prob({"w": torch.tensor([0.0])}) > prior.log_prob({"w": torch.tensor([1.0])}))
        True
    """

    def __init__(self, pi: float = 0.5, std1: float = 1.0, std2: float = math.exp(-6)) -> None:
        if not 0 < pi < 1:
            raise ValueError(f"pi is {pi:g}: expected the wide component's weight, between 0 and 1")
        self.pi, self.std1, self.std2 = pi, _positive("std1", std1), _positive("std2", std2)

    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        """Return the logaddexp of the two components' log-densities."""
        half = 0.5 * weight.square()
        constant = 0.5 * math.log(2 * math.pi)
        wide = math.log(self.pi) - math.log(self.std1) - constant - half / self.std1**2
        narrow = math.log1p(-self.pi) - math.log(self.std2) - constant - half / self.std2**2
        return torch.logaddexp(wide, narrow).sum()


def _groups(weight: Tensor) -> Tensor:
    """Return one row per output feature; a vector or scalar has groups of one entry."""
    return weight.flatten(1) if weight.dim() > 1 else weight.reshape(-1, 1)


class GroupLaplacePrior(Prior):
    """exp(−‖wᵢ‖/b) on each output feature's weights (ATMC, section 5).

    On the scale parameters of weight norm, of shape (features, 1, …), it is a Laplace prior on each scale.

    Args:
        scale: Scale b, the typical norm of a feature divided by its dimension.

    Example:
        >>> import torch, torchbayes as tb
        >>> prior = tb.prior.GroupLaplacePrior(scale=5.0)
        >>> prior.grad({"g": torch.tensor([[2.0]])})["g"].item()
        -0.20000000298023224
    """

    def __init__(self, scale: float = 5.0) -> None:
        self.scale = _positive("scale", scale)

    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        """Return −‖wᵢ‖/b minus the log-normaliser: the surface of the unit sphere times Γ(d) bᵈ."""
        rows = _groups(weight)
        d = rows.shape[1]
        log_surface = math.log(2) + 0.5 * d * math.log(math.pi) - math.lgamma(d / 2)
        log_normaliser = log_surface + math.lgamma(d) + d * math.log(self.scale)
        # torch's norm has gradient 0, not NaN, where a whole group is 0.
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return -(norms / self.scale).sum() - rows.shape[0] * log_normaliser

    def grad(self, weights: Weights) -> Weights:
        """Return −wᵢ / (b‖wᵢ‖), and 0 where a whole group is 0."""
        result: Weights = {}
        for name, weight in weights.items():
            rows = _groups(weight.detach())
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            unit = rows / norms.clamp_min(torch.finfo(rows.dtype).tiny)
            result[name] = unit.mul_(-1 / self.scale).view(weight.shape)
        return result


class UnitDirectionPrior(Prior):
    """exp(−d/2·(‖φ‖²−1)²) on each output feature's direction φ of dimension d (ATMC, section 4.3).

    It keeps the length of weight norm's directions, which does not affect the network's output, near 1.
    `log_prob` omits the constant that makes the density integrate to one.

    Example:
        >>> import torch, torchbayes as tb
        >>> tb.prior.UnitDirectionPrior().log_prob({"v": torch.tensor([[0.6, 0.8]])}).abs().item() < 1e-12
        True
    """

    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        """Return −d/2·(‖φ‖²−1)², summed over features."""
        rows = _groups(weight)
        excess: Tensor = rows.square().sum(1) - 1
        return excess.square().sum() * (-0.5 * rows.shape[1])

    def grad(self, weights: Weights) -> Weights:
        """Return −2d(‖φ‖²−1)φ."""
        result: Weights = {}
        for name, weight in weights.items():
            rows = _groups(weight.detach())
            excess = rows.square().sum(1, keepdim=True) - 1
            result[name] = (rows * (excess * (-2 * rows.shape[1]))).view(weight.shape)
        return result


class PriorByName(Prior):
    """A prior for each kind of weight, chosen by the weight's name or by the type of its module.

    Args:
        rules: Priors by patterns such as `"*.bias"`, in which `*` matches anything. A weight has the prior of
            the first pattern that matches its whole name.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.prior import PriorByName
        >>> prior = PriorByName({"*.bias": tb.GaussianPrior(precision=4.0), "*": tb.GaussianPrior()})
        >>> weights = {"fc.bias": torch.ones(1), "fc.weight": torch.ones(1)}
        >>> {name: gradient.item() for name, gradient in prior.grad(weights).items()}
        {'fc.bias': -4.0, 'fc.weight': -1.0}
    """

    def __init__(self, rules: Mapping[str, Prior]) -> None:
        for pattern, prior in rules.items():
            if not isinstance(prior, Prior):
                raise TypeError(
                    f"rule {pattern!r} has a {type(prior).__name__}: expected a prior such as GaussianPrior()"
                )
        self.rules = dict(rules)

    @classmethod
    def of_modules(cls, model: nn.Module, rules: Mapping[type[nn.Module], Prior]) -> PriorByName:
        """Build rules by the type of the module that a weight belongs to instead of its name.

        Args:
            model: The network whose weights the prior is for.
            rules: Priors by module type. A weight has the prior of the first type that its module is an
                instance of; `nn.Module` matches all. A prior may itself be a `PriorByName`.

        Example:
            >>> import torch, torchbayes as tb
            >>> from torchbayes.prior import PriorByName
            >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.LayerNorm(2))
            >>> tight, loose = tb.GaussianPrior(precision=100.0), tb.GaussianPrior()
            >>> prior = PriorByName.of_modules(net, {torch.nn.LayerNorm: tight, torch.nn.Module: loose})
            >>> prior.rules["1.weight"] is tight, prior.rules["0.weight"] is loose
            (True, True)
        """
        found: dict[str, Prior] = {}
        owners = {short: module for short, _, module in named_modules(model)}
        for name in named_parameters(model):
            owner = owners[name.rpartition(".")[0]]
            kind = next((kind for kind in rules if isinstance(owner, kind)), None)
            if kind is None:
                raise ValueError(
                    f"no rule of the prior fits weight {name!r} of a {type(owner).__name__}: the types are "
                    f"{', '.join(kind.__name__ for kind in rules)}; add a last rule for torch.nn.Module"
                )
            found[glob.escape(name)] = rules[kind]
        return cls(found)

    def rule(self, name: str) -> str:
        """Return the pattern that applies to the weight called `name`."""
        for pattern in self.rules:
            if fnmatchcase(name, pattern):
                return pattern
        raise ValueError(
            f"no rule of the prior fits weight {name!r}: the patterns are {', '.join(self.rules)}; add a "
            "last rule '*'"
        )

    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        """Return the log-density under the weight's own prior."""
        return self.rules[self.rule(name)].log_prob_of(name, weight)

    def grad(self, weights: Weights) -> Weights:
        """Return the gradient under each weight's own prior."""
        parts: dict[int, tuple[Prior, Weights]] = {}
        for name, weight in weights.items():
            prior = self.rules[self.rule(name)]
            parts.setdefault(id(prior), (prior, {}))[1][name] = weight
        found: Weights = {}
        for prior, own in parts.values():
            found |= prior.grad(own)
        return {name: found[name] for name in weights}


def own_part(prior: Prior, weights: Mapping[str, Tensor]) -> Prior:
    """Return the prior of this process's parts of weights that are shared out by rows (`fully_shard`).

    Args:
        prior: The prior of the whole weights.
        weights: The weights by name.
    """
    if isinstance(prior, GaussianPrior):

        def cut(value: float | Weights, of: str) -> float | Weights:
            if not isinstance(value, dict):
                return value
            like = {n: torch.empty((), dtype=p.dtype).expand(p.shape) for n, p in weights.items()}
            return {
                name: shards.part(GaussianPrior._of(value, of, name, like[name]).expand(p.shape), p)
                for name, p in weights.items()
                if name in value
            }

        mean, precision = cut(prior.mean, "mean"), cut(prior.precision, "precision")
        return GaussianPrior(mean=mean, precision=precision, by_fan_in=prior.by_fan_in)
    if isinstance(prior, ScaleMixturePrior | GroupLaplacePrior | UnitDirectionPrior):
        return prior  # of single weights, or of rows
    if isinstance(prior, PriorByName):
        rules = {
            rule: own_part(of, {n: p for n, p in weights.items() if prior.rule(n) == rule})
            for rule, of in prior.rules.items()
        }
        return PriorByName(rules)
    raise TypeError(
        f"prior is a {type(prior).__name__}, which may depend on whole weights, and the processes of a "
        "sharded model have rows of them: use a GaussianPrior, a ScaleMixturePrior or a prior of rows"
    )


def as_prior(prior: Prior | float) -> Prior:
    """Return the prior that a method's `prior` argument denotes.

    Args:
        prior: A prior, or the precision δ of N(0, 1/δ) on every weight; 0 for none.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is a number that is not a valid precision.

    Example:
        >>> from torchbayes.prior import as_prior
        >>> as_prior(4.0)
        GaussianPrior(mean=0, precision=4)
    """
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, bool) or not isinstance(prior, (int, float)):
        raise TypeError(
            f"prior is {prior!r}: expected a prior such as GaussianPrior(…), or a number, the precision of "
            "N(0, 1/precision)"
        )
    if not 0 <= prior < math.inf:
        raise ValueError(
            f"prior is {prior:g}: expected a precision, a finite number of at least 0, or a prior"
        )
    return GaussianPrior(precision=float(prior))


def resnetpp_prior() -> PriorByName:
    """Return the ATMC paper's priors for ResNet++.

    Group Laplace with b = 5 on scales (section 5), unit length on directions (section 4.3), and N(0, 1) on
    the rest, that is the biases, for which the paper gives none.

    Example:
        >>> from torchbayes.prior import resnetpp_prior
        >>> resnetpp_prior().rule("layer1.0.conv1.direction")
        '*.direction'
    """
    scale, direction = GroupLaplacePrior(5.0), UnitDirectionPrior()
    return PriorByName({"*.scale": scale, "*.direction": direction, "*": GaussianPrior()})
