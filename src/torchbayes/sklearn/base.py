"""What classifier and regressor share: arguments, the default network, training in one or many calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from torchbayes.core.outputs import Output
from torchbayes.likelihood import Likelihood
from torchbayes.models import build_model
from torchbayes.posterior import Samples
from torchbayes.predict.results import Predictive
from torchbayes.train.budget import default_epochs
from torchbayes.train.fit import fit
from torchbayes.train.registry import find_method
from torchbayes.train.run import Run

__all__ = ["ARRAYS", "METHOD", "Array", "BayesianEstimator", "tensor"]

METHOD = "ivon"
"""The default of both estimators."""

OPTIONS = {"prior": 10.0}
"""Options of the default method: tables are small, and a network of 64 × 64 units learns them by heart."""

Array = np.ndarray[Any, Any]

ARRAYS: dict[str, Any] = {"dtype": (np.float64, np.float32), "allow_nd": True}
"""The inputs that `validate_data` accepts: finite numbers, two or more dimensions."""

_HIDDEN = (64, 64)
# A hundred passes over a few hundred rows are too few updates for draws to settle: noise of learned size and
# the posterior's width shrink together, and both end too wide.
_EPOCHS = 100
_SMALLEST_IMAGE = 16  # LeNet-5's two convolutions and pools leave nothing of smaller ones


class _Standardise(nn.Module):
    """Subtract the training inputs' mean and divide by their standard deviation, feature by feature."""

    mean: Tensor
    std: Tensor

    def __init__(self, inputs: Tensor, weights: Tensor | None) -> None:
        super().__init__()
        mean, std = moments(inputs, weights)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


def moments(values: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation, or 1 where it is 0, of examples with weights."""
    if weights is None:
        mean, std = values.mean(0), values.std(0, correction=0)
    else:
        share = (weights / weights.sum()).to(values).reshape(-1, *[1] * (values.dim() - 1))
        mean = (share * values).sum(0)
        std = (share * (values - mean).square()).sum(0).sqrt()
    return mean, torch.where(std > 0, std, torch.ones_like(std))


def default_network(inputs: Tensor, outputs: int, weights: Tensor | None = None) -> nn.Module:
    """Build an estimator's default network for inputs of this shape.

    LeNet-5 for images of at least 16 × 16 pixels, otherwise a ReLU network with two hidden layers of 64;
    both standardise their inputs.
    """
    shape = tuple(inputs.shape[1:])
    image = len(shape) == 3 and min(shape[1:]) >= _SMALLEST_IMAGE
    options: dict[str, Any] = {} if image else {"hidden": _HIDDEN}
    name = "lenet5" if image else "mlp"
    network = build_model(name, input_shape=shape, num_classes=outputs, **options)
    return nn.Sequential(_Standardise(inputs, weights), network.to(inputs.dtype))


class BayesianEstimator(BaseEstimator):  # type: ignore[misc]
    """The base of classifier and regressor."""

    run_: Run
    seed_: int

    def __init__(
        self, model: nn.Module | Callable[[], nn.Module] | None = None, method: str = METHOD, *,
        lr: float | None = None, epochs: int | None = None, batch_size: int = 64, samples: int = 32,
        options: Mapping[str, Any] | None = None, random_state: Any = None, output: Output = None,
        likelihood: Any = None,
    ) -> None:  # fmt: skip
        self.model, self.method, self.lr, self.epochs = model, method, lr, epochs
        self.batch_size, self.samples = batch_size, samples
        self.options, self.random_state, self.output = options, random_state, output
        self.likelihood = likelihood

    def _begin(self) -> None:
        """Forget earlier calls."""
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._seen, self._calls = 0.0, 0

    def _fit(
        self, inputs: Tensor, targets: Tensor, outputs: int, likelihood: Likelihood | None,
        weights: Tensor | None, epochs: int | None = None,
    ) -> None:  # fmt: skip
        """Train a new network, by default for all epochs."""
        model = self.model
        if model is None:

            def model() -> nn.Module:
                return default_network(inputs, outputs, weights)

        # fit trains a copy of a given network: the estimator may be cloned afterwards
        if epochs is None:
            batches = math.ceil(len(inputs) / self.batch_size)
            usual = max(_EPOCHS, default_epochs(batches))
            epochs = usual if self.epochs is None else self.epochs
        self._train(model, inputs, targets, likelihood, weights, epochs=epochs)

    def _fit_more(self, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> None:
        """Train the network of the last call for one more pass, from the weights that it has now."""
        run = self.run_
        start: Any = run.posterior
        if isinstance(start, Samples):
            members = [dict(weights) for weights in start]
            # An ensemble's members go on each for itself, a chain from where it ended.
            start = members if find_method(self.method).starts_apart else members[-1]
        self._train(
            run.model, inputs, targets, run.likelihood, weights,
            epochs=1, init=start, reset=(),
        )  # fmt: skip

    def _train(
        self, model: nn.Module | Callable[[], nn.Module], inputs: Tensor, targets: Tensor,
        likelihood: Likelihood | None, weights: Tensor | None, **how: Any,
    ) -> None:  # fmt: skip
        usual = OPTIONS if self.method == METHOD else {}
        options = dict(usual if self.options is None else self.options)
        if self.lr is not None:
            options["lr"] = self.lr
        # An example of weight 2 is the same as two: their number is the sum of the weights.
        seen = self._seen + (len(inputs) if weights is None else float(weights.sum()))
        if weights is not None:
            weights = weights / weights.mean()
        run = fit(
            model, (self._cast(inputs), targets), self.method, batch_size=self.batch_size,
            likelihood=likelihood, weights=weights, train_size=max(1, round(seen)),
            seed=(self.seed_ + self._calls) % 2**31, progress=False, output=self.output,
            **how, **options,
        )  # fmt: skip
        self._seen, self._calls, self.run_ = seen, self._calls + 1, run

    def _weighted(
        self, X: Array, y: Array, sample_weight: Any, factors: Array | None = None
    ) -> tuple[Array, Array, Tensor | None]:
        """Return the examples with a weight above 0, and their weights if there are any.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: What the user gave.
            factors: Weights of the examples' classes, or None.
        """
        if sample_weight is None and factors is None:
            return X, y, None
        found = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if factors is not None:
            found = found * factors
        kept = found > 0
        if not kept.any():
            raise ValueError("every weight in sample_weight is 0: give some examples one above 0")
        return X[kept], y[kept], torch.from_numpy(found[kept])

    def _cast(self, inputs: Tensor) -> Tensor:
        """Convert inputs to the network's type; the default network has that of the data."""
        if self.model is None:
            fitted = getattr(self, "run_", None)
            # Later calls go to the network that the first has made.
            first = next(fitted.model.parameters(), None) if fitted and self._seen else None
            return inputs if first is None else inputs.to(first.dtype)
        if isinstance(self.model, nn.Module):
            first = next(self.model.parameters(), None)
            return inputs if first is None else inputs.to(first.dtype)
        return inputs.to(torch.get_default_dtype())

    def _predictive(self, X: Any) -> Predictive:
        check_is_fitted(self, "run_")
        inputs = self._cast(tensor(validate_data(self, X, reset=False, **ARRAYS)))
        generator = torch.Generator().manual_seed(self.seed_)
        return self.run_.predict(inputs, self.samples, generator=generator)


def tensor(array: Array) -> Tensor:
    """Return an array as a tensor of its own."""
    # A copy, because torch cannot guarantee that a read-only array stays unchanged.
    return torch.from_numpy(np.array(array, order="C"))
