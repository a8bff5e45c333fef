"""IVON: improved variational online Newton.

Y. Shen et al., Variational Learning is Effective for Large Deep Networks, ICML 2024. It needs no per-example
gradients: it estimates the curvature from the correlation of gradient and noise.

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

As in our VOGN, scales and shifts of norm layers have no noise and no prior. Without noise there is no
estimate of their curvature, which stays at h0: they follow the momentum at the rate α.

Without a `lr` the step is Adam's, with the same fixed point; without an `initial_curvature` the noise has a
bound, from which it starts; and without `betas` h is an average over as many updates as its noise needs:

    μ ← μ − α_t (m + δμ)/(1 − β1ᵗ) / √(v/(1 − 0.999ᵗ)),    v ← 0.999 v + 0.001 (ĝ + δμ)²
    σ² = 1/(λ max(h + δ, κ/N)),    h0 = κ/N,    1 − β2 = max(2/(t + 2n₀), min(0.01, B/10N))

A step of the order of SGD's suits one scale of the loss and one kind of network only, and with a fixed h0 the
first draws are noise for a small data set. α_t and κ are those of `VOGN` without a `lr` (`vogn.py`), n₀ is a
twentieth of `steps`, from 10 to 100. ĥ has a variance of about h² N/B for B examples in a batch; of one draw,
it is taken from ĝ less its average so far, which lowers the variance and leaves the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.core.planned_rate import planned_rate
from torchbayes.core.shards import local
from torchbayes.optim.base import check_number
from torchbayes.optim.natural_gradient import (
    Statistics,
    WeightOptimizer,
    add_scaled,
    bounded_draw,
    gaussian_prior,
)
from torchbayes.prior import Prior

__all__ = [
    "IVON", "ivon_average_update", "ivon_draw", "ivon_scaled_step", "ivon_scaled_update", "ivon_step",
    "ivon_update",
]  # fmt: skip

# Without a given rate: its largest value, the decay of squares, and what keeps 0/0 finite.
_RATE, _SQUARES, _TINY = 1e-2, 0.999, 1e-15


def ivon_draw(
    theta: Tensor, mu: Tensor, h: Tensor, eta: Tensor, *, delta: float | Tensor, lam: float
) -> None:
    """Draw θ = μ + η/√(λ(h + δ)); θ may share its memory with η."""
    torch.addcmul(mu, eta, (h + delta).rsqrt_(), value=lam**-0.5, out=theta)


def ivon_update(
    mu: Tensor, m: Tensor, h: Tensor, g: Tensor, theta: Tensor,
    *, alpha: float, beta1: float, beta2: float, t: int, lam: float, delta: float | Tensor,
    h0: float, xi: float, prior_mean: float | Tensor,
) -> None:  # fmt: skip
    """Update μ, m and h in place, from one draw.

    Args:
        mu: Mean μ.
        m: Momentum.
        h: Curvature.
        g: Gradient ĝ at θ.
        theta: Draw θ.
        alpha: Learning rate α.
        beta1: Decay of the momentum.
        beta2: Decay of h.
        t: Number of this update, from 1.
        lam: λ.
        delta: δ, one number or one per entry.
        h0: Initial value of h.
        xi: Clipping radius ξ.
        prior_mean: Mean of the prior, one number or one per entry.
    """
    ivon_average_update(
        mu, m, h, g, (theta - mu).mul_(g), alpha=alpha, beta1=beta1, beta2=beta2, t=t, lam=lam,
        delta=delta, h0=h0, xi=xi, prior_mean=prior_mean,
    )  # fmt: skip


def ivon_average_update(
    mu: Tensor, m: Tensor, h: Tensor, g: Tensor, product: Tensor,
    *, alpha: float, beta1: float, beta2: float, t: int, lam: float, delta: float | Tensor,
    h0: float, xi: float, prior_mean: float | Tensor,
) -> None:  # fmt: skip
    """Like `ivon_update`, from several draws: `product` is ĝ·(θ − μ), averaged over them as ĝ is."""
    u = h + delta
    off = torch.addcmul(h, product, u, value=-lam)  # h − ĥ
    h.add_(off, alpha=beta2 - 1)
    h.addcdiv_(off.mul_(off), u, value=0.5 * (1 - beta2) ** 2)
    ivon_step(
        mu, m, g, h, alpha=alpha, beta1=beta1, t=t, delta=delta, h0=h0, xi=xi, prior_mean=prior_mean
    )


def ivon_step(
    mu: Tensor, m: Tensor, g: Tensor, h: Tensor,
    *, alpha: float, beta1: float, t: int, delta: float | Tensor, h0: float, xi: float,
    prior_mean: float | Tensor,
) -> None:  # fmt: skip
    """Update m and μ in place for the curvature h."""
    debias = 1 - beta1**t
    m.lerp_(g, 1 - beta1)
    step = add_scaled(m.clone(), mu - prior_mean, delta * debias)
    if math.isinf(xi) and isinstance(delta, float):  # the same without clipping, in one operation
        mu.addcdiv_(step, h + delta, value=-alpha * (h0 + delta) / debias)
        return
    step.div_(h + delta).div_(debias).clamp_(-xi, xi)
    mu.sub_(step.mul_(h0 + delta), alpha=alpha)


def ivon_scaled_update(
    mu: Tensor, m: Tensor, h: Tensor, v: Tensor, g: Tensor, product: Tensor,
    *, alpha: float, beta1: float, beta2: float, t: int, lam: float, delta: float | Tensor,
    least: float, prior_mean: float | Tensor,
) -> None:  # fmt: skip
    """Update h as `ivon_average_update` does, with a bound in its noise, and take Adam's step.

    Args:
        mu: Mean μ.
        m: Momentum, of gradients with the prior's pull.
        h: Curvature.
        v: Mean square of the gradients with the prior's pull.
        g: Gradient ĝ.
        product: ĝ·(θ − μ), averaged over draws as ĝ is.
        alpha: Learning rate α_t.
        beta1: Decay of the momentum.
        beta2: Decay of h.
        t: Number of this update, from 1.
        lam: λ.
        delta: δ, one number or one per entry.
        least: Bound κ/N of h + δ in the noise.
        prior_mean: Mean of the prior, one number or one per entry.
    """
    u = (h + delta).clamp_min_(least)
    off = torch.addcmul(h, product, u, value=-lam)  # h − ĥ
    h.add_(off, alpha=beta2 - 1)
    h.addcdiv_(off.mul_(off), u, value=0.5 * (1 - beta2) ** 2)
    ivon_scaled_step(mu, m, v, g, alpha=alpha, beta1=beta1, t=t, delta=delta, prior_mean=prior_mean)


def ivon_scaled_step(
    mu: Tensor, m: Tensor, v: Tensor, g: Tensor,
    *, alpha: float, beta1: float, t: int, delta: float | Tensor, prior_mean: float | Tensor,
) -> None:  # fmt: skip
    """Update m, v and μ in place: Adam's step on the gradient with the prior's pull."""
    pulled = add_scaled(g.clone(), mu - prior_mean, delta)
    m.lerp_(pulled, 1 - beta1)
    v.lerp_(pulled.mul_(pulled), 1 - _SQUARES)
    root = (v / (1 - _SQUARES**t)).sqrt_().add_(_TINY)
    mu.addcdiv_(m, root, value=-alpha / (1 - beta1**t))


def _join(p: Tensor, offset: Tensor, theta: Tensor, mu: Tensor) -> Callable[[Tensor], None]:
    """Return a hook for a gradient g at θ that is about to be added to ĝ, `.grad`."""

    def arrived(g: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            _combine(p.grad, g, offset, theta, mu)

    return arrived


def _combine(old: Tensor | None, g: Tensor, offset: Tensor, theta: Tensor, mu: Tensor) -> None:
    """Set o ← (o·ĝ + (θ − μ)·g)/(ĝ + g), for a gradient g at θ that is added to ĝ."""
    own = theta - mu
    if old is None:
        offset.copy_(own)
        return
    total = old + g
    product = own.mul_(g).addcmul_(offset, old)
    offset.copy_(torch.where(total == 0, 0.0, product / total))


@register(
    "ivon", family="a Gaussian", posterior="Gaussian", target="mean field",
    summary="a Gaussian over every weight, by natural gradients at the cost of Adam",
    paper="Shen et al. 2024, the successor of VOGN",
)  # fmt: skip
class IVON(WeightOptimizer):
    """Improved variational online Newton: a Gaussian over every weight at the cost of Adam.

    Use it like `VOGN`. The loss is the *mean* over the batch. torch's `weight_decay`, and the δ of the
    paper, is `prior / train_size`; the authors' `ess` is `train_size`.

    Args:
        model: The network. Outside `sampled()` it has the mean weights.
        lr: Learning rate α of the paper's step, of the order of SGD's. If None, Adam's step with a rate of
            0.01, smaller for a fan-in above 8, with a rise and then a cosine to 0 over `steps`.
        train_size: Number of training examples.
        steps: Number of updates that are planned, for the rate without `lr`; if None it stays constant.
        prior: Gaussian prior of every weight outside norm layers: the precision p of N(0, 1/p), or a
            `GaussianPrior`, which may have a mean and precision per weight; for continual learning, the last
            task's posterior (`GaussianPrior.from_posterior`).
        temperature: Temperature; below 1 the posterior is sharper than Bayes' rule gives.
        mc_samples: Draws per step.
        betas: Decay of the momentum and of the curvature. If None, 0.9 and 0.9999 for a given `lr`; without
            one, the curvature is an average over as many updates as its noise needs.
        initial_curvature: Initial curvature h0. Too small a value makes the first draws noisy; too large a
            one shortens the steps of weights with little curvature. If None, 0.3 for a given `lr`; without
            one, a standard deviation of 0.17/√(fan-in), which is also the largest that a weight may have.
        clip_radius: Largest step ξ of a weight before it is multiplied by the rate, for a given `lr`.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.
        generator: Source of the noise; its state is saved with the optimiser's.

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

    needs_whole_weights = ""
    sends_early = True

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int,
        steps: int | None = None, prior: Prior | float = 1.0, temperature: float = 1.0,
        mc_samples: int = 1, betas: tuple[float, float] | None = None,
        initial_curvature: float | None = None, clip_radius: float = math.inf,
        params: Params | None = None, generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        scaled, bounded = lr is None, lr is None and initial_curvature is None
        averages = lr is None and betas is None
        lr = _RATE if lr is None else lr
        betas = (0.9, 0.9999) if betas is None else betas
        initial_curvature = 0.3 if initial_curvature is None else initial_curvature
        check_number("lr", lr)
        check_number("temperature", temperature, above=True)
        check_number("betas[0]", betas[0], high=1.0)
        check_number("betas[1]", betas[1], high=1.0)
        check_number("initial_curvature", initial_curvature, above=True)
        check_number("clip_radius", clip_radius, above=True)
        defaults = {
            "lr": lr, "train_size": train_size, "temperature": temperature, "betas": betas,
            "initial_curvature": initial_curvature, "clip_radius": clip_radius, "scaled": scaled,
            "bounded": bounded, "averages": averages, "steps": steps,
        }  # fmt: skip
        super().__init__(
            model, params, defaults, mc_samples=mc_samples, generator=generator,
            prior=gaussian_prior(prior),
        )  # fmt: skip

    def _restart(self) -> None:
        super()._restart()
        # The gradients, and their versions, whose products with the noise are in the workspace already.
        self._products: dict[int, tuple[Tensor, int]] = {}

    @staticmethod
    def _lam(group: dict[str, Any]) -> float:
        return float(group["train_size"] / group["temperature"])

    def _relative(self, group: dict[str, Any], precision: Any) -> Any:
        """Return δ."""
        return precision / self._lam(group)

    def _least(self, group: dict[str, Any], p: Tensor) -> float:
        """Return κ/N of a weight, the bound of h + δ in its noise; 0 without a bound."""
        if not group.get("bounded"):
            return 0.0
        return self._leasts[id(p)] / float(group["train_size"])

    def _curvatures(self, group: dict[str, Any], params: Sequence[Tensor]) -> list[Tensor]:
        fresh = [p for p in params if "curvature" not in self.state[p]]
        found = self._state_of("curvature", params, group["initial_curvature"])
        if group.get("scaled"):
            for p in fresh:
                if group["bounded"]:
                    self.state[p]["curvature"].fill_(self._least(group, p))
                self.state[p]["square"] = torch.zeros_like(p, requires_grad=False)
        return found

    def _create_state(self) -> None:
        for group in self.param_groups:
            self._curvatures(group, group["params"])

    def _perturbable(self, group: dict[str, Any]) -> list[Tensor]:
        return [p for p in group["params"] if id(p) not in self._fixed]

    def _perturb(self, group: dict[str, Any], params: list[Tensor], draws: list[Tensor]) -> None:
        if group.get("bounded"):
            curvatures = self._curvatures(group, params)
            for least, some in self._alike(params, lambda p: self._least(group, p)):
                own = [params[i] for i in some]
                self._workspace.apply(
                    bounded_draw, [[draws[i] for i in some]], [own, [curvatures[i] for i in some]],
                    self.generator, eta_in=0, delta=self._prior_terms(group, own)[0],
                    least=least, n=self._lam(group),
                )  # fmt: skip
            return
        self._workspace.apply(
            ivon_draw, [draws], [params, self._curvatures(group, params)], self.generator, eta_in=0,
            delta=self._prior_terms(group, params)[0], lam=self._lam(group),
        )  # fmt: skip

    def _statistics(self) -> Statistics:
        result = Statistics()
        for p in self._parameters():
            if p.grad is not None and p.requires_grad:
                result.put(("gradient", id(p)), local(p.grad))
                if id(p) not in self._fixed:
                    result.put(("draw", id(p)), local(self._workspace.twin("draw", p)))
        return result

    # Of several draws θ_b with gradients g_b, the update needs Σ g_b and Σ g_b·(θ_b − μ). The second is kept
    # as the offset o of one draw that would have the same product, o·Σ g_b, so that it follows whatever is
    # done to `.grad` afterwards, such as clipping.

    def _before_redraw(self) -> None:
        for group in self.param_groups:
            for p in self._perturbable(group):
                if p.grad is not None:
                    offset, draw = (local(self._workspace.twin(n, p)) for n in ("offset", "draw"))
                    torch.sub(draw, local(p.detach()), out=offset)

    @contextmanager
    def _joining(
        self, chosen: Sequence[tuple[Tensor, Tensor]], means: Sequence[Tensor]
    ) -> Iterator[None]:
        handles, offsets, before = [], [], []
        for (p, draw), mean in zip(chosen, means, strict=True):
            offset = local(self._workspace.twin("offset", p))
            offsets.append(offset)
            if (
                self._sharded
            ):  # FSDP adds to `.grad` without a hook: what was new is found afterwards
                before.append(None if p.grad is None else local(p.grad).clone())
            else:
                handles.append(p.register_hook(_join(p, offset, draw, mean)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        with torch.no_grad():
            for (p, draw), mean, offset, old in zip_longest(chosen, means, offsets, before):
                if p.grad is None:
                    continue
                if self._sharded:
                    new = local(p.grad) if old is None else local(p.grad) - old
                    _combine(old, new, offset, local(draw), mean)
                torch.add(mean, offset, out=local(draw))

    def _early(self, p: Tensor) -> tuple[Statistics, float] | None:
        result = Statistics()
        gradient = p.grad
        assert gradient is not None
        result.put(("gradient", id(p)), gradient)
        mean = self._means.get(id(p))
        if mean is not None and id(p) not in self._fixed:
            product = self._workspace.twin("product", p)
            torch.sub(p.detach(), mean, out=product).mul_(gradient)
            self._products[id(p)] = gradient, gradient._version
            result.put(("product", id(p)), product)
        return result, self._examples + self._block_examples

    def _additive(self, statistics: Statistics) -> Statistics:
        """Replace θ, which is meaningless for other draws, by ĝ·(θ − μ)."""
        result = Statistics()
        for p in self._parameters():
            if statistics.has("gradient", p):
                gradient = statistics.value("gradient", p)
                result.put(("gradient", id(p)), gradient)
                of, version = self._products.get(id(p), (None, 0))
                if of is gradient and version == gradient._version:
                    result.put(("product", id(p)), self._workspace.twin("product", p))
                elif statistics.has("draw", p):
                    offset = statistics.value("draw", p).sub_(local(p.detach()))
                    result.put(("product", id(p)), offset.mul_(gradient))
        return result

    def _update(self, statistics: Statistics) -> None:
        for group in self.param_groups:
            bundles: dict[tuple[Any, ...], list[Tensor]] = {}
            active = [p for p in group["params"] if statistics.has("gradient", p)]
            self._curvatures(group, active)
            for p in active:
                step = self.state[p]["step"] = self.state[p]["step"] + 1
                alike: tuple[Any, ...] = (id(p) in self._fixed, step, p.dtype)
                if group.get("scaled"):
                    alike += (self._leasts[id(p)],)
                bundles.setdefault(alike, []).append(p)
            for (fixed, step, *_), params in bundles.items():
                update = self._scaled_update if group.get("scaled") else self._update_bundle
                update(group, params, fixed, step, statistics)

    def _scaled_update(
        self, group: dict[str, Any], params: list[Tensor], fixed: bool, step: int,
        statistics: Statistics,
    ) -> None:  # fmt: skip
        delta, prior_mean = self._prior_terms(group, params, fixed=fixed)
        share, planned = self._shares[id(params[0])], group["steps"]
        scalars = {
            "alpha": group["lr"] * share * planned_rate(step, planned), "beta1": group["betas"][0],
            "t": step, "delta": delta, "prior_mean": prior_mean,
        }  # fmt: skip
        momenta = [local(self.state[p]["momentum"]) for p in params]
        squares = [self.state[p]["square"] for p in params]
        gradients = [statistics.value("gradient", p) for p in params]
        if fixed:
            self._workspace.apply(
                ivon_scaled_step, [params, momenta, squares], [gradients], **scalars
            )
            return
        if statistics.has("draw", params[0]):
            draws = [statistics.value("draw", p) for p in params]
            products = list(torch._foreach_sub(draws, [local(p.detach()) for p in params]))
            # What was known before the draw has nothing to do with it, and would only add noise to ĥ.
            known = 1 - group["betas"][0] ** (step - 1)
            new = (
                torch._foreach_mul(momenta, -1 / known)
                if known > 0
                else torch._foreach_neg(gradients)
            )
            torch._foreach_add_(new, gradients)
            torch._foreach_mul_(products, new)
        else:
            products = [statistics.value("product", p) for p in params]
        beta2 = group["betas"][1]
        if group["averages"]:
            few = 100 if planned is None else min(100, max(10, planned // 20))
            share_of_data = self._batch_size / self._lam(group)
            beta2 = 1 - max(2 / (step + 2 * few), min(0.01, 0.1 * share_of_data))
        self._workspace.apply(
            ivon_scaled_update,
            [params, momenta, [self.state[p]["curvature"] for p in params], squares],
            [gradients, products], beta2=beta2, lam=self._lam(group),
            least=self._least(group, params[0]), **scalars,
        )  # fmt: skip

    def _update_bundle(
        self, group: dict[str, Any], params: list[Tensor], fixed: bool, step: int,
        statistics: Statistics,
    ) -> None:  # fmt: skip
        delta, prior_mean = self._prior_terms(group, params, fixed=fixed)
        scalars = {
            "alpha": group["lr"], "beta1": group["betas"][0], "t": step, "delta": delta,
            "h0": group["initial_curvature"], "xi": group["clip_radius"], "prior_mean": prior_mean,
        }  # fmt: skip
        momenta = [self.state[p]["momentum"] for p in params]
        curvatures = [self.state[p]["curvature"] for p in params]
        gradients = [statistics.value("gradient", p) for p in params]
        if fixed:
            self._workspace.apply(ivon_step, [params, momenta], [gradients, curvatures], **scalars)
            return
        kind = "draw" if statistics.has("draw", params[0]) else "product"
        self._workspace.apply(
            ivon_update if kind == "draw" else ivon_average_update, [params, momenta, curvatures],
            [gradients, [statistics.value(kind, p) for p in params]], beta2=group["betas"][1],
            lam=self._lam(group), **scalars,
        )  # fmt: skip

    def _spread(self, group: dict[str, Any], p: Tensor) -> tuple[float, Tensor | float]:
        h = self.state[p].get("curvature", group["initial_curvature"])
        u = (local(h) if isinstance(h, Tensor) else h) + self._delta(group, p)
        if group.get("bounded"):
            u = torch.as_tensor(u).clamp_min(self._least(group, p))
        return 1 / self._lam(group), u
