"""Noisy K-FAC: natural-gradient variational inference with a Kronecker-factored covariance per layer.

G. Zhang et al., Noisy Natural Gradient as Variational Inference, ICML 2018, in the form of K. Osawa et al.,
Practical Deep Learning with Bayesian Principles, NeurIPS 2019 (its Table's Noisy K-FAC).

| symbol | argument | update |
| --- | --- | --- |
| A, G | | second moments of a layer's inputs and of its outputs' gradients (`curvature.factors`) |
| β2 | `betas[1]`, the weight of the *new* value | A ← (1 − β2) A + β2 Â, the same for G |
| δ̃ = τδ/N, γ | `prior`, `damping` | A + π√(δ̃ + γ), G + √(δ̃ + γ)/π |
| π | | √((tr A / dim A) / (tr G / dim G)) |
| L_A, L_G | | lower Cholesky factors of the inverses of the damped A and G |
| τ, N | `temperature`, `train_size` (times `augmentation`) | W = M + √(τ/N) L_G E L_Aᵀ |
| β1 | `betas[0]` | V ← β1 V + ∇W + δ̃M |
| α | `lr` | M ← M − α G⁻¹ V A⁻¹, of the damped factors |

The curvature is the empirical Fisher matrix: the gradients are those of the targets in the batch, not of
labels drawn from the model. Layers are `nn.Linear` and ungrouped convolutions, with their bias as a column
of W; every other weight has VOGN's diagonal update.

The factors are inverted every `refresh_every` steps, and at once when tr A · tr G, the trace of the layer's
curvature, has doubled since: early in training it grows manyfold within ten steps, and a step with the
inverse of the smaller one overshoots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.declaration import register
from torchbayes.core.noise import normals_
from torchbayes.core.parameters import Params
from torchbayes.curvature import Capture
from torchbayes.optim.natural_gradient import Key, Statistics, planned_rate
from torchbayes.optim.vogn import VOGN
from torchbayes.posterior import Posterior, Weights
from torchbayes.posterior.kronecker import KroneckerGaussian, as_matrix, set_matrix
from torchbayes.prior import Prior

__all__ = ["NoisyKFAC", "damped_inverses", "kfac_update"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Without a given rate, the shortest step of a layer as a share of the longest.
_SHORTEST = 0.05
_GROWTH = 2.0  # of tr A · tr G since the last inversion, which triggers the next one at once


def damped_inverses(a: Tensor, g: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return (A + π√λ)⁻¹ and (G + √λ/π)⁻¹ for a damping λ, computed in double precision.

    Where rounding has made a factor's smallest eigenvalues more negative than the damping is positive,
    eigenvalues below the factor's own precision are raised to that precision.

    Raises:
        ValueError: If a factor has values that are not finite, or is not a second moment.
    """
    for matrix in (a, g):
        if not bool(matrix.isfinite().all()):
            raise ValueError(
                f"a Kronecker factor of size {len(matrix)} has values that are not finite: training has "
                "diverged; give the optimiser a smaller lr or a larger damping"
            )
    inverses = []
    mean_a, mean_g = a.diagonal().mean().double(), g.diagonal().mean().double()
    # A layer without any signal has no π: share the damping equally.
    usable = bool(mean_a > 0) and bool(mean_g > 0)
    pi = float((mean_a / mean_g).sqrt()) if usable else 1.0
    for matrix, amount in ((a, pi * damping**0.5), (g, damping**0.5 / pi)):
        damped = matrix.to(torch.float64, copy=True)
        damped.diagonal().add_(amount)
        root, failed = torch.linalg.cholesky_ex(damped)
        inverse = _clamped_inverse(matrix, amount) if int(failed) else torch.cholesky_inverse(root)
        inverses.append(inverse)
    return inverses[0], inverses[1]


def _clamped_inverse(matrix: Tensor, amount: float) -> Tensor:
    """Return (M + amount)⁻¹ of a second moment M that rounding has made indefinite."""
    values, vectors = torch.linalg.eigh(matrix.double())
    largest = float(values[-1])
    # Far more than the rounding error of a sum in the factor's type, far less than a mistake would give.
    if not largest > 0 or float(values[0]) < -1e3 * torch.finfo(matrix.dtype).eps * largest:
        raise ValueError(
            f"a Kronecker factor of size {len(matrix)} has eigenvalues from {float(values[0]):g} to "
            f"{largest:g}: expected a second moment, which has none below 0"
        )
    least = torch.finfo(matrix.dtype).eps * largest
    inverse: Tensor = (vectors / (values + amount).clamp_min(least)) @ vectors.t()
    return inverse


