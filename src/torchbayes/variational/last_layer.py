"""A variational Bayesian last layer: a Gaussian over the last layer's weights, trained without sampling.

J. Harrison, J. Willes and J. Snoek, Variational Bayesian Last Layers, ICLR 2024.

| symbol | here | from |
| --- | --- | --- |
| φ(x; θ) | the input of the last layer; θ are the weights before it | section 2 |
| q(W) = Π_k N(w̄_k, S_k) | `net.posterior()`; w̄ is the layer's own weight and bias | section 3 |
| Σ | `likelihood.std²`, fixed or learned | section 2.1 |
| log N(y ∣ w̄ᵀφ, Σ) − ½ φᵀSφ Σ⁻¹ | `gaussian_bound`: E_q[log p(y ∣ x, W)], exactly | Theorem 1 |
| −s̄ − ½ e^{2v − 2s̄} ((y − w̄ᵀφ)² + φᵀSφ), log std N(s̄, v) | `predicted_noise_bound`, exactly | as Theorem 1 |
| yᵀW̄φ − LSE_k(w̄_kᵀφ + ½ φᵀS_kφ) | `categorical_bound`: a lower bound on it, by Jensen | Theorem 2 |
| KL(q(W) ‖ p(W)), log p(θ) | `net.kl()`, `prior` | section 3.1 |

The loss is −(mean bound) + (KL(q ‖ p) − log p(θ)) / train_size: the paper's objective for full training. With
the weights before the last layer frozen it is the paper's post-training.

S_k = B_k B_kᵀ with B_k = diag(σ_k) [I + strictly lower triangle] (dense), diag(σ_k) [I ∣ A_k] (a diagonal and
a low rank) or diag(σ_k).

Deviations from the paper: the bias is a column of W, with the feature 1; no noise is added to the logits,
which in Theorem 2 only shifts the biases; a learned Σ has no inverse-Wishart prior.
"""

from __future__ import annotations

import math
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.core.autocast import no_autocast
from torchbayes.core.batch import Inputs
from torchbayes.core.declaration import register
from torchbayes.core.last_layer import find_last_layer, weight_names, with_features
from torchbayes.core.names import named_modules
from torchbayes.core.noise import normal_
from torchbayes.core.outputs import Output
from torchbayes.core.parameters import check_types, norm_parameters, trainable
from torchbayes.core.private import private_copy
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood
from torchbayes.likelihood.base import mean_nll
from torchbayes.posterior import RowGaussian, Wrapper, held_names, snapshot
from torchbayes.posterior.kronecker import as_matrix
from torchbayes.posterior.partial import described
from torchbayes.predict.closed_form import GaussianPredictive
from torchbayes.predict.results import Predictive, like_predictions
from torchbayes.prior import GaussianPrior, Prior, as_prior

__all__ = ["VBLL", "categorical_bound", "gaussian_bound", "predicted_noise_bound", "row_kl"]

# Above so many numbers a dense covariance costs more than the rest of a small network, so that it is no
# default; above so many bytes it is refused, because Adam keeps three more tensors of its size.
_DENSE_NUMBERS, _MAX_BYTES = 100_000, 2**30
_RANK = 10
# A low-rank part that started at 0 would stay there: its gradient is 0.
_FACTOR_STD = 0.1


def gaussian_bound(mean: Tensor, variance: Tensor, targets: Tensor, noise_std: Tensor) -> Tensor:
    """Return E[log N(y ∣ z, Σ)] of every example for z ~ N(mean, variance): Theorem 1, exact.

    Args:
        mean: w̄ᵀφ, of shape (examples, outputs).
        variance: φᵀSφ, of the same shape.
        targets: y, of the same shape.
        noise_std: The root of Σ.

    Example:
        >>> zero = torch.zeros(1, 1)
        >>> round(gaussian_bound(zero, zero + 0.5, zero, torch.ones(1)).item(), 4)   # −½ log 2π − ½ · 0.5
        -1.1689
    """
    squares = (targets - mean).square() + variance
    terms = -0.5 * squares / noise_std.square() - noise_std.log() - 0.5 * math.log(2 * math.pi)
    return terms.flatten(1).sum(1)


