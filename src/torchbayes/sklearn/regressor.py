"""A Bayesian network as a scikit-learn regressor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from torchbayes.likelihood import GaussianNoise, Likelihood, StudentT, as_likelihood
from torchbayes.predict.results import RegressionPredictive
from torchbayes.sklearn.base import ARRAYS, Array, BayesianEstimator, moments, tensor

__all__ = ["BayesianRegressor"]


class BayesianRegressor(RegressorMixin, BayesianEstimator):  # type: ignore[misc]
    """A Bayesian network as a scikit-learn regressor.

    With Gaussian or Student-t noise, targets are standardised for training, so that priors and learning rates
    suit data in any unit. All predictions are in the units of y.

    It takes the arguments of `BayesianClassifier`, without `class_weight`. A `model` has one output per
    target, or two if the noise is predicted. The `likelihood` is by default Gaussian noise of learned size. A
    noise level that is fixed, such as `GaussianNoise(std=3.0)`, is in the units of y; one that is learned
    starts as a share of y's standard deviation. With any other likelihood, such as `Poisson()` or a function,
    y is not standardised.

    Attributes:
        run_: The training run, with its posterior (of the network for standardised targets) and history.

    Example:
        >>> import numpy as np
        >>> from torchbayes import BayesianRegressor
        >>> X = np.linspace(-1, 1, 100)[:, None]
        >>> y = 20 * X[:, 0] ** 2
        >>> net = BayesianRegressor(method="map", lr=0.01, random_state=0).fit(X, y)
        >>> mean, std = net.predict(X, return_std=True)
        >>> mean.shape, std.shape, net.score(X, y) > 0.9
        ((100,), (100,), True)
        >>> low, high = net.predict_interval(X, coverage=0.9)
        >>> bool((low < mean).all()), net.predict_quantiles(X, (0.1, 0.5, 0.9)).shape
        (True, (100, 3))
    """

    _single: bool
    _mean: Tensor
    _scale: Tensor

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianRegressor:
        """Train on inputs (examples, …) and targets (examples,) or (examples, targets).

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How often each example counts, (examples,); once if None.
        """
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, **ARRAYS)
        self._fit_numbers(X, y, sample_weight)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianRegressor:
        """Go through some examples once, from the weights that the posterior has now.

        The first call makes the network and standardises inputs and targets by its examples. The posterior
        after each call is one of as many examples as were seen in all calls.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How often each example counts, (examples,); once if None.
        """
        first = not hasattr(self, "run_")
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, reset=first, **ARRAYS)
        self._fit_numbers(X, y, sample_weight, more=not first, epochs=1)
        return self

    def _fit_numbers(
        self, X: Array, y: Array, sample_weight: Any, more: bool = False, epochs: int | None = None
    ) -> None:
        X, y, weights = self._weighted(X, y, sample_weight)
        inputs, targets = tensor(X), tensor(np.asarray(y, dtype=X.dtype))
        single = targets.dim() == 1
        targets = targets.reshape(len(targets), -1)
        if more:
            if (single, targets.shape[1]) != (self._single, len(self._mean)):
                raise ValueError(
                    f"y has {targets.shape[1]} targets per example, but {len(self._mean)} in the first "
                    "call: give as many"
                )
            standard = self._cast((targets - self._mean) / self._scale)
            self._fit_more(inputs, standard, weights)
            return
        self._begin()
        self._single = single
        self._mean, self._scale = moments(targets, weights)
        likelihood = self._likelihood(targets.shape[1])
        predicted = getattr(likelihood, "predicted", False)
        standard = self._cast((targets - self._mean) / self._scale)
        outputs = targets.shape[1] * (2 if predicted else 1)
        self._fit(inputs, standard, outputs, likelihood, weights, epochs)

    def _likelihood(self, count: int) -> Likelihood:
        """Return the likelihood of standardised targets, and unset the standardisation if it has none."""
        if self.likelihood is None:
            return GaussianNoise(learned=True)
        given = copy.deepcopy(as_likelihood(self.likelihood))
        if not isinstance(given, (GaussianNoise, StudentT)):
            self._mean, self._scale = torch.zeros_like(self._mean), torch.ones_like(self._scale)
        elif not given.learned and not given.predicted:
            # One level for all targets: they need one scale.
            self._scale = self._scale.square().mean().sqrt().expand(count).clone()
            with torch.no_grad():
                given.log_std.sub_(float(self._scale[0].log()))
        return given

    def predictive(self, X: Any) -> RegressionPredictive:
        """Return the prediction in the units of y, its uncertainty decomposed, in torch tensors."""
        result = self._predictive(X)
        if not isinstance(result, RegressionPredictive):
            raise ValueError(
                f"likelihood is {self.likelihood!r}, whose predictions are classes: use BayesianClassifier"
            )
        if bool((self._mean == 0).all() and (self._scale == 1).all()):
            return result
        return result.rescaled(self._mean, self._scale)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predicted mean of every example, and with `return_std` its standard deviation.

        It is the standard deviation of a new observation: noise and uncertainty about the weights combined.
        """
        p = self.predictive(X)
        mean = self._shaped(p.mean)
        return (mean, self._shaped(p.std)) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """Return the lower and the upper ends of central intervals for new observations.

        Args:
            X: Inputs.
            coverage: Probability that an observation is inside, according to the posterior; for a guarantee
                see `torchbayes.posthoc.conformal_intervals`.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage is {coverage:g}: expected between 0 and 1, such as 0.9")
        p = self.predictive(X)
        low, high = (self._shaped(p.quantile(0.5 + side * coverage / 2)) for side in (-1, 1))
        return low, high

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Array:
        """Return quantiles of new observations, (examples, quantiles) or (examples, targets, quantiles).

        Args:
            X: Inputs.
            quantiles: Probabilities with which an observation stays below, strictly between 0 and 1.
        """
        for q in quantiles:
            if not 0 < q < 1:
                raise ValueError(f"quantiles have {q:g}: expected between 0 and 1, such as 0.95")
        p = self.predictive(X)
        return np.stack([self._shaped(p.quantile(float(q))) for q in quantiles], -1)

    def _shaped(self, values: Tensor) -> Array:
        values = values.cpu().reshape(len(values), -1)
        return values[:, 0].numpy() if self._single else values.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