def kfac_update(
    m: Tensor, v: Tensor, gradient: Tensor, a_inverse: Tensor, g_inverse: Tensor,
    *, alpha: float | Callable[[Tensor], float], beta1: float, delta: float | Tensor,
    prior_mean: Tensor | None = None,
) -> None:  # fmt: skip
    """Apply V ← β1 V + ∇W + δ̃(M − M₀) and M ← M − α G⁻¹ V A⁻¹, in place; α may depend on G⁻¹ V A⁻¹."""
    off = m if prior_mean is None else m - prior_mean
    v.mul_(beta1).add_(gradient).add_(off * delta)
    step = g_inverse @ v @ a_inverse
    m.sub_(step, alpha=alpha(step) if callable(alpha) else alpha)


@register(
    "noisy-kfac", family="a Gaussian", posterior="KroneckerGaussian", target="posterior",
    summary="a Gaussian over each layer's weight matrix, by natural gradients",
    paper="Zhang et al. 2018; the baseline of the VOGN paper",
)  # fmt: skip
class NoisyKFAC(VOGN):
    """Noisy K-FAC: a matrix Gaussian over every layer's weights.

    Use it like `VOGN`; the result includes the correlations between the weights of a layer.

    Args:
        model: The network. Outside `sampled()` it has the mean weights.
        lr: Learning rate α. If None, 0.01·√(γ + δ/`train_size`), where a step's root mean square is held
            between 0.0005 and 0.01, times √(8/f), at most 1, for a fan-in f, with a rise and then a cosine to
            0 over `steps`; weights outside such layers have the steps of `VOGN`.
        train_size: Number N of training examples.
        steps: Number of updates that are planned, for the rate without `lr`; if None it stays constant.
        prior: Gaussian prior, as for `VOGN`. If the precision differs between weights, its mean over a layer
            damps that layer's factors.
        temperature: Temperature τ; below 1 the posterior is sharper than Bayes' rule gives.
        initial_temperature: Temperature τ of the first step; a tenth of `temperature` if None.
        temperature_steps: Number of steps over which τ changes linearly to `temperature`; if None, one epoch
            (estimated from the first batch); 0 for no warm-up.
        mc_samples: Draws per step.
        damping: Damping γ, added to the curvature. If None, 150/(ρ·`train_size`) for a given `lr`; without
            one, 8.5 f/`train_size` for a fan-in f, at least 150/`train_size`: a bound of the noise.
        betas: Decay β1 of the momentum and weight β2 of the *new* factors.
        refresh_every: Maximum number of steps between inversions of a layer's factors; they are inverted at
            once when the layer's curvature has doubled.
        augmentation: Factor ρ by which data augmentation enlarges the training set.
        momentum_correction: When a scheduler lowers the rate, scale the momentum by the same factor.
        params: What to train: names or patterns of weights (`"head.*"`), modules, parameters or parameter
            groups; all trainable weights if None.
        generator: Source of the noise; its state is saved with the optimiser's.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> optimizer = tb.NoisyKFAC(model, train_size=100)
        >>> for _ in range(2):
        ...     with optimizer.sampled():
        ...         optimizer.zero_grad()
        ...         model(torch.randn(32, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.posterior()
        KroneckerGaussian(49 weights of Sequential)
    """

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, train_size: int,
        steps: int | None = None, prior: Prior | float = 1.0, temperature: float = 1.0,
        initial_temperature: float | None = None, temperature_steps: int | None = None,
        mc_samples: int = 1, damping: float | None = None,
        betas: tuple[float, float] = (0.9, 0.1), refresh_every: int = 10, augmentation: float = 1.0,
        momentum_correction: bool = False, params: Params | None = None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        if refresh_every < 1:
            raise ValueError(f"refresh_every is {refresh_every}: expected at least 1 step")
        self.refresh_every = refresh_every
        super().__init__(
            model, lr, train_size=train_size, steps=steps, prior=prior, temperature=temperature,
            initial_temperature=initial_temperature, temperature_steps=temperature_steps,
            mc_samples=mc_samples, damping=damping, betas=betas, augmentation=augmentation,
            momentum_correction=momentum_correction, params=params, generator=generator,
        )  # fmt: skip

    def _prepare(self) -> None:
        super()._prepare()
        self._layers = self._find_layers()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add more of the model's parameters."""
        super().add_param_group(param_group)
        self._layers = self._find_layers()

    def _find_layers(self) -> dict[int, list[Tensor]]:
        """Return weight and bias, if any, of each layer with Kronecker factors, by the weight's id."""
        groups = getattr(self, "param_groups", [])  # torch creates them after `_prepare`
        place = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        modules = self.model.modules()
        owners = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
        found: dict[int, list[Tensor]] = {}
        for module in self.model.modules():
            if not isinstance(module, _LAYERS) or getattr(module, "groups", 1) != 1:
                continue
            weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
            if weight is None or not weight.requires_grad or id(weight) not in place:
                continue
            if owners[id(weight)] > 1:
                continue  # tied to another layer: the diagonal is exact for it, the factors are not
            found[id(weight)] = [weight]
            joint = bias is not None and bias.requires_grad and owners[id(bias)] == 1
            if joint and bias is not None and place.get(id(bias)) == place[id(weight)]:
                found[id(weight)].append(bias)
        return found

    def _new_capture(self) -> Capture:
        self._layers = self._find_layers()
        factors = {
            self._names[key]: self._names[id(layer[1])] if len(layer) > 1 else None
            for key, layer in self._layers.items()
        }
        parameters = {self._names[id(p)]: p for p in self._parameters()}
        return Capture(self.model, parameters, factors)

    def _in_layers(self) -> set[int]:
        return {id(p) for layer in self._layers.values() for p in layer}

    def _layers_of(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        return [self._layers[id(p)] for p in params if id(p) in self._layers]

    # Drawing.

    def _perturbable(self, group: dict[str, Any]) -> list[Tensor]:
        inside = self._in_layers()
        alone = [p for p in super()._perturbable(group) if id(p) not in inside]
        for layer in self._layers_of(group["params"]):
            if "inputs" in self.state[layer[0]] and all(p.requires_grad for p in layer):
                alone += layer
        return alone

    def _perturb(self, group: dict[str, Any], params: list[Tensor], draws: list[Tensor]) -> None:
        buffers = {id(p): draw for p, draw in zip(params, draws, strict=True)}
        inside = self._in_layers()
        alone = [p for p in params if id(p) not in inside]
        if alone:
            super()._perturb(group, alone, [buffers[id(p)] for p in alone])
        normals_([buffers[id(p)] for p in params if id(p) in inside], self.generator)
        scale = (self._tau(group) / self._n(group)) ** 0.5
        for layer in self._layers_of(params):
            own, state = [buffers[id(p)] for p in layer], self.state[layer[0]]
            noise = state["output_root"] @ as_matrix(*own) @ state["input_root"].t()
            set_matrix(as_matrix(*(p.detach() for p in layer)).add_(noise, alpha=scale), *own)

    # Updating.

    def _statistics(self) -> Statistics:
        assert self._capture is not None
        result = super()._statistics()
        scale = 1.0 if self._scaler_seen is None else self._scaler_seen
        examples, factor = self._capture.examples, self._capture.effective_examples * scale**2
        for key, sums in self._capture.factors.items():
            if sums.rows > 0 and sums.inputs is not None and sums.outputs is not None:
                result.put(("inputs", key), sums.inputs, 1 / examples)
                result.put(("outputs", key), sums.outputs, factor * sums.examples / sums.rows)
        return result

    def _shapes(self) -> dict[Key, Tensor]:
        inside = self._in_layers()
        shapes = {
            k: p for k, p in super()._shapes().items() if k[0] == "gradient" or k[1] not in inside
        }
        for key, (weight, *bias) in self._layers.items():
            columns = weight[0].numel() + len(bias)
            shapes[("inputs", key)] = weight.new_empty(columns, columns)
            shapes[("outputs", key)] = weight.new_empty(len(weight), len(weight))
        return shapes

    def _update_group(
        self, group: dict[str, Any], candidates: Sequence[Tensor], statistics: Statistics
    ) -> None:
        inside = self._in_layers()
        super()._update_group(group, [p for p in candidates if id(p) not in inside], statistics)
        for layer in self._layers_of(candidates):
            if statistics.has("inputs", layer[0]):
                self._update_layer(group, layer, statistics)

    def _update_layer(
        self, group: dict[str, Any], layer: list[Tensor], statistics: Statistics
    ) -> None:
        state, weights = self.state[layer[0]], [p.detach() for p in layer]
        deltas, means = self._prior_terms(group, layer)
        if isinstance(deltas, float):
            deltas = [torch.full_like(p, deltas) for p in weights]
        delta = as_matrix(*deltas)
        self._update_factors(group, layer[0], delta, statistics)
        gradients = [
            statistics.value("gradient", p)
            if statistics.has("gradient", p)
            else torch.zeros_like(p, requires_grad=False)
            for p in layer
        ]
        matrix = as_matrix(*weights)
        prior_mean = None if isinstance(means, float) else as_matrix(*means)
        kfac_update(
            matrix, state["momentum"], as_matrix(*gradients),
            state["input_inverse"], state["output_inverse"],
            alpha=lambda step: self._layer_rate(group, layer[0], delta, step),
            beta1=self._beta1(group), delta=delta, prior_mean=prior_mean,
        )  # fmt: skip
        set_matrix(matrix, *weights)
        state["step"] += 1

    def _layer_rate(
        self, group: dict[str, Any], weight: Tensor, delta: Tensor, step: Tensor
    ) -> float:
        """Return α for a layer: the given one, or one that keeps the length of its step in bounds."""
        if not group.get("scaled"):
            return float(group["lr"])
        rate = 0.01 * math.sqrt(self._damping(group, weight) + float(delta.mean()))
        length = rate * float(step.square().mean().sqrt())
        longest = float(group["lr"]) * self._shares[id(weight)]
        if length > 0:
            rate *= min(max(length, _SHORTEST * longest), longest) / length
        return rate * planned_rate(self.state[weight]["step"] + 1, group["steps"])

    def _damping(self, group: dict[str, Any], weight: Tensor) -> float:
        """Return γ of a layer."""
        if not group.get("bounded"):
            return float(group["damping"])
        return max(150.0, self._leasts[id(weight)] / 4) / self._n(group)

    def _update_factors(
        self, group: dict[str, Any], weight: Tensor, delta: Tensor, statistics: Statistics
    ) -> None:
        state = self.state[weight]
        first = "inputs" not in state
        for name in ("inputs", "outputs"):
            new = statistics.value(name, weight)
            if first:
                state[name] = new.clone()
            else:
                state[name].lerp_(new, group["betas"][1])
        if first:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(delta)
        # If the curvature has grown since, its inverses are too large, and so are the steps, which makes it
        # grow further: waiting for the next refresh can ruin a run.
        traces = [state[name].diagonal().sum(dtype=torch.float64) for name in ("inputs", "outputs")]
        size = float(traces[0] * traces[1])
        if state["step"] % self.refresh_every and size <= _GROWTH * state.get("inverted_size", 0.0):
            return
        state["inverted_size"] = size
        damping = float(delta.mean()) + self._damping(group, weight)
        inverses = damped_inverses(state["inputs"], state["outputs"], damping)
        for name, inverse in zip(("input", "output"), inverses, strict=True):
            state[f"{name}_inverse"] = inverse.to(weight.dtype).contiguous()
            if self.random:
                root = torch.linalg.cholesky(inverse)
                state[f"{name}_root"] = root.to(weight.dtype).contiguous()

    @torch.no_grad()
    def posterior(self) -> Posterior:
        """Return a matrix Gaussian for every layer and independent Gaussians for other weights."""
        if not self.random:
            return super().posterior()
        mean, about = self._mean_weights()
        std = self._std()  # the prior's for a layer that has not been used yet
        outputs: Weights = {}
        inputs: Weights = {}
        biases: dict[str, str] = {}
        for group in self.param_groups:
            scale = (self._tau(group) / self._n(group)) ** 0.5
            for layer in self._layers_of(group["params"]):
                state, (name, *bias) = self.state[layer[0]], [self._names[id(p)] for p in layer]
                if "output_root" in state:
                    outputs[name] = state["output_root"] * scale
                    inputs[name] = state["input_root"].clone()
                    if bias:
                        biases[name] = bias[0]
                    for used in (name, *bias):
                        std.pop(used, None)
        return KroneckerGaussian(mean, outputs, inputs, biases, std, None, **about)
