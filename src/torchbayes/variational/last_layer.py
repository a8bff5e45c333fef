"""A variational Bayesian last layer: a Gaussian over the last layer's weights, trained without sampling.

J. Harrison, J. Willes and J. Snoek, Variational Bayesian Last Layers, ICLR 2024.

| symbol | here | from |
| --- | --- | --- |
| φ(x; θ) | the input of the last layer; θ are the weights before it | section 2 |
| q(W) = Π_k N(w̄_k, S_k) | `net.posterior()`; w̄ is the layer's own weight and bias | section 3 |
| Σ | `likelihood.std²`, fixed or learned | section 2.1 |
| log N(y ∣ w̄ᵀφ, Σ) − ½ φᵀSφ Σ⁻¹ | `gaussian_bound`: E_q[log p(y ∣ x, W)], exactly | Theorem 1 |
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
from torchbayes.core.last_layer import find_last_layer, with_features
from torchbayes.core.noise import normal_
from torchbayes.core.parameters import norm_parameters, trainable
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood
from torchbayes.posterior import RowGaussian, Weights, Wrapper, snapshot
from torchbayes.posterior.kronecker import as_matrix
from torchbayes.predict.closed_form import GaussianPredictive
from torchbayes.predict.results import Predictive, like_predictions
from torchbayes.prior import GaussianPrior, Prior, as_prior

__all__ = ["VBLL", "categorical_bound", "gaussian_bound", "row_kl"]

# A dense covariance of the last layer is refused above this size; Adam keeps three more tensors of it.
_MAX_BYTES = 2**30
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
    if mean.dim() != 2:
        raise ValueError(
            f"the last layer gives outputs of shape {tuple(mean.shape)}: expected (examples, classes), one "
            "label per example"
        )
    return categorical_bound(mean, variance, targets)


@_bound.register
def _(likelihood: GaussianNoise, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    if likelihood.predicted:
        raise TypeError(
            "a variational last layer has no bound for noise that the network predicts: use "
            "GaussianNoise(learned=True) or GaussianNoise(std=…)"
        )
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
            noise level is one of `net.parameters()`.
        train_size: Number of training examples.
        prior: Gaussian prior of all weights, those before the last layer too (norm layers have none): a
            `GaussianPrior`, or the precision δ of N(0, 1/δ).
        rank: Rank of the low-rank part of every output's covariance; 0 for a diagonal one, None for a dense
            one, whose size is outputs × features².
        init_std: Initial standard deviation of the last layer's weights; 1/√features, at most 0.1, if None.
        layer: Name of the linear layer that gives the outputs; the last one of the network if None.

    Attributes:
        layer: Name of the last layer.

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
    ) -> None:
        trainable(model)  # raises if there is nothing to train
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
        width = _width(rank, outputs, columns, last.weight.element_size())
        super().__init__(model)
        self.likelihood = Categorical() if likelihood is None else likelihood
        self.train_size, self.prior, self.rank = train_size, prior, rank
        self._last = [last]  # in a list, so that it is not a second submodule
        self.log_std = nn.Parameter(last.weight.new_full((outputs, columns), math.log(init_std)))
        if width:
            factor = last.weight.new_zeros(outputs, columns, width)
            if rank is not None:
                normal_(factor, None).mul_(_FACTOR_STD / math.sqrt(width))
            self.factor = nn.Parameter(factor)
        norms = norm_parameters(model)
        split = {n: n.rpartition(".") for n in trainable(model)}
        self._before = [
            (name, model.get_submodule(path), leaf)
            for name, (path, _, leaf) in split.items()
            if name not in norms and name not in self._names()
        ]

    def _names(self) -> list[str]:
        prefix = f"{self.layer}." if self.layer else ""
        return [f"{prefix}{leaf}" for leaf, _ in self._last[0].named_parameters(recurse=False)]

    def _root(self, std: Tensor) -> Tensor:
        """Return B_k of a dense covariance, or its low-rank part diag(σ_k) A_k."""
        if self.rank is None:
            eye = torch.eye(std.shape[1], dtype=std.dtype, device=std.device)
            return std.unsqueeze(2) * (eye + self.factor.tril(-1))
        return std.unsqueeze(2) * self.factor

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the network with the mean weights."""
        return self.model(*args, **kwargs)

    def moments(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the mean w̄_kᵀφ and the variance φᵀS_kφ of every output under the posterior.

        Args:
            inputs: A batch of the network's inputs.
        """
        features, mean = with_features(self.model, self.layer, self._last[0], inputs)
        with no_autocast(mean.device):
            features, mean = features.to(self.log_std.dtype), mean.to(self.log_std.dtype)
            if self._last[0].bias is not None:
                features = F.pad(features, (0, 1), value=1.0)
            std = self.log_std.exp()
            if self.rank == 0:
                return mean, features.square() @ std.square().t()
            spread = torch.tensordot(features, self._root(std), dims=([-1], [1]))
            variance = spread.square().sum(-1)
            if self.rank:
                variance = variance + features.square() @ std.square().t()
            return mean, variance

    def kl(self) -> Tensor:
        """Return KL(q ‖ prior) of the last layer, in nats."""
        weights = dict(zip(self._names(), self._last[0].parameters(recurse=False), strict=True))
        moments = [self.prior.moments(n, w.detach()) for n, w in weights.items()]
        means, precisions = (
            as_matrix(*(m[i].expand_as(w) for m, w in zip(moments, weights.values(), strict=True)))
            for i in (0, 1)
        )
        std, logdets = self.log_std.exp(), self.log_std.sum(1) * 2
        squares = std.square() if self.rank == 0 else self._root(std).square().sum(2)
        if self.rank:  # det(D² + DAAᵀD) = det(D)² det(I + AᵀA)
            squares = squares + std.square()
            eye = torch.eye(self.rank, dtype=std.dtype, device=std.device)
            logdets = logdets + torch.logdet(eye + self.factor.mT @ self.factor)
        return row_kl(as_matrix(*weights.values()), squares, logdets, means, precisions)

    def bound(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the batch's mean lower bound on E_q[log p(y ∣ x, W)], in nats per example."""
        mean, variance = self.moments(inputs)
        with no_autocast(mean.device):
            return _bound(self.likelihood, mean, variance, targets).mean()

    def regulariser(self) -> Tensor:
        """Return (KL(q ‖ p) − log p(θ)) / train_size."""
        before: Weights = {name: getattr(module, leaf) for name, module, leaf in self._before}
        penalty = self.prior.log_prob(before).to(self.log_std)
        return (self.kl() - penalty) / self.train_size

    def loss(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return −`bound(inputs, targets)` + `regulariser()`: what to minimise, per example."""
        return -self.bound(inputs, targets) + self.regulariser()

    @torch.no_grad()
    def predictive(
        self, inputs: Inputs, samples: int = 256, generator: torch.Generator | None = None
    ) -> Predictive:
        """Predict with one pass through the network: a regression exactly, classes from draws of the logits.

        Args:
            inputs: A batch of the network's inputs.
            samples: Draws of the logits; not used in a regression.
            generator: Source of the draws; torch's global generator if not given.
        """
        training = self.training
        try:
            mean, variance = self.eval().moments(inputs)
        finally:
            self.train(training)
        if isinstance(self.likelihood, GaussianNoise):
            return GaussianPredictive(mean, variance, self.likelihood.std.detach())
        noise = normal_(mean.new_empty(samples, *mean.shape), generator)
        return self.likelihood.predictive(mean + variance.sqrt() * noise)

    @torch.no_grad()
    def posterior(self) -> RowGaussian:
        """Return a copy of the current posterior; all other weights are deterministic in it."""
        names, std = self._names(), self.log_std.exp()
        biases = dict([names]) if len(names) == 2 else {}
        factors = {} if self.rank == 0 else {names[0]: self._root(std)}
        parts = (std[:, : self._last[0].in_features], std[:, -1])
        stds = {} if self.rank is None else dict(zip(names, parts, strict=False))
        return RowGaussian(
            snapshot(self.model), factors, biases, stds, model_name=type(self.model).__name__
        )

    def extra_repr(self) -> str:
        """Summarise the last layer."""
        kind = {None: "dense", 0: "diagonal"}.get(self.rank, f"rank {self.rank}")
        return f"layer {self.layer!r}, {kind} covariance of every output"


def _width(rank: int | None, outputs: int, columns: int, size: int) -> int:
    """Return the columns of every output's factor, or raise if they are too many."""
    if rank is None:
        needed = outputs * columns**2 * size
        if needed > _MAX_BYTES:
            raise ValueError(
                f"a dense covariance for each of {outputs:,} outputs of {columns:,} weights has "
                f"{needed / 1e9:.1f} GB: give rank=10, or rank=0 for a diagonal one"
            )
        return columns
    if not 0 <= rank < columns:
        raise ValueError(
            f"rank is {rank}: expected 0 for a diagonal covariance, a number below the {columns} weights of "
            "an output, or None for a dense one"
        )
    return rank