def predicted_noise_bound(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Return E[log N(y ∣ z, e^{2s})] of every example for independent Gaussian z and s, exactly.

    E[e^{−2s}] = exp(2v − 2s̄) for s ~ N(s̄, v), and the outputs of a layer with independent rows are
    independent.

    Args:
        mean: The means of z, then those of s, of shape (examples, 2 × targets).
        variance: Their variances, of the same shape.
        targets: y, of shape (examples, targets).

    Example:
        >>> zero = torch.zeros(1, 1)
        >>> both = torch.tensor([[0.0, 0.0]])   # without variance: log N(0 ∣ 0, 1)
        >>> round(predicted_noise_bound(both, both, zero).item(), 4)
        -0.9189
    """
    place, log_std = mean.chunk(2, dim=-1)
    variance, spread = variance.chunk(2, dim=-1)
    squares = (targets - place).square() + variance
    terms = -log_std - 0.5 * (2 * (spread - log_std)).exp() * squares - 0.5 * math.log(2 * math.pi)
    return terms.flatten(1).sum(1)


def categorical_bound(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Return a lower bound on E[log softmax(z)_y] of every example for z ~ N(mean, variance): Theorem 2.

    E[log Σ_k exp z_k] ≤ log Σ_k E[exp z_k] (Jensen), and E[exp z_k] = exp(mean_k + ½ variance_k).

    Args:
        mean: W̄φ, of shape (examples, classes).
        variance: φᵀS_kφ, of the same shape.
        targets: The classes y.

    Example:
        >>> zero = torch.zeros(1, 2)
        >>> round(categorical_bound(zero, zero + 1.0, torch.tensor([0])).item(), 4)   # −½ − log 2
        -1.1931
    """
    true = mean.gather(1, targets.unsqueeze(1)).squeeze(1)
    return true - torch.logsumexp(mean + 0.5 * variance, 1)


def row_kl(
    mean: Tensor, variances: Tensor, logdets: Tensor, prior_mean: Tensor, precision: Tensor
) -> Tensor:
    """Return Σ_k KL(N(mean_k, S_k) ‖ N(prior_mean_k, diag(1/precision_k))), in nats.

    Args:
        mean: w̄, of shape (outputs, columns).
        variances: The diagonals of S_k, of the same shape.
        logdets: log det S_k, of shape (outputs,).
        prior_mean: The prior's mean, of the mean's shape.
        precision: The prior's precision, of the mean's shape.
    """
    spread = precision * (variances + (mean - prior_mean).square())
    proper = torch.where(precision > 0, precision, 1.0)  # a precision of 0 is a flat prior
    return 0.5 * ((spread - 1 - proper.log()).sum() - logdets.sum())


@singledispatch
def _bound(likelihood: Likelihood, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    raise TypeError(
        f"a variational last layer has no closed-form bound for {type(likelihood).__name__}: use "
        "torchbayes.Categorical() or torchbayes.GaussianNoise(…), or another method"
    )


@_bound.register
def _(likelihood: Categorical, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    if likelihood.ignore_index is not None or likelihood.class_weight is not None:
        raise TypeError(
            "a variational last layer has no bound for ignored labels and class weights: leave out what has "
            "no label, and give weights of examples in place of class weights"
        )
    if mean.dim() != 2:
        raise ValueError(
            f"the last layer gives outputs of shape {tuple(mean.shape)}: expected (examples, classes), one "
            "label per example"
        )
    return categorical_bound(mean, variance, targets)


@_bound.register
def _(likelihood: GaussianNoise, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    if likelihood.predicted:
        if mean.shape[-1] % 2:
            raise ValueError(
                f"predicted noise needs an even number of outputs, half of them log std, but the last layer "
                f"has {mean.shape[-1]}: give it twice as many outputs as targets"
            )
        shape = torch.Size((*mean.shape[:-1], mean.shape[-1] // 2))
        return predicted_noise_bound(mean, variance, like_predictions(targets, shape).to(mean))
    targets = like_predictions(targets, mean.shape).to(mean)
    return gaussian_bound(mean, variance, targets, likelihood.std.to(mean))


@register(
    "vbll", family="a Gaussian", posterior="RowGaussian", target="posterior",
    summary="a Gaussian over the last layer's weights, trained without sampling",
    paper="Harrison et al. 2024, Variational Bayesian Last Layers",
)  # fmt: skip
class VBLL(Wrapper):
    """Any network with a Gaussian over the weights of its last linear layer, trained on a closed-form bound.

    The layer's own weight and bias are the means, so the network remains usable on its own; `net(x)` are its
    outputs with the mean weights. Train with any torch optimiser over `net.parameters()`:

        loss = net.loss(x, y)

    or on the features of a trained network: freeze the weights before the last layer first.

    Args:
        model: The network, whose weights are shared, not copied.
        likelihood: Meaning of the outputs: `Categorical()`, the default, or `GaussianNoise(…)`. A learned
            noise level is one of `net.parameters()`; of a predicted one the last layer's posterior has the
            log std too.
        train_size: Number of training examples.
        prior: Gaussian prior of all weights, those before the last layer too (norm layers have none): a
            `GaussianPrior`, or the precision δ of N(0, 1/δ).
        rank: Rank of the low-rank part of every output's covariance: 0 for a diagonal one, the number of an
            output's weights or more for a dense one. If None dense where that takes at most 100,000 numbers
            (outputs × features²), and otherwise 10.
        init_std: Initial standard deviation of the last layer's weights; 1/√features, at most 0.1, if None.
        layer: Name of the linear layer that gives the outputs; the last one of the network if None.
        output: Where the outputs are in what the network returns; see `torchbayes.predictive`.

    Attributes:
        layer: Name of the last layer.
        rank: The rank in use.
        dense: Whether the covariances are dense.

    Raises:
        ValueError: If there is no such layer, its weights are tied or frozen, or an argument is not as
            described.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        >>> net = tb.VBLL(model, tb.GaussianNoise(learned=True), train_size=100)
        >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
        >>> net.loss(x, y).backward()
        >>> net.predictive(x).std.shape   # closed form: no draws
        torch.Size([8, 1])
        >>> net.posterior()
        RowGaussian(65 weights of Sequential)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | None = None,
        *,
        train_size: int,
        prior: Prior | float = 1.0,
        rank: int | None = None,
        init_std: float | None = None,
        layer: str | None = None,
        output: Output = None,
    ) -> None:
        check_types(model, trainable(model))
        self.layer, last = find_last_layer(model, layer)
        if not all(p.requires_grad for p in last.parameters()):
            raise ValueError(
                f"the last layer {self.layer!r} is frozen: set requires_grad on its weights, which are the "
                "means of the posterior"
            )
        if train_size < 1:
            raise ValueError(
                f"train_size is {train_size}: expected the number of training examples"
            )
        outputs, columns = last.out_features, last.in_features + (last.bias is not None)
        if init_std is None:
            init_std = min(0.1, 1 / math.sqrt(last.in_features))
        if not (init_std > 0 and math.isfinite(init_std)):
            raise ValueError(f"init_std is {init_std:g}: expected a standard deviation above 0")
        prior = as_prior(prior)
        if not isinstance(prior, GaussianPrior):
            raise TypeError(
                f"prior is a {type(prior).__name__}: a variational last layer has a closed form for a "
                "GaussianPrior, or the precision of one"
            )
        if prior.scalar == 0:
            raise ValueError("prior is 0: without a prior the spread of the weights has no bound")
        self.rank = _rank(rank, outputs, columns, last.weight.element_size())
        self.dense = self.rank == columns
        super().__init__(model)
        self.likelihood = Categorical() if likelihood is None else likelihood
        self.train_size, self.prior, self.output = train_size, prior, output
        self._last = [last]  # in a list, so that it is not a second submodule
        self.log_std = nn.Parameter(last.weight.new_full((outputs, columns), math.log(init_std)))
        if self.rank:
            factor = last.weight.new_zeros(outputs, columns, self.rank)
            if not self.dense:
                normal_(factor, None).mul_(_FACTOR_STD / math.sqrt(self.rank))
            self.factor = nn.Parameter(factor)
        norms = norm_parameters(model)
        split = {n: n.rpartition(".") for n in trainable(model)}
        modules = {name: module for name, _, module in named_modules(model)}
        self._before = [
            (name, modules[path], leaf)
            for name, (path, _, leaf) in split.items()
            if name not in norms and name not in self._names()
        ]

    def _names(self) -> list[str]:
        return weight_names(self.model, self._last[0])

    def _roots(self) -> tuple[Tensor, Tensor | None]:
        """Return σ and, unless the covariance is diagonal, B_k or its low-rank part diag(σ_k) A_k."""
        std = self.log_std.exp()
        if not self.rank:
            return std, None
        if not self.dense:
            return std, std.unsqueeze(2) * self.factor
        eye = torch.eye(self.rank, dtype=std.dtype, device=std.device)
        return std, std.unsqueeze(2) * (eye + self.factor.tril(-1))

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the network with the mean weights."""
        return self.model(*args, **kwargs)

    def moments(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the mean w̄_kᵀφ and the variance φᵀS_kφ of every output under the posterior.

        Args:
            inputs: A batch of the network's inputs.
        """
        return self._moments(inputs, *self._roots())

    def _moments(self, inputs: Inputs, std: Tensor, root: Tensor | None) -> tuple[Tensor, Tensor]:
        features, mean = with_features(self.model, self.layer, self._last[0], inputs, self.output)
        with no_autocast(mean.device):
            features, mean = features.to(std.dtype), mean.to(std.dtype)
            if self._last[0].bias is not None:
                features = F.pad(features, (0, 1), value=1.0)
            parts = [] if self.dense else [features.square() @ std.square().t()]
            if root is not None:
                parts.append(torch.tensordot(features, root, dims=([-1], [1])).square().sum(-1))
            return mean, parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def kl(self) -> Tensor:
        """Return KL(q ‖ prior) of the last layer, in nats."""
        return self._kl(*self._roots())

    def _kl(self, std: Tensor, root: Tensor | None) -> Tensor:
        weights = dict(zip(self._names(), self._last[0].parameters(recurse=False), strict=True))
        moments = [self.prior.moments(n, w.detach()) for n, w in weights.items()]
        means, precisions = (
            as_matrix(*(m[i].expand_as(w) for m, w in zip(moments, weights.values(), strict=True)))
            for i in (0, 1)
        )
        variances, logdets = std.square(), self.log_std.sum(1) * 2
        if root is not None:
            low_rank = root.square().sum(2)
            variances = low_rank if self.dense else variances + low_rank
        if root is not None and not self.dense:  # det(D² + DAAᵀD) = det(D)² det(I + AᵀA)
            eye = torch.eye(self.rank, dtype=std.dtype, device=std.device)
            logdets = logdets + torch.logdet(eye + self.factor.mT @ self.factor)
        return row_kl(as_matrix(*weights.values()), variances, logdets, means, precisions)

    def terms(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss in two parts: −(mean bound) of a batch, and (KL(q ‖ p) − log p(θ)) / train_size.

        Both are in nats per training example; the constant of log p(θ) is left out.

        Args:
            inputs: The network's inputs.
            targets: Their targets.
            weights: A factor of each example's bound, or None.
        """
        std, root = self._roots()
        mean, variance = self._moments(inputs, std, root)
        with no_autocast(mean.device):
            nll = mean_nll(-_bound(self.likelihood, mean, variance, targets), weights)
            total = self._kl(std, root)
        for name, module, leaf in self._before:
            weight = getattr(module, leaf)
            centre, precision = self.prior.moments(name, weight)
            total = total + 0.5 * (precision * (weight - centre).square()).sum()
        return nll, total / self.train_size

    def loss(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return what to minimise, per example: the sum of the two `terms`."""
        nll, regulariser = self.terms(inputs, targets)
        return nll + regulariser

    @torch.no_grad()
    def predictive(
        self, inputs: Inputs, samples: int = 256, generator: torch.Generator | None = None
    ) -> Predictive:
        """Predict with one pass: a regression exactly, classes and predicted noise from draws of the outputs.

        Args:
            inputs: A batch of the network's inputs.
            samples: Draws of the outputs; not used in a regression whose noise is not predicted.
            generator: Source of the draws; torch's global generator if not given.
        """
        mean, variance = private_copy(self).moments(inputs)
        if isinstance(self.likelihood, GaussianNoise) and not self.likelihood.predicted:
            return GaussianPredictive(mean, variance, self.likelihood.std.detach())
        noise = normal_(mean.new_empty(samples, *mean.shape), generator)
        return self.likelihood.predictive(mean + variance.sqrt() * noise)

    @torch.no_grad()
    def posterior(self) -> RowGaussian:
        """Return a copy of the current posterior; all other weights are deterministic in it."""
        names, (std, root) = self._names(), self._roots()
        biases = dict([names]) if len(names) == 2 else {}
        factors = {} if root is None else {names[0]: root}
        parts = (std[:, : self._last[0].in_features], std[:, -1])
        stds = {} if self.dense else dict(zip(names, parts, strict=False))
        held = held_names(self.model, also=names)
        weights, about = snapshot(self.model, held), described(self.model, held)
        return RowGaussian(weights, factors, biases, stds, **about)

    def extra_repr(self) -> str:
        """Summarise the last layer."""
        kind = "dense" if self.dense else f"rank {self.rank}" if self.rank else "diagonal"
        return f"layer {self.layer!r}, {kind} covariance of every output"


def _rank(rank: int | None, outputs: int, columns: int, size: int) -> int:
    """Return the rank in use; as many as `columns` mean a dense covariance."""
    numbers = outputs * columns**2
    if rank is None:
        rank = columns if numbers <= _DENSE_NUMBERS else min(_RANK, columns)
    if rank < 0:
        raise ValueError(
            f"rank is {rank}: expected 0 for a diagonal covariance, or the rank of what is added to it"
        )
    if rank >= columns and numbers * size > _MAX_BYTES:
        raise ValueError(
            f"a dense covariance for each of {outputs:,} outputs of {columns:,} weights has "
            f"{numbers * size / 1e9:.1f} GB: give rank=10, or rank=0 for a diagonal one"
        )
    return min(rank, columns)
