"""IVON: improved variational online Newton.

Y. Shen et al., Variational Learning is Effective for Large Deep Networks, ICML 2024. It needs no per-example
gradients: the curvature is estimated from the correlation of gradient and noise.

| symbol | argument | update |
| --- | --- | --- |
| λ | `train_size` / `temperature` | σ = 1/√(λ(h + δ)), θ = μ + σε |
| δ | `prior` · `temperature` / `train_size` | |
| ĝ | | the mean gradient at θ |
| ĥ | | ĝ·(θ − μ)·λ(h + δ) |
| β1, β2 | `betas` | m ← β1 m + (1 − β1) ĝ; h ← β2 h + (1 − β2) ĥ + ½(1 − β2)² (h − ĥ)²/(h + δ) |
| h0 | `initial_curvature` | h at the start |
| α | `lr` | μ ← μ − α(h0 + δ) clip[(m/(1 − β1ᵗ) + δμ)/(h + δ), ±ξ] |
| ξ | `clip_radius` | |

As in VOGN here, scales and shifts of norm layers have no noise and no prior. Without noise there is no
estimate of their curvature, which stays at h0: they follow the momentum at the rate α.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes import kernels
from torchbayes.core.noise import normals_
from torchbayes.core.registry import register
from torchbayes.optim.base import check_number
from torchbayes.optim.natural_gradient import WeightOptimizer, gaussian_prior
from torchbayes.optim.statistics import Statistics
from torchbayes.posterior import Gaussian, Weights
from torchbayes.prior import Prior

__all__ = ["IVON", "ivon_curvature", "ivon_draw", "ivon_step"]

Tensors = list[Tensor]


def ivon_draw(
    noise: Tensors, mu: Tensors, h: Tensors, u: Tensors, *, delta: float | Tensors, lam: float
) -> None:
    """Overwrite standard normal `noise` ε with θ = μ + ε/√(λ(h + δ)); `u` is overwritten too."""
    _plus(h, delta, u)
    for epsilon, mean, root in zip(noise, mu, u, strict=True):
        torch.addcmul(mean, epsilon, root.rsqrt_(), value=lam**-0.5, out=epsilon)


def ivon_curvature(
    h: Tensors, product: Tensors, u: Tensors, *, lam: float, beta2: float, delta: float | Tensors
) -> None:
    """Update h in place.

    Args:
        h: The curvature.
        product: ĝ·(θ − μ), averaged over draws; overwritten.
        u: Overwritten.
        lam: λ.
        beta2: The decay of h.
        delta: δ, one number or one tensor for each.
    """
    _plus(h, delta, u)
    for curvature, p, denominator in zip(h, product, u, strict=True):
        torch.addcmul(curvature, p, denominator, value=-lam, out=p)  # h − ĥ
    torch._foreach_add_(h, product, alpha=beta2 - 1)
    torch._foreach_mul_(product, product)
    torch._foreach_addcdiv_(h, product, u, value=0.5 * (1 - beta2) ** 2)


def ivon_step(
    mu: Tensors, m: Tensors, h: Tensors, u: Tensors, v: Tensors,
    *, alpha: float, debias: float, delta: float | Tensors, h0: float, xi: float,
    prior_mean: Tensors | None = None,
) -> None:  # fmt: skip
    """Update μ in place.

    Args:
        mu: μ.
        m: The momentum, updated.
        h: The curvature, updated.
        u: Overwritten.
        v: Overwritten.
        alpha: α.
        debias: 1 − β1ᵗ.
        delta: δ, one number or one tensor for each.
        h0: h at the start.
        xi: ξ.
        prior_mean: The prior's mean, 0 if None.
    """
    for i, (mean, momentum, numerator) in enumerate(zip(mu, m, v, strict=True)):
        off = mean if prior_mean is None else torch.sub(mean, prior_mean[i], out=numerator)
        if isinstance(delta, float):
            torch.add(momentum, off, alpha=delta * debias, out=numerator)
        else:
            torch.addcmul(momentum, off, delta[i], value=debias, out=numerator)
    _plus(h, delta, u)
    if math.isinf(xi) and isinstance(delta, float):
        torch._foreach_addcdiv_(mu, v, u, value=-alpha * (h0 + delta) / debias)
        return
    for i, (mean, step, denominator) in enumerate(zip(mu, v, u, strict=True)):
        step.div_(denominator).div_(debias).clamp_(-xi, xi)
        rate = delta if isinstance(delta, float) else delta[i]
        mean.sub_(step.mul_(rate + h0), alpha=alpha)


def _plus(h: Tensors, delta: float | Tensors, u: Tensors) -> None:
    """Write h + δ to `u`."""
    for i, (curvature, target) in enumerate(zip(h, u, strict=True)):
        torch.add(curvature, delta if isinstance(delta, float) else delta[i], out=target)


@register(
    "ivon", family="a Gaussian", posterior="Gaussian", target="mean field",
    summary="a Gaussian over every weight, by natural gradients at the price of Adam",
    paper="Shen et al. 2024, the successor of VOGN",
)  # fmt: skip
class IVON(WeightOptimizer):
    """Improved variational online Newton: a Gaussian over every weight at the price of Adam.

    Used as `VOGN` is. The loss is the *mean* over the batch. torch's `weight_decay`, and the δ of the
    paper, is `prior / train_size`; what the authors call `ess` is `train_size`.

    Args:
        model: The network. Outside of `sampled()` it has the mean weights.
        lr: The learning rate α, of about SGD's size.
        train_size: The number of training examples.
        prior: The Gaussian prior of every weight except norm layers': the precision p of N(0, 1/p), or a
            `GaussianPrior` with mean and precision of its own for every weight; for continual learning, the
            last task's posterior (`GaussianPrior.from_posterior`).
        temperature: Below 1 the posterior is sharper than Bayes' rule has it.
        mc_samples: The draws per step.
        betas: The decay of the momentum and of the curvature.
        initial_curvature: h0. Too small a value makes the first draws noisy, too large a one the steps of
            weights with little curvature short.
        clip_radius: ξ, the largest step of a weight before it is multiplied by the rate.
        params: Parameters of the model, or groups of them; all trainable ones if None.
        generator: Where the noise comes from. Its state is saved with the optimiser's.

    Example:
        >>> import torch, torchbayes as tb
        >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = tb.IVON(model, lr=0.1, train_size=64)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = (0.5 * (model(x) - 2 * x) ** 2).mean()
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(300):
        ...     _ = optimizer.step(closure)
        >>> bool((model.weight - 2).abs() < 0.5)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.3,
        *,
        train_size: int,
        prior: Prior | float = 1.0,
        temperature: float = 1.0,
        mc_samples: int = 1,
        betas: tuple[float, float] = (0.9, 0.9999),
        initial_curvature: float = 0.3,
        clip_radius: float = math.inf,
        params: Iterable[Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_number("lr", lr)
        check_number("temperature", temperature, above=True)
        check_number("betas[0]", betas[0], high=1.0)
        check_number("betas[1]", betas[1], high=1.0)
        check_number("initial_curvature", initial_curvature, above=True)
        check_number("clip_radius", clip_radius, above=True)
        defaults = {
            "lr": lr,
            "train_size": train_size,
            "temperature": temperature,
            "betas": betas,
            "initial_curvature": initial_curvature,
            "clip_radius": clip_radius,
        }
        super().__init__(
            model, params, defaults, mc_samples=mc_samples, generator=generator,
            prior=gaussian_prior(prior),
        )  # fmt: skip

    @staticmethod
    def _lam(group: dict[str, Any]) -> float:
        return float(group["train_size"] / group["temperature"])

    def _delta(self, group: dict[str, Any], fixed: bool) -> float:
        """δ, where it is the same for all weights."""
        return 0.0 if fixed else float(group["prior"] / self._lam(group))

    def _own_prior(
        self, group: dict[str, Any], params: Sequence[Tensor], fixed: bool
    ) -> list[list[Tensor]]:
        """δ and the prior's mean of every weight, if the prior is one for every weight."""
        if fixed or self.prior is None:
            return []
        lam = self._lam(group)
        moments = [self._prior_of(p) for p in params]
        return [[precision / lam for _, precision in moments], [mean for mean, _ in moments]]

    def _curvature(self, group: dict[str, Any], p: Tensor) -> Tensor:
        state = self.state[p]
        if "curvature" not in state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(p, requires_grad=False)
            state["curvature"] = torch.full_like(p, group["initial_curvature"], requires_grad=False)
        return state["curvature"]  # type: ignore[no-any-return]

    def _perturbable(self, group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if id(p) not in self._fixed]

    def _perturb(self, group: dict[str, Any], params: list[Tensor], draws: list[Tensor]) -> None:
        lists = [
            draws, [p.detach() for p in params], [self._curvature(group, p) for p in params],
            *self._own_prior(group, params, False)[:1],
        ]  # fmt: skip
        if self.prior is None and kernels.fits(lists, self.generator):
            numbers = (self._delta(group, False), self._lam(group) ** -0.5)
            kernels.run(kernels.Loop.DRAW, lists, numbers, self.generator)
            return
        normals_(draws, self.generator)
        for u, (noise, mu, h, *own) in self._blocks(lists):
            delta = own[0] if own else self._delta(group, False)
            ivon_draw(noise, mu, h, u, delta=delta, lam=self._lam(group))

    def _statistics(self) -> Statistics:
        result = Statistics()
        for p in self._parameters():
            if p.grad is not None and p.requires_grad:
                result.put(("gradient", id(p)), p.grad)
                if id(p) not in self._fixed:
                    result.put(("draw", id(p)), self._buffer("draw", p))
        return result

    def _additive(self, statistics: Statistics) -> Statistics:
        """With ĝ·(θ − μ) instead of θ, which is of no use to other draws."""
        result = Statistics()
        for p in self._parameters():
            if statistics.has("gradient", p):
                gradient = statistics.value("gradient", p)
                result.put(("gradient", id(p)), gradient)
                if statistics.has("draw", p):
                    offset = statistics.value("draw", p).sub_(p.detach())
                    result.put(("product", id(p)), offset.mul_(gradient))
        return result

    def _update(self, statistics: Statistics) -> None:
        for group in self.param_groups:
            bundles: dict[tuple[bool, int, torch.dtype], list[Tensor]] = {}
            for p in group["params"]:
                if statistics.has("gradient", p):
                    self._curvature(group, p)
                    step = self.state[p]["step"] = self.state[p]["step"] + 1
                    bundles.setdefault((id(p) in self._fixed, step, p.dtype), []).append(p)
            for (fixed, step, _), params in bundles.items():
                self._update_bundle(group, params, fixed, step, statistics)

    def _update_bundle(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        fixed: bool,
        step: int,
        statistics: Statistics,
    ) -> None:
        kind = "draw" if statistics.has("draw", params[0]) else "product"
        lists = [
            [p.detach() for p in params],
            [self.state[p]["momentum"] for p in params],
            [self.state[p]["curvature"] for p in params],
            [statistics.value("gradient", p) for p in params],
            # The draw is not needed any more: what becomes of it is overwritten. Norm layers have none.
            [self._buffer("draw", p) if fixed else statistics.value(kind, p) for p in params],
            *self._own_prior(group, params, fixed),
        ]
        beta1, beta2 = group["betas"]
        debias = 1 - beta1**step
        if kind == "draw" and self.prior is None and not fixed and kernels.fits(lists, None):
            d, h0 = self._delta(group, False), group["initial_curvature"]
            numbers = (
                1 - beta1, 1 - beta2, self._lam(group), d, d * debias, 1 / debias,
                group["lr"] * (h0 + d), group["clip_radius"],
            )  # fmt: skip
            kernels.run(kernels.Loop.IVON, lists, numbers)
            return
        for u, (mu, m, h, g, product, *own) in self._blocks(lists):
            delta = own[0] if own else self._delta(group, fixed)
            torch._foreach_lerp_(m, g, 1 - beta1)
            if not fixed:
                if kind == "draw":
                    torch._foreach_sub_(product, mu)
                    torch._foreach_mul_(product, g)
                ivon_curvature(h, product, u, lam=self._lam(group), beta2=beta2, delta=delta)
            ivon_step(
                mu, m, h, u, product, alpha=group["lr"], debias=debias, delta=delta,
                h0=group["initial_curvature"], xi=group["clip_radius"],
                prior_mean=own[1] if own else None,
            )  # fmt: skip

    @torch.no_grad()
    def posterior(self) -> Gaussian:
        """The Gaussian of every weight; norm layers' scales and shifts are deterministic."""
        std: Weights = {}
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad or id(p) in self._fixed:
                    continue
                h = self.state[p].get("curvature", group["initial_curvature"])
                own = self._own_prior(group, [p], False)
                u = h + (own[0][0] if own else self._delta(group, False))
                std[self._names[id(p)]] = torch.full_like(p, 1 / self._lam(group)).div_(u).sqrt_()
        return Gaussian(self._mean_weights(), std, model_name=type(self.model).__name__)
