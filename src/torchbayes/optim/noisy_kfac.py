"""Noisy K-FAC: natural-gradient variational inference with a Kronecker-factored covariance per layer.

G. Zhang et al., Noisy Natural Gradient as Variational Inference, ICML 2018, in the form of K. Osawa et al.,
Practical Deep Learning with Bayesian Principles, NeurIPS 2019 (its Table's Noisy K-FAC).

| symbol | argument | update |
| --- | --- | --- |
| A, G | | second moments of a layer's inputs and of its outputs' gradients (`curvature.factors`) |
| β2 | `betas[1]`, the weight of the *new* value | A ← (1 − β2) A + β2 Â, the same for G |
| δ̃ = τδ/N, γ | `prior`, `damping` | A + π√(δ̃ + γ), G + √(δ̃ + γ)/π |
| π | | √((tr A / dim A) / (tr G / dim G)) |
| L_A, L_G | | L = U⁻¹ of the upper Cholesky factors U of the damped A and G: LLᵀ = (UᵀU)⁻¹ |
| τ, N | `temperature`, `train_size` (times `augmentation`) | W = M + √(τ/N) L_G E L_Aᵀ |
| β1 | `betas[0]` | V ← β1 V + ∇W + δ̃M |
| α | `lr` | M ← M − α G⁻¹ V A⁻¹, of the damped factors |

The curvature is the empirical Fisher matrix: the gradients are those of the targets in the batch, not of
labels drawn from the model. Layers are `nn.Linear` and ungrouped convolutions, with their bias as a column
of W; every other weight has VOGN's diagonal update.

The factors are decomposed every `refresh_every` steps, the layers in turns, and at once when tr A · tr G, the
trace of the layer's curvature, has doubled since: early in training it grows manyfold within ten steps, and a
step with the inverse of the smaller one overshoots.

The second moments Â and Ĝ may be gathered less often, at most `statistics_every` steps apart, because for
large layers they cost more than the passes: A and G then stay as they are in between. A layer's gap is one
step at first. It doubles up to `statistics_every` with every gathering, and is one step again after one that
multiplied tr A · tr G by more than (1 + β2)²: if a batch's A and G are twice the averages, the next one's are
looked at, until the averages have followed. No inverse is ever formed: steps and draws are solutions
of triangular systems, which cost as much as products with the inverse, or half as much.

On an accelerator, traces are known one step late, so that no step waits for the device. Every layer is
decomposed in each of the first ten steps there, and then when the trace of the step before has grown by half:
that keeps the bound of two for a growth by a third in a step. A decomposition is in double precision unless
the traces of the step before are half of what single precision allows; one that has failed is an error of the
next step. What follows for the gap is planned in the next step, for the ones after it, whoever looks at the
optimiser in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import solve_triangular

from torchbayes.core.declaration import register
from torchbayes.core.late import Late
from torchbayes.core.noise import normals_
from torchbayes.core.parameters import Params
from torchbayes.core.planned_rate import planned_rate
from torchbayes.curvature import Capture
from torchbayes.optim.natural_gradient import Key, Statistics, add_scaled
from torchbayes.optim.vogn import VOGN
from torchbayes.posterior import Posterior, Weights
from torchbayes.posterior.kronecker import KroneckerGaussian, as_matrix, set_matrix
from torchbayes.prior import Prior

__all__ = ["NoisyKFAC", "damped_roots", "kfac_update"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Without a given rate, the shortest step of a layer as a share of the longest.
_SHORTEST = 0.05
_GROWTH = 2.0  # of tr A · tr G since the last inversion, which triggers the next one at once
# The least damping of a factor in units of its trace's precision, and the largest ratio of trace and damping,
# a bound of the condition number, for which single precision gives the inverse to a few parts in a thousand.
_PRECISION, _SINGLE = 8.0, 2e4
# With traces that are known one step late: the steps in which all are inverted, and the growth afterwards.
_EARLY, _LATE_GROWTH = 10, 1.5


def damped_roots(a: Tensor, g: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return upper Cholesky factors U of A + π√λ and G + √λ/π, UᵀU each, for a damping λ.

    Only the lower triangles of A and G are read. Each factor's share of the damping is at least the factor's
    own precision: what rounding has made of its smallest eigenvalues, also below 0, is then not inverted.
    It is computed in double precision unless the damping bounds the condition number enough for single.

    Raises:
        ValueError: If a factor has values that are not finite, or is not a second moment.
    """
    traces: list[float] = torch.stack(
        [matrix.diagonal().sum(dtype=torch.float64) for matrix in (a, g)]
    ).tolist()
    for matrix, trace in zip((a, g), traces, strict=True):
        _check_trace(matrix, trace)
    roots = []
    for matrix, trace, share in zip((a, g), traces, _shares(a, g, traces, damping), strict=True):
        single = matrix.dtype == torch.float32 and trace < _SINGLE * share
        root, failed = _damped_root(matrix, share, single)
        if int(failed):
            raise _not_a_moment(matrix)
        roots.append(root)
    return roots[0], roots[1]


