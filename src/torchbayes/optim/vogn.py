"""VOGN: variational online Gauss-Newton.

K. Osawa et al., Practical Deep Learning with Bayesian Principles, NeurIPS 2019, Algorithm 1.

| symbol | argument | where |
| --- | --- | --- |
| α | `lr` | line 19 |
| β1, β2 | `betas`; β2 is the weight of the *new* value | lines 17, 18 |
| δ | `prior`; δ̃ = τδ/N | line 2 |
| γ | `damping` | lines 9, 19 |
| τ | `temperature` | lines 2, 9 |
| K | `mc_samples` | line 7 |
| ρ | `augmentation` | line 2 |
| N | `train_size` (times ρ) | line 2 |
| s | `state[p]["precision"]` | line 18 |
| m | `state[p]["momentum"]` | line 17 |

Deviations from the paper: τ is not in the average of line 18 but in the noise, σ² = τ/(N(s + δ̃ + γ)), as in
the authors' code, because the fixed point of line 18 as printed is not the tempered posterior, whose
precision is N h/τ + δ (the two agree at τ = 1). The squares of convolutions' biases and of norm layers are
exact, unlike the bounds in the authors' code. As there, scales and shifts of norm layers have no noise and
no prior.

Without a `lr` the step of line 19 is another one with the same fixed point, and without a `damping` the noise
of line 9 has a bound:

    μ ← μ − α_t clip[(1 − β1)/(1 − β1ᵗ) m / √(s/B), ±3],    σ² = τ/(N max(s + δ̃, κ/N))

With B examples in a batch, √(s/B) is the standard error of its mean gradient, so that no weight moves by more
than 3 α_t in a step whatever the scale of the loss, as with Adam; line 19's step is that of a Newton method
in some weights and of plain gradient descent in others (where s is below γ: in most networks, nearly all).
α_t is 0.01 times √(8/f), at most 1, for a fan-in f, times a rise over the first twentieth of `steps` and
half a cosine to 0 at their end. κ is 34 f: with more noise a unit of unit inputs is noisier than 0.17, and a
mean field with so much noise in all the weights that the data do not determine keeps a deep network from
learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params
from torchbayes.core.planned_rate import planned_rate
from torchbayes.optim.base import check_number, check_train_size
from torchbayes.optim.natural_gradient import (
    Statistics,
    WeightOptimizer,
    add_scaled,
    bounded_draw,
    gaussian_prior,
)
from torchbayes.prior import Prior

__all__ = ["VOGN", "vogn_draw", "vogn_scaled_update", "vogn_update"]

# Without a given rate: its largest value, the longest step in units of it, and what keeps 0/0 finite.
_RATE, _LONGEST, _TINY = 1e-2, 3.0, 1e-30


def vogn_draw(
    theta: Tensor, mu: Tensor, s: Tensor, eta: Tensor,
    *, delta: float | Tensor, gamma: float, tau: float, n: float,
) -> None:  # fmt: skip
    """Draw θ = μ + ησ with σ² = τ/(n(s + δ̃ + γ)) (lines 8 and 9); θ may share its memory with η."""
    root = _denominator(s, delta, gamma).rsqrt_()
    torch.addcmul(mu, eta, root, value=(tau / n) ** 0.5, out=theta)


def vogn_update(
    mu: Tensor, m: Tensor, s: Tensor, g: Tensor, h: Tensor,
    *, alpha: float, beta1: float, beta2: float, delta: float | Tensor, gamma: float,
    prior_mean: float | Tensor, h_factor: float,
) -> None:  # fmt: skip
    """Apply lines 17 to 19, in place in μ, m and s.

    Args:
        mu: Mean μ.
        m: Momentum.
        s: Scaled precision.
        g: Mean gradient ĝ.
        h: Mean ĥ of squared per-example gradients, up to `h_factor`.
        alpha: Learning rate.
        beta1: Decay of the momentum.
        beta2: Weight of ĥ in s.
        delta: δ̃, one number or one per entry.
        gamma: Damping.
        prior_mean: Mean of the prior, one number or one per entry.
        h_factor: Factor to multiply `h` by.
    """
    torch.add(g, m, alpha=beta1, out=m)
    add_scaled(m, mu - prior_mean, delta)  # line 17: m ← β1 m + ĝ + δ̃μ
    s.mul_(1 - beta2).add_(h, alpha=beta2 * h_factor)  # line 18: s ← (1 − β2) s + β2 ĥ
    mu.addcdiv_(m, _denominator(s, delta, gamma), value=-alpha)  # line 19: μ ← μ − α m/(s + δ̃ + γ)


def vogn_scaled_update(
    mu: Tensor, m: Tensor, s: Tensor, g: Tensor, h: Tensor,
    *, alpha: float, beta1: float, beta2: float, delta: float | Tensor, debias: float, batch: float,
    prior_mean: float | Tensor, h_factor: float,
) -> None:  # fmt: skip
    """Apply lines 17 and 18, and the step in units of the gradient's standard error, in place in μ, m and s.

    Args:
        mu: Mean μ.
        m: Momentum.
        s: Scaled precision.
        g: Mean gradient ĝ.
        h: Mean ĥ of squared per-example gradients, up to `h_factor`.
        alpha: Learning rate α_t.
        beta1: Decay of the momentum.
        beta2: Weight of ĥ in s.
        delta: δ̃, one number or one per entry.
        debias: (1 − β1)/(1 − β1ᵗ).
        batch: Examples B of the batch.
        prior_mean: Mean of the prior, one number or one per entry.
        h_factor: Factor to multiply `h` by.
    """
    torch.add(g, m, alpha=beta1, out=m)
    add_scaled(m, mu - prior_mean, delta)
    s.mul_(1 - beta2).add_(h, alpha=beta2 * h_factor)
    error = (s / batch).add_(_TINY).rsqrt_()
    mu.sub_(error.mul_(m).mul_(debias).clamp_(-_LONGEST, _LONGEST), alpha=alpha)


def _denominator(s: Tensor, delta: float | Tensor, gamma: float) -> Tensor:
    """Return the sum s + δ̃ + γ."""
    return s + (delta + gamma) if isinstance(delta, float) else (s + delta).add_(gamma)


@register(
    "vogn", family="a Gaussian", posterior="Gaussian", target="mean field",
    summary="a Gaussian over every weight, by natural gradients from per-example squares",
    paper="Osawa et al. 2019",
)  # fmt: skip
class VOGN(WeightOptimizer):
    """Variational online Gauss-Newton: a Gaussian over every weight, trained at about the cost of Adam.

    Replace the optimiser line of a training loop and pass `step` a closure; the rest stays the same:

        optimizer = tb.VOGN(model, train_size=len(train_set), steps=len(loader) * epochs)
        for x, y in loader:
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)
        posterior = optimizer.posterior()

    The loss is the *mean* over the batch. A `lr` that is given has the units of a Newton step, as in the
    paper: because the momentum has no factor 1 − β1, the effective rate is lr/(1 − β1). Without one, steps
    are bounded and in units of the gradient's standard error, which suits any network and any scale of the
    loss; see the module's docstring. torch's `weight_decay` corresponds to `prior / train_size`.

    Args:
        model: The network. Outside `sampled()` it has the mean weights.
        lr: Learning rate α of the paper's step. If None, steps of 0.01 times the gradient in units of its
            standard error, shorter for a fan-in above 8, with a rise and then a cosine to 0 over `steps`.
        train_size: Number N of training examples.
        steps: Number of updates that are planned, for the rate without `lr`; if None it stays constant.
        prior: Gaussian prior of every weight outside norm layers: the precision δ of N(0, 1/δ), or a
            `GaussianPrior`, which may have a mean and precision per weight; for continual learning, the last
            task's posterior (`GaussianPrior.from_posterior`).
        temperature: Temperature τ; below 1 the posterior is sharper than Bayes' rule gives.
        initial_temperature: Temperature τ of the first step; a tenth of `temperature` if None.
        temperature_steps: Number of steps over which τ changes linearly to `temperature`; if None, one epoch
            (estimated from the first batch); 0 for no warm-up.
        mc_samples: Draws K per step.
        damping: Damping γ, added to the precision: it keeps steps and noise finite where the data say
            nothing. If None, 150/(ρ·`train_size`) for a given `lr`; without one there is no damping, but a
            weight's standard deviation is at most 0.17/√(fan-in). In the
            paper's settings Nγ ranges from 50 (LeNet-5) to 640 (ImageNet).
        betas: Decay β1 of the momentum and weight β2 of the *new* curvature.
        initial_precision: Initial value of s. If None, the first step is taken at the mean, without noise,
            and sets s to that batch's curvature.
        augmentation: Factor ρ by which data augmentation enlarges the training set.
        momentum_correction: When a scheduler lowers the rate, scale the momentum by the same factor once, so
            that old gradients do not outweigh new ones.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.
        generator: Source of the noise; its state is saved with the optimiser's.

    Example:
        >>> import torch, torchbayes as tb
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 640).unsqueeze(1)
        >>> y = 2 * x + torch.randn(640, 1)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = tb.VOGN(model, lr=0.02, train_size=640, generator=torch.Generator().manual_seed(0))
        >>> for _ in range(200):
        ...     with optimizer.sampled():
        ...         optimizer.zero_grad()
        ...         (0.5 * (model(x) - y) ** 2).mean().backward()
        ...     optimizer.step()
        >>> bool((model.weight - 2).abs() < 0.2)
        True
        >>> sorted(optimizer.posterior().std())
        ['bias', 'weight']
    """

    watches_examples = True
    sends_early = True
    needs_whole_weights = "the gradient of every example is needed for whole weights"
    scales_steps = True  # without a given rate

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int,
        steps: int | None = None, prior: Prior | float = 1.0, temperature: float = 1.0,
        initial_temperature: float | None = None, temperature_steps: int | None = None,
        mc_samples: int = 1, damping: float | None = None, betas: tuple[float, float] = (0.9, 0.1),
        initial_precision: float | None = None, augmentation: float = 1.0,
        momentum_correction: bool = False, params: Params | None = None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        belief = gaussian_prior(prior)
        check_number("temperature", temperature, above=True)
        check_number("augmentation", augmentation, above=True)
        examples = augmentation * check_train_size(train_size)
        scaled = lr is None and self.scales_steps
        bounded = scaled and damping is None
        if damping is None:
            damping = 0.0 if scaled else 150.0 / examples
        check_number("damping", damping)
        delta = 1.0 if belief.scalar is None else belief.scalar
        if lr is None:
            lr = _RATE if scaled else 0.01 * math.sqrt(damping + delta / examples)
        check_number("lr", lr)
        start = temperature / 10 if initial_temperature is None else initial_temperature
        check_number("initial_temperature", start, above=True)
        if temperature_steps is not None:
            check_number("temperature_steps", temperature_steps)
        check_number("betas[0]", betas[0], high=1.0)
        check_number("betas[1]", betas[1], above=True, high=1.0)
        if initial_precision is not None:
            check_number("initial_precision", initial_precision)
        if belief.scalar == 0 and damping == 0 and not bounded:
            raise ValueError(
                "prior and damping are both 0, so a weight without curvature would have infinite variance: "
                "give one of them a value above 0"
            )
        defaults = {
            "lr": lr, "train_size": train_size, "temperature": temperature,
            "initial_temperature": start, "temperature_steps": temperature_steps,
            "damping": damping, "betas": betas, "initial_precision": initial_precision,
            "augmentation": augmentation, "momentum_correction": momentum_correction,
            "last_lr": None, "scaled": scaled, "bounded": bounded, "steps": steps,
        }  # fmt: skip
        super().__init__(
            model, params, defaults, mc_samples=mc_samples, generator=generator, prior=belief
        )

    # The scalars of Algorithm 1 from a group's options.

    def _tau(self, group: dict[str, Any]) -> float:
        start, steps = group["initial_temperature"], group["temperature_steps"]
        if steps is None:  # no step has been taken yet
            return float(start)
        if steps == 0:
            return float(group["temperature"])
        taken = max((self.state[p].get("step", 0) for p in group["params"]), default=0)
        return float(start + (group["temperature"] - start) * min(1.0, taken / steps))

    def _n(self, group: dict[str, Any]) -> float:
        return float(group["augmentation"] * group["train_size"])

    def _relative(self, group: dict[str, Any], precision: Any) -> Any:
        """Return δ̃ = τδ/N."""
        tau, n = self._tau(group), self._n(group)
        return tau / n * precision if isinstance(precision, Tensor) else precision * tau / n

    def _beta1(self, group: dict[str, Any]) -> float:
        last = group["last_lr"]
        if not group["momentum_correction"] or last is None or not group["lr"] < last:
            return float(group["betas"][0])
        return float(group["betas"][0] * group["lr"] / last)

    # Drawing.

    def _perturbable(self, group: dict[str, Any]) -> list[Tensor]:
        known = group["initial_precision"] is not None
        return [
            p for p in group["params"]
            if id(p) not in self._fixed and (known or "precision" in self.state[p])
        ]  # fmt: skip

    def _perturb(self, group: dict[str, Any], params: list[Tensor], draws: list[Tensor]) -> None:
        precisions = self._state_of("precision", params, group["initial_precision"] or 0.0)
        if group.get("bounded"):
            for least, some in self._alike(params, lambda p: self._least(group, p)):
                self._workspace.apply(
                    bounded_draw, [[draws[i] for i in some]],
                    [[params[i] for i in some], [precisions[i] for i in some]],
                    self.generator, eta_in=0, least=least, n=self._n(group) / self._tau(group),
                    delta=self._prior_terms(group, [params[i] for i in some])[0],
                )  # fmt: skip
            return
        self._workspace.apply(
            vogn_draw, [draws], [params, precisions], self.generator, eta_in=0,
            delta=self._prior_terms(group, params)[0], gamma=group["damping"],
            tau=self._tau(group), n=self._n(group),
        )  # fmt: skip

    # Updating.

    def _statistics(self) -> Statistics:
        assert self._capture is not None
        result = Statistics()
        # A GradScaler used inside the block has unscaled the gradients but not their squares.
        scale = 1.0 if self._scaler_seen is None else self._scaler_seen
        factor = self._capture.effective_examples * scale**2
        for p in self._parameters():
            if p.grad is None or not p.requires_grad:
                continue
            result.put(("gradient", id(p)), p.grad)
            squares = self._capture.sum_of_squares(p)
            if squares is not None:
                result.put(("square", id(p)), squares, factor)
        return result

    def _early(self, p: Tensor) -> tuple[Statistics, float] | None:
        assert self._capture is not None
        under_way = self._capture.under_way
        if under_way is None:
            return None
        count, effective = under_way
        result = Statistics()
        assert p.grad is not None
        result.put(("gradient", id(p)), p.grad)
        squares = self._capture.sum_of_squares(p) if self._capture.settled(p) else None
        if squares is not None:
            result.put(("square", id(p)), squares, effective)
        return result, count

    def _update(self, statistics: Statistics) -> None:
        for group in self.param_groups:
            self._update_group(group, group["params"], statistics)
            group["last_lr"] = float(group["lr"])
            if group["temperature_steps"] is None:
                group["temperature_steps"] = math.ceil(group["train_size"] / self._batch_size)

    def _update_group(
        self, group: dict[str, Any], candidates: Sequence[Tensor], statistics: Statistics
    ) -> None:
        """Update those of the given parameters of a group that have gradients."""
        bundles: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in candidates:
            if statistics.has("gradient", p):
                first = "precision" not in self.state[p] and group["initial_precision"] is None
                alike: tuple[Any, ...] = (id(p) in self._fixed, first, p.dtype)
                if group.get("scaled"):
                    alike += (self._shares[id(p)], self.state[p].get("step", 0))
                bundles.setdefault(alike, []).append(p)
        for (fixed, first, *_), params in bundles.items():
            self._update_bundle(group, params, fixed, first, statistics)

    def _update_bundle(
        self, group: dict[str, Any], params: list[Tensor], fixed: bool, first: bool,
        statistics: Statistics,
    ) -> None:  # fmt: skip
        precisions = self._state_of("precision", params, group["initial_precision"] or 0.0)
        # A weight with a gradient but not used on data, such as one in a penalty only, has no curvature.
        squares = [
            statistics.tensors["square", id(p)]
            if statistics.has("square", p)
            else torch.zeros_like(p, requires_grad=False)
            for p in params
        ]
        known = (statistics.factor("square", p) for p in params if statistics.has("square", p))
        factor = next(known, 1.0)  # the same for all, because they come from the same examples
        delta, prior_mean = self._prior_terms(group, params, fixed=fixed)
        if group.get("scaled"):
            step, (beta1, beta2) = self.state[params[0]]["step"] + 1, group["betas"]
            share = self._shares[id(params[0])]
            self._workspace.apply(
                vogn_scaled_update,
                [params, [self.state[p]["momentum"] for p in params], precisions],
                [[statistics.value("gradient", p) for p in params], squares],
                alpha=group["lr"] * share * planned_rate(step, group["steps"]), beta1=beta1,
                beta2=1.0 if first else max(beta2, 1 / (step + 1)), delta=delta,
                debias=(1 - beta1) / (1 - beta1**step), batch=self._batch_size,
                prior_mean=prior_mean, h_factor=factor,
            )  # fmt: skip
            for p in params:
                self.state[p]["step"] = step
            return
        self._workspace.apply(
            vogn_update,
            [params, [self.state[p]["momentum"] for p in params], precisions],
            [[statistics.value("gradient", p) for p in params], squares],
            alpha=group["lr"], beta1=self._beta1(group),
            beta2=1.0 if first else group["betas"][1],  # without a start, s is the first ĥ
            delta=delta, gamma=group["damping"], prior_mean=prior_mean, h_factor=factor,
        )  # fmt: skip
        for p in params:
            self.state[p]["step"] += 1

    def _spread(self, group: dict[str, Any], p: Tensor) -> tuple[float, Tensor | float]:
        s = self.state[p].get("precision", group["initial_precision"] or 0.0)
        u = s + self._delta(group, p) + group["damping"]
        if group.get("bounded"):
            u = torch.as_tensor(u).clamp_min(self._least(group, p))
        return self._tau(group) / self._n(group), u

    def _least(self, group: dict[str, Any], p: Tensor) -> float:
        """Return κ/N of a weight: the bound of s + δ̃ in its noise."""
        return self._leasts[id(p)] / self._n(group)
