"""An exact Bayesian last layer for regression: linear regression on the features of a trained network.

C. M. Bishop, Pattern Recognition and Machine Learning, 2006, chapter 3; the evidence is D. MacKay's (Bayesian
Interpolation, 1992).

| symbol | here | from |
| --- | --- | --- |
| Φ, t | the inputs of the last layer with a column of ones for its bias, and the targets | section 3.1 |
| α, β | `prior_precision`, 1/`noise_std`² | Eq. (3.52), (3.8) |
| m_N, S_N | the mean and, for every output, the covariance of `posterior()` | Eq. (3.53), (3.54) |
| N(m_Nᵀφ, 1/β + φᵀS_Nφ) | `predictive(x)` | Eq. (3.58), (3.59) |
| ln p(t ∣ α, β) | `log_evidence` | Eq. (3.86) |
| γ | the number of well-determined weights | Eq. (3.91) |

Several outputs share α and β, so that S_N is that of all of them: a `KroneckerGaussian`. The bias has the
weights' prior. All is computed in float64 from ΦᵀΦ, Φᵀt, tᵀt and N, which are sums over the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchbayes.core.arrays import as_inputs, in_memory, is_array
from torchbayes.core.batch import (
    Inputs,
    batch_len,
    network_dtype,
    slice_batch,
    split_batch,
    suited,
)
from torchbayes.core.last_layer import find_last_layer, weight_names, with_features
from torchbayes.core.private import private_copy
from torchbayes.likelihood import GaussianNoise
from torchbayes.posterior import KroneckerGaussian, snapshot
from torchbayes.posterior.kronecker import set_matrix
from torchbayes.posterior.partial import digest_of_rest
from torchbayes.predict.closed_form import GaussianPredictive
from torchbayes.predict.results import like_predictions

__all__ = ["ExactLastLayer", "Sums", "log_evidence", "maximise_evidence"]

_BATCH = 1024
_ITERATIONS, _TOLERANCE = 10_000, 1e-10
# A residual below this share of the targets' size is rounding: the evidence then has no maximum.
_EXACT = 1e-12


@dataclass
class Sums:
    """What the posterior and the evidence need to know of the data.

    Attributes:
        gram: ΦᵀΦ, of shape (columns, columns).
        cross: Φᵀt, of shape (columns, outputs).
        square: tᵀt, summed over the outputs.
        count: N, the number of examples.
    """

    gram: Tensor
    cross: Tensor
    square: Tensor
    count: int

    def fit(self, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
        """Return m_N = β S_N Φᵀt and S_N⁻¹ = αI + βΦᵀΦ, Eq. (3.53) and (3.54)."""
        precision = beta * self.gram + alpha * torch.eye(len(self.gram)).to(self.gram)
        return beta * torch.linalg.solve(precision, self.cross), precision

    def residual(self, mean: Tensor) -> Tensor:
        """Return ‖t − Φm‖², summed over the outputs."""
        return self.square - 2 * (mean * self.cross).sum() + (mean * (self.gram @ mean)).sum()


def log_evidence(sums: Sums, alpha: float, beta: float) -> float:
    """Return ln p(t ∣ α, β), summed over the outputs: Eq. (3.86)."""
    mean, precision = sums.fit(alpha, beta)
    columns, outputs = sums.cross.shape
    energy = 0.5 * beta * sums.residual(mean) + 0.5 * alpha * mean.square().sum()  # Eq. (3.82)
    each = columns * math.log(alpha) + sums.count * math.log(beta / (2 * math.pi))
    return float(0.5 * outputs * (each - torch.logdet(precision)) - energy)


def maximise_evidence(
    sums: Sums, alpha: float | None = None, beta: float | None = None
) -> tuple[float, float]:
    """Return the α and β of the largest evidence; one that is given is kept.

    The fixed-point equations (3.91), (3.92) and (3.95), in the eigenbasis of ΦᵀΦ.
    """
    eigenvalues, basis = torch.linalg.eigh(sums.gram)
    eigenvalues, cross = eigenvalues.clamp_min(0), basis.t() @ sums.cross
    outputs = sums.cross.shape[1]
    a = 1.0 if alpha is None else alpha
    b = float(sums.count * outputs / sums.square.clamp_min(1e-300)) if beta is None else beta
    for _ in range(_ITERATIONS):
        mean = b * cross / (a + b * eigenvalues).unsqueeze(1)
        gamma = float((b * eigenvalues / (a + b * eigenvalues)).sum()) * outputs
        error = sums.square - 2 * (mean * cross).sum()
        error = float(error + (eigenvalues.unsqueeze(1) * mean.square()).sum())
        if beta is None and error <= _EXACT * float(sums.square):
            raise ValueError(
                f"the features fit the {sums.count} targets exactly, so that no noise level is the most "
                "probable: give noise_std=…, or more data than the last layer has weights"
            )
        before = a, b
        a = gamma / float(mean.square().sum().clamp_min(1e-300)) if alpha is None else alpha
        b = (sums.count * outputs - gamma) / error if beta is None else beta
        if abs(a / before[0] - 1) + abs(b / before[1] - 1) < _TOLERANCE:
            break
    return a, b


class ExactLastLayer:
    """The exact posterior of a trained network's last layer, for real targets with Gaussian noise.

    One pass over the training data; the network is not changed. What is not given, the size of the noise and
    the prior, maximises the evidence.

    Args:
        model: The trained network.
        train_data: A pair of inputs and targets (tensors, arrays or frames), a dictionary with the targets
            among them, a data set, or a loader.
        noise_std: Standard deviation of the noise; the most probable one if None.
        prior: Precision of the last layer's weights and bias; the most probable one if None.
        layer: Name of the linear layer that gives the outputs; the last one of the network if None.

    Attributes:
        layer: Name of the last layer.
        noise_std: Standard deviation of the noise.
        prior_precision: Precision of the prior.
        log_evidence: Log marginal likelihood of the training targets given the features, in nats.
        likelihood: The noise as a likelihood, for `tb.predictive`.

    Example:
        >>> import torch, torchbayes as tb
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 2)
        >>> y = x.sum(1, keepdim=True) + 0.1 * torch.randn(200, 1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        >>> last = tb.variational.ExactLastLayer(model, (x, y))
        >>> p = last.predictive(x)
        >>> bool((p.mean - y).square().mean() < 0.02), p.epistemic.shape
        (True, torch.Size([200, 1]))
        >>> last.posterior()
        KroneckerGaussian(17 weights of Sequential)
    """

    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        *,
        noise_std: float | None = None,
        prior: float | None = None,
        layer: str | None = None,
    ) -> None:
        for name, value in (("noise_std", noise_std), ("prior", prior)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value:g}: expected a number above 0, or None")
        self.layer, self._last = find_last_layer(model, layer)
        self._model = model
        sums = self._sums(train_data)
        beta = None if noise_std is None else noise_std**-2
        alpha, beta = maximise_evidence(sums, prior, beta)
        self.prior_precision, self.noise_std = alpha, beta**-0.5
        self.log_evidence = log_evidence(sums, alpha, beta)
        self.likelihood = GaussianNoise(self.noise_std)
        self._mean, precision = sums.fit(alpha, beta)
        # S_N = L⁻ᵀL⁻¹ for S_N⁻¹ = LLᵀ: a root of the covariance without its inverse.
        lower = torch.linalg.cholesky(precision)
        eye = torch.eye(len(lower)).to(lower)
        self._root = torch.linalg.solve_triangular(lower, eye, upper=False).t().contiguous()

    def _features(self, inputs: Inputs) -> tuple[Tensor, torch.Size]:
        """Return Φ in float64, one row per output position, and the shape of the network's outputs."""
        twin = private_copy(self._model)
        last = twin.get_submodule(self.layer)
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            moved = suited(inputs, last.weight.device, network_dtype(twin))
            features, outputs = with_features(twin, self.layer, last, moved)
        features = features.double()
        if self._last.bias is not None:
            features = F.pad(features, (0, 1), value=1.0)
        return features.flatten(0, -2), outputs.shape

    def _sums(self, data: Any) -> Sums:
        columns = self._last.in_features + (self._last.bias is not None)
        zeros = torch.zeros(columns, columns + self._last.out_features, dtype=torch.float64)
        zeros = zeros.to(self._last.weight.device)
        sums = Sums(zeros[:, :columns], zeros[:, columns:], zeros.new_zeros(()), 0)
        for inputs, targets in _batches(data):
            if targets is None or not targets.is_floating_point():
                kind = "no targets" if targets is None else f"targets of type {targets.dtype}"
                raise ValueError(
                    f"the training data have {kind}: an exact last layer is a regression on real numbers; "
                    "for classes use torchbayes.VBLL"
                )
            phi, shape = self._features(inputs)
            t = like_predictions(targets.to(phi), shape).reshape(len(phi), -1)
            sums.gram += phi.t() @ phi
            sums.cross += phi.t() @ t
            sums.square += t.square().sum()
            sums.count += len(phi)
        if sums.count == 0:
            raise ValueError("the training data have no examples: pass inputs and targets")
        return sums

    def predictive(self, inputs: Inputs) -> GaussianPredictive:
        """Return N(m_Nᵀφ, 1/β + φᵀS_Nφ) for a batch of inputs: Eq. (3.58)."""
        phi, shape = self._features(as_inputs(inputs))
        dtype = self._last.weight.dtype
        mean = (phi @ self._mean).reshape(shape).to(dtype)
        variance = (phi @ self._root).square().sum(1, keepdim=True).expand(-1, shape[-1])
        return GaussianPredictive(
            mean, variance.reshape(shape).to(dtype), self.likelihood.std.detach()
        )

    def posterior(self) -> KroneckerGaussian:
        """Return the posterior of the last layer; the weights before it are not held."""
        names = weight_names(self._model, self._last)
        mean = snapshot(self._model, names)
        set_matrix(self._mean.t(), *(mean[name] for name in names))
        weight = mean[names[0]]
        return KroneckerGaussian(
            mean, {names[0]: torch.eye(len(weight)).to(weight)},
            {names[0]: self._root.to(weight)}, dict([names]) if len(names) == 2 else {},
            model_name=type(self._model).__name__, rest=digest_of_rest(self._model, names),
        )  # fmt: skip


def _batches(data: Any) -> Iterator[tuple[Inputs, Tensor | None]]:
    if hasattr(data, "inputs") and hasattr(data, "targets") and not hasattr(data, "__iter__"):
        data = (data.inputs, data.targets)  # a Split
    given = None if isinstance(data, (Tensor, str)) or is_array(data) else in_memory(data)
    if given is not None:
        inputs, targets, weights = given
        if weights is not None:
            raise ValueError(
                "the training data have weights of the examples, which an exact last layer does not take: "
                "leave them out, or use torchbayes.Laplace of subset='last_layer'"
            )
        for start in range(0, batch_len(inputs), _BATCH):
            stop = start + _BATCH
            yield slice_batch(inputs, start, stop), targets[start:stop]
        return
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, _BATCH)
    if not isinstance(data, Iterable) or isinstance(data, (Tensor, str)) or is_array(data):
        raise TypeError(
            f"cannot take a {type(data).__name__} as training data: pass a pair (inputs, targets), a data "
            "set or a loader"
        )
    for batch in data:
        yield split_batch(batch)