def _late_roots(
    a: Tensor, g: Tensor, damping: float, before: Sequence[float] | None
) -> tuple[list[Tensor], Tensor]:
    """Return the roots of `damped_roots` without a look at anything, and whether they have failed.

    Args:
        a: A.
        g: G.
        damping: λ.
        before: The traces of A and G a step ago, if they are known: they decide on the precision.
    """
    traces = [matrix.diagonal().sum(dtype=torch.float64) for matrix in (a, g)]
    means = [trace / len(matrix) for trace, matrix in zip(traces, (a, g), strict=True)]
    signal = (means[0] > 0) & (means[1] > 0)
    pi = torch.where(signal, (means[0] / means[1]).sqrt(), 1.0)
    shares = (pi * damping**0.5, damping**0.5 / pi)
    singles = [False, False]
    if before is not None:
        pairs = zip((a, g), before, _shares(a, g, before, damping), strict=True)
        singles = [
            matrix.dtype == torch.float32 and 2 * trace < _SINGLE * share
            for matrix, trace, share in pairs
        ]
    roots, failed = [], torch.zeros((), dtype=torch.bool, device=a.device)
    for matrix, trace, share, single in zip((a, g), traces, shares, singles, strict=True):
        least = _PRECISION * torch.finfo(matrix.dtype).eps * trace
        root, info = _damped_root(matrix, torch.maximum(share, least), single)
        roots.append(root)
        failed = failed | (info != 0)
    return roots, failed


def _shares(a: Tensor, g: Tensor, traces: Sequence[float], damping: float) -> list[float]:
    """Return what is added to the diagonals of A and G."""
    mean_a, mean_g = traces[0] / len(a), traces[1] / len(g)
    # A layer without any signal has no π: share the damping equally.
    pi = math.sqrt(mean_a / mean_g) if mean_a > 0 and mean_g > 0 else 1.0
    return [
        max(share, _PRECISION * torch.finfo(matrix.dtype).eps * trace)
        for matrix, trace, share in (
            (a, traces[0], pi * damping**0.5),
            (g, traces[1], damping**0.5 / pi),
        )
    ]


def _check_trace(matrix: Tensor, trace: float) -> None:
    if not math.isfinite(trace):  # an entry that is not finite has one on the diagonal as well
        raise ValueError(
            f"a Kronecker factor of size {len(matrix)} has values that are not finite: training has "
            "diverged; give the optimiser a smaller lr or a larger damping"
        )


def _least_eigenvalue(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix.double())[0])


def _not_a_moment(matrix: Tensor) -> ValueError:
    values = torch.linalg.eigvalsh(matrix.double())
    return ValueError(
        f"a Kronecker factor of size {len(matrix)} has eigenvalues from {float(values[0]):g} to "
        f"{float(values[-1]):g}: expected a second moment, which has none below 0"
    )


def _damped_root(matrix: Tensor, share: float | Tensor, single: bool) -> tuple[Tensor, Tensor]:
    """Return the upper Cholesky factor with a share of the damping, and what LAPACK says of it."""
    damped = matrix.to(matrix.dtype if single else torch.float64, copy=True)
    damped.diagonal().add_(share)
    root, failed = torch.linalg.cholesky_ex(damped)
    upper: Tensor = root.mT  # LAPACK's memory is that of the transpose
    return upper.to(matrix.dtype).contiguous(), failed


def kfac_update(
    m: Tensor, v: Tensor, gradient: Tensor, a_root: Tensor, g_root: Tensor,
    *, alpha: float | Callable[[Tensor], float | Tensor], beta1: float, delta: float | Tensor,
    prior_mean: Tensor | None = None,
) -> None:  # fmt: skip
    """Apply V ← β1 V + ∇W + δ̃(M − M₀) and M ← M − α G⁻¹ V A⁻¹, in place; α may depend on G⁻¹ V A⁻¹.

    The inverses are given by the roots U of A = UᵀU and of G.
    """
    add_scaled(v.mul_(beta1).add_(gradient), m if prior_mean is None else m - prior_mean, delta)
    step = solve_triangular(a_root, v, upper=True, left=False)
    solve_triangular(a_root.mT, step, upper=False, left=False, out=step)
    solve_triangular(g_root.mT, step, upper=False, out=step)
    solve_triangular(g_root, step, upper=True, out=step)
    rate = alpha(step) if callable(alpha) else alpha
    if isinstance(rate, Tensor):
        m.sub_(step.mul_(rate))
    else:
        m.sub_(step, alpha=rate)


def _parts(matrix: Tensor, layer: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a layer's matrix in the shapes of its weight and, if it has one, its bias."""
    size = layer[0][0].numel()
    weight = matrix[:, :size].reshape(layer[0].shape)
    return [weight] if len(layer) == 1 else [weight, matrix[:, size]]


def _inverse(root: Tensor) -> Tensor:
    """Return U⁻¹ of an upper triangular matrix."""
    identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
    inverse: Tensor = solve_triangular(root, identity, upper=True)
    return inverse


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
            once when the layer's curvature is seen to have doubled.
        statistics_every: Maximum number of steps between batches that are averaged into a layer's factors; 10
            saves much with large layers. The factors then follow changes later; after a batch of much more
            curvature every one counts again.
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
        betas: tuple[float, float] = (0.9, 0.1), refresh_every: int = 10, statistics_every: int = 1,
        augmentation: float = 1.0, momentum_correction: bool = False, params: Params | None = None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        for name, gap in (("refresh_every", refresh_every), ("statistics_every", statistics_every)):
            if gap < 1:
                raise ValueError(f"{name} is {gap}: expected at least 1 step")
        self.refresh_every, self.statistics_every = refresh_every, statistics_every
        super().__init__(
            model, lr, train_size=train_size, steps=steps, prior=prior, temperature=temperature,
            initial_temperature=initial_temperature, temperature_steps=temperature_steps,
            mc_samples=mc_samples, damping=damping, betas=betas, augmentation=augmentation,
            momentum_correction=momentum_correction, params=params, generator=generator,
        )  # fmt: skip

    def _prepare(self) -> None:
        super()._prepare()
        self._layers = self._find_layers()
        # Of the layers that have been updated: traces of their factors, and whether an inversion has failed.
        self._late_traces = Late()
        # Of every layer its traces, whether its decomposition failed, and whether it was gathered.
        self._measured: list[tuple[Tensor, list[Tensor], Tensor | None, bool]] = []
        self._delta_means: dict[
            int, float
        ] = {}  # by the weight's id, of a prior that differs between weights

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
        # Layers take turns, those with the largest factors at different steps, in an order that follows from
        # the network alone.
        cost = {key: layer[0][0].numel() ** 3 + len(layer[0]) ** 3 for key, layer in found.items()}
        order = sorted(found, key=lambda key: -cost[key])
        self._turns = {key: place % self.refresh_every for place, key in enumerate(order)}
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
            if "input_cholesky" in self.state[layer[0]] and all(p.requires_grad for p in layer):
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
            noise = solve_triangular(
                state["input_cholesky"].mT, as_matrix(*own), upper=False, left=False
            )
            solve_triangular(state["output_cholesky"], noise, upper=True, out=noise)
            for p, buffer, part in zip(layer, own, _parts(noise, layer), strict=True):
                torch.add(p.detach(), part, alpha=scale, out=buffer)

    # Updating.

    @contextmanager
    def _watching(self, again: bool, examples: int | None) -> Iterator[None]:
        if self._capture is None:
            self._capture = self._new_capture()
        for key, sums in self._capture.factors.items():
            sums.wanted = self._gathers(self._layers[key][0])
        with super()._watching(again, examples):
            yield

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

    def look(self) -> None:
        """Look at what the last step has left to be looked at: gradients, and traces of factors."""
        try:
            super().look()
        except FloatingPointError:
            self._late_traces.rest()
            raise
        self._read_traces()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state_dict)
        self._late_traces = Late()

    def _update(self, statistics: Statistics) -> None:
        self._read_traces()
        self._measured = []
        super()._update(statistics)
        if self._measured:
            numbers: dict[str, Tensor | float] = {}
            for i, (_, traces, failed, _) in enumerate(self._measured):
                numbers |= {f"{i} inputs": traces[0], f"{i} outputs": traces[1]}
                numbers[f"{i} failed"] = 0.0 if failed is None else failed
            about = [
                (weight, failed is not None, gathered)
                for weight, _, failed, gathered in self._measured
            ]
            self._late_traces.exchange(numbers, about)

    def _read_traces(self) -> None:
        """Note the traces of the last step; raise a `ValueError` if one of its factors was none."""
        numbers, about = self._late_traces.rest() or ({}, [])
        for i, (weight, inverted, gathered) in enumerate(about):
            state = self.state[weight]
            state["traces"] = traces = [numbers[f"{i} inputs"], numbers[f"{i} outputs"]]
            if inverted:
                state["inverted_size"] = traces[0] * traces[1]
            if gathered:  # the next step's gathering has been decided, so it is the one that plans
                state["unplanned_size"] = traces[0] * traces[1]
            factors = [state["inputs"], state["outputs"]]
            for factor, trace in zip(factors, traces, strict=True):
                _check_trace(factor, trace)
            if numbers[f"{i} failed"]:
                raise _not_a_moment(min(factors, key=_least_eigenvalue))

    def _update_group(
        self, group: dict[str, Any], candidates: Sequence[Tensor], statistics: Statistics
    ) -> None:
        inside = self._in_layers()
        super()._update_group(group, [p for p in candidates if id(p) not in inside], statistics)
        layers = [x for x in self._layers_of(candidates) if self._was_used(x[0], statistics)]
        for weight, *_ in self._layers_of(candidates):
            unplanned = self.state[weight].pop("unplanned_size", None)
            if unplanned is not None:
                self._plan_gathering(group, weight, unplanned)
        if not layers:
            return
        for weight, *_ in layers:
            if statistics.has("inputs", weight):
                self._update_factors(group, weight, statistics)
        places = {p.device for p in self._parameters()}
        late = len(places) == 1 and next(iter(places)).type != "cpu"
        sizes = [None] * len(layers) if late else self._sizes(layers)
        for layer, size in zip(layers, sizes, strict=True):
            self._update_layer(group, layer, size, statistics)
            if size is not None and statistics.has("inputs", layer[0]):
                self._plan_gathering(group, layer[0], size)

    def _was_used(self, weight: Tensor, statistics: Statistics) -> bool:
        if self._gathers(weight):
            return statistics.has("inputs", weight)
        return statistics.has("gradient", weight)

    def _gathers(self, weight: Tensor) -> bool:
        """Whether this step gathers a layer's second moments."""
        state = self.state[weight]
        return bool(state.get("step", 0) >= state.get("gather_at", 0))

    def _plan_gathering(self, group: dict[str, Any], weight: Tensor, size: float) -> None:
        """Choose the next step that gathers a layer's second moments, after one that did."""
        if self.statistics_every == 1:
            return
        state = self.state[weight]
        grown = size > (1 + group["betas"][1]) ** 2 * state.get("gathered_size", 0.0)
        gap = 1 if grown else min(2 * state.get("gathering_gap", 1), self.statistics_every)
        state["gathered_size"], state["gathering_gap"] = size, gap
        state["gather_at"] = state["step"] - 1 + gap

    def _update_layer(
        self, group: dict[str, Any], layer: list[Tensor], size: float | None, statistics: Statistics
    ) -> None:
        state, weights = self.state[layer[0]], [p.detach() for p in layer]
        deltas, means = self._prior_terms(group, layer)
        delta = deltas if isinstance(deltas, float) else as_matrix(*deltas)
        gradients = [
            statistics.value("gradient", p)
            if statistics.has("gradient", p)
            else torch.zeros_like(p, requires_grad=False)
            for p in layer
        ]
        matrix = as_matrix(*weights)
        if "momentum" not in state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(matrix)
        curvature = self._damping(group, layer[0])
        curvature += delta if isinstance(delta, float) else self._mean_delta(group, layer, delta)
        if size is None:
            self._refresh_late(layer[0], curvature, statistics.has("inputs", layer[0]))
        else:
            self._refresh(layer[0], size, curvature)
        prior_mean = None if isinstance(means, float) else as_matrix(*means)
        kfac_update(
            matrix, state["momentum"], as_matrix(*gradients),
            state["input_cholesky"], state["output_cholesky"],
            alpha=lambda step: self._layer_rate(group, layer[0], curvature, step),
            beta1=self._beta1(group), delta=delta, prior_mean=prior_mean,
        )  # fmt: skip
        set_matrix(matrix, *weights)
        state["step"] += 1

    def _layer_rate(
        self, group: dict[str, Any], weight: Tensor, damping: float, step: Tensor
    ) -> float | Tensor:
        """Return α for a layer: the given one, or one that keeps the length of its step in bounds."""
        if not group.get("scaled"):
            return float(group["lr"])
        rate = 0.01 * math.sqrt(damping)
        longest = float(group["lr"]) * self._shares[id(weight)]
        planned = planned_rate(self.state[weight]["step"] + 1, group["steps"])
        size = step.square().mean().sqrt()
        if size.device.type != "cpu":  # reading it would wait for the device, once a layer
            there = rate * size
            bounded = there.clamp(_SHORTEST * longest, longest) / there
            return rate * planned * torch.where(there > 0, bounded, 1.0)
        length = rate * float(size)
        if length > 0:
            rate *= min(max(length, _SHORTEST * longest), longest) / length
        return rate * planned

    def _damping(self, group: dict[str, Any], weight: Tensor) -> float:
        """Return γ of a layer."""
        if not group.get("bounded"):
            return float(group["damping"])
        return max(150.0, self._leasts[id(weight)] / 4) / self._n(group)

    def _update_factors(
        self, group: dict[str, Any], weight: Tensor, statistics: Statistics
    ) -> None:
        state, new = self.state[weight], group["betas"][1]
        for name in ("inputs", "outputs"):
            if name not in state:
                state[name] = statistics.value(name, weight).clone()
                continue
            # In place: a new tensor of a large factor's size costs more than the product it is made of.
            share = new * statistics.factor(name, weight)
            state[name].mul_(1 - new).add_(statistics.tensors[name, id(weight)], alpha=share)

    def _sizes(self, layers: Sequence[list[Tensor]]) -> list[float]:
        """Return tr A · tr G of layers, with one wait for the device."""
        traces = [
            [self.state[weight][name].diagonal().sum(dtype=torch.float64) for weight, *_ in layers]
            for name in ("inputs", "outputs")
        ]
        sizes: list[float] = (torch.stack(traces[0]) * torch.stack(traces[1])).tolist()
        return sizes

    def _refresh(self, weight: Tensor, size: float, damping: float) -> None:
        """Invert a layer's factors if it is its turn or if they have grown."""
        state = self.state[weight]
        since = state["step"] - self._turns[id(weight)]
        turn = "input_cholesky" not in state or since % self.refresh_every == 0
        # If the curvature has grown since, its inverses are too large, and so are the steps, which makes it
        # grow further: waiting for the next refresh can ruin a run.
        if not turn and size <= _GROWTH * state["inverted_size"]:
            return
        roots = damped_roots(state["inputs"], state["outputs"], damping)
        state["inverted_size"] = size
        state["input_cholesky"], state["output_cholesky"] = roots

    def _refresh_late(self, weight: Tensor, damping: float, gathered: bool) -> None:
        """Do what `_refresh` does, without a look at sizes that are not known yet.

        Args:
            weight: The layer's.
            damping: γ.
            gathered: Whether this step has gathered second moments.
        """
        state = self.state[weight]
        before = state.get("traces")
        since = state["step"] - self._turns[id(weight)]
        turn = "input_cholesky" not in state or since % self.refresh_every == 0
        early = state["step"] < _EARLY or before is None or "inverted_size" not in state
        factors, failed = (state["inputs"], state["outputs"]), None
        if turn or early or before[0] * before[1] > _LATE_GROWTH * state["inverted_size"]:
            roots, failed = _late_roots(*factors, damping, before)
            state["input_cholesky"], state["output_cholesky"] = roots
        traces = [factor.diagonal().sum(dtype=torch.float64) for factor in factors]
        self._measured.append((weight, traces, failed, gathered))

    def _mean_delta(self, group: dict[str, Any], layer: list[Tensor], delta: Tensor) -> float:
        """Return the mean of a prior's precisions of a layer, which are read once on an accelerator."""
        if delta.device.type == "cpu":
            return float(delta.mean())
        unit = float(self._relative(group, 1.0))
        means = self._delta_means
        if id(layer[0]) not in means:
            means[id(layer[0])] = float(delta.mean()) / unit
        return means[id(layer[0])] * unit

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
                if "output_cholesky" in state:
                    outputs[name] = _inverse(state["output_cholesky"]) * scale
                    inputs[name] = _inverse(state["input_cholesky"])
                    if bias:
                        biases[name] = bias[0]
                    for used in (name, *bias):
                        std.pop(used, None)
        return KroneckerGaussian(mean, outputs, inputs, biases, std, None, **about)
