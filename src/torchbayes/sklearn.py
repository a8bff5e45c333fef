"""scikit-learn estimators: any method by name, any network, NumPy in and out.

They fit into pipelines, `cross_val_score` and `GridSearchCV`, and can be cloned and pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from torchbayes.core.outputs import Output
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood
from torchbayes.models import build_model
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import ClassPredictive, RegressionPredictive
from torchbayes.train.fit import fit
from torchbayes.train.run import Run

__all__ = ["BayesianClassifier", "BayesianRegressor"]

# The inputs that `validate_data` accepts: finite numbers, two or more dimensions.
_ARRAYS: dict[str, Any] = {"dtype": (np.float64, np.float32), "allow_nd": True}
_HIDDEN = (64, 64)
_SMALLEST_IMAGE = 16  # LeNet-5's two convolutions and pools leave nothing of smaller ones


class _Standardise(nn.Module):
    """Subtract the training inputs' mean and divide by their standard deviation, feature by feature."""

    mean: Tensor
    std: Tensor

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        std = inputs.std(0, correction=0)
        self.register_buffer("mean", inputs.mean(0))
        self.register_buffer("std", torch.where(std > 0, std, torch.ones_like(std)))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


def default_network(inputs: Tensor, outputs: int) -> nn.Module:
    """Build an estimator's default network for inputs of this shape.

    LeNet-5 for images of at least 16 × 16 pixels, otherwise a ReLU network with two hidden layers of 64;
    both standardise their inputs.
    """
    shape = tuple(inputs.shape[1:])
    image = len(shape) == 3 and min(shape[1:]) >= _SMALLEST_IMAGE
    options: dict[str, Any] = {} if image else {"hidden": _HIDDEN}
    name = "lenet5" if image else "mlp"
    network = build_model(name, input_shape=shape, num_classes=outputs, **options)
    return nn.Sequential(_Standardise(inputs), network.to(inputs.dtype))


class _BayesianEstimator(BaseEstimator):  # type: ignore[misc]
    """The base of classifier and regressor."""

    run_: Run
    seed_: int

    def __init__(
        self, model: nn.Module | Callable[[], nn.Module] | None = None, method: str = "ensemble", *,
        lr: float | None = None, epochs: int = 100, batch_size: int = 64, samples: int = 32,
        options: Mapping[str, Any] | None = None, random_state: Any = None, output: Output = None,
    ) -> None:  # fmt: skip
        self.model, self.method, self.lr, self.epochs = model, method, lr, epochs
        self.batch_size, self.samples = batch_size, samples
        self.options, self.random_state, self.output = options, random_state, output

    def _fit(
        self, inputs: Tensor, targets: Tensor, outputs: int, likelihood: Likelihood | None
    ) -> None:
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        options = dict(self.options) if self.options is not None else {}
        if self.lr is not None:
            options["lr"] = self.lr
        self.run_ = fit(
            self._network(inputs, outputs), (self._cast(inputs), targets), self.method,
            epochs=self.epochs, batch_size=self.batch_size, likelihood=likelihood, seed=self.seed_,
            progress=False, output=self.output, **options,
        )  # fmt: skip

    def _network(self, inputs: Tensor, outputs: int) -> nn.Module | Callable[[], nn.Module]:
        if self.model is None:
            return lambda: default_network(inputs, outputs)
        return self.model  # fit trains a copy: the estimator may be cloned afterwards

    def _cast(self, inputs: Tensor) -> Tensor:
        """Convert inputs to the network's type; the default network has that of the data."""
        if self.model is None:
            return inputs
        if isinstance(self.model, nn.Module):
            first = next(self.model.parameters(), None)
            return inputs if first is None else inputs.to(first.dtype)
        return inputs.to(torch.get_default_dtype())

    def _predictive(self, X: Any) -> Any:
        check_is_fitted(self, "run_")
        inputs = self._cast(_tensor(validate_data(self, X, reset=False, **_ARRAYS)))
        generator = torch.Generator().manual_seed(self.seed_)
        return self.run_.predict(inputs, self.samples, generator=generator)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    # A copy, because torch cannot guarantee that a read-only array stays unchanged.
    return torch.from_numpy(np.array(array, order="C"))


class BayesianClassifier(ClassifierMixin, _BayesianEstimator):  # type: ignore[misc]
    """A Bayesian network as a scikit-learn classifier.

    Args:
        model: The network, with one output per class (two classes may have one), or a function that builds
            one; by default LeNet-5 for images of at least 16 × 16 pixels and a ReLU network with two hidden
            layers of 64 for other data, both on standardised inputs.
        method: Name of a method in `torchbayes.METHODS`.
        lr: Learning rate; the method's own default if None.
        epochs: Number of passes over the training set.
        batch_size: Examples per update.
        samples: Number of draws for predictions.
        options: Other options of the method.
        random_state: A seed, a NumPy generator, or None for a new seed at every fit.
        output: Where the tensor of the likelihood is in what the model returns; see `torchbayes.fit`.

    Attributes:
        classes_: The labels, in the order of `predict_proba`'s columns.
        run_: The training run, with its posterior and history.

    Example:
        >>> from sklearn.datasets import make_moons
        >>> from torchbayes import BayesianClassifier
        >>> X, y = make_moons(200, noise=0.1, random_state=0)
        >>> net = BayesianClassifier(method="map", lr=0.01, random_state=0).fit(X, y)
        >>> net.predict_proba(X).shape, net.score(X, y) > 0.95
        ((200, 2), True)
    """

    classes_: np.ndarray[Any, Any]

    def fit(self, X: Any, y: Any) -> BayesianClassifier:
        """Train on inputs (examples, …) and labels (examples,)."""
        X, y = validate_data(self, X, y, **_ARRAYS)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has 1 class, {self.classes_[0]!r}: a classifier needs examples of at least 2"
            )
        # Two classes may have one logit: `fit` finds out from the network's outputs.
        likelihood = None if len(self.classes_) == 2 and self.model is not None else Categorical()
        self._fit(_tensor(X), torch.from_numpy(numbers).long(), len(self.classes_), likelihood)
        return self

    def predictive(self, X: Any) -> ClassPredictive:
        """Return the prediction with its uncertainty decomposed, in torch tensors."""
        result = self._predictive(X)
        if isinstance(result, BinaryPredictive):
            result = result.as_classes()
        assert isinstance(result, ClassPredictive)
        return result

    def predict_proba(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the probabilities (examples, classes), averaged over the posterior."""
        return self.predictive(X).probs.cpu().numpy()

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """Return the most probable label of every example."""
        numbers = self.predictive(X).prediction.cpu().numpy()
        labels: np.ndarray[Any, Any] = self.classes_[numbers]
        return labels


class BayesianRegressor(RegressorMixin, _BayesianEstimator):  # type: ignore[misc]
    """A Bayesian network as a scikit-learn regressor, with Gaussian noise of learned size.

    Targets are standardised for training and predictions converted back, so that priors and learning rates
    suit data in any unit.

    It takes the arguments of `BayesianClassifier`; a `model` has one output per target.

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
    """

    def fit(self, X: Any, y: Any) -> BayesianRegressor:
        """Train on inputs (examples, …) and targets (examples,) or (examples, targets)."""
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, **_ARRAYS)
        inputs, targets = _tensor(X), _tensor(np.asarray(y, dtype=X.dtype))
        self._single = targets.dim() == 1
        targets = targets.reshape(len(targets), -1)
        scale = targets.std(0, correction=0)
        self._mean, self._scale = targets.mean(0), torch.where(scale > 0, scale, 1.0).to(scale)
        standard = self._cast((targets - self._mean) / self._scale)
        self._fit(inputs, standard, targets.shape[1], GaussianNoise(learned=True))
        return self

    def predictive(self, X: Any) -> RegressionPredictive:
        """Return the prediction for standardised targets, its uncertainty decomposed, in torch tensors."""
        result = self._predictive(X)
        assert isinstance(result, RegressionPredictive)
        return result

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predicted mean of every example, and with `return_std` its standard deviation.

        It is the standard deviation of a new observation: noise and uncertainty about the weights combined.
        """
        p = self.predictive(X)
        mean = self._shaped(p.mean.cpu() * self._scale + self._mean)
        return (mean, self._shaped(p.std.cpu() * self._scale)) if return_std else mean

    def _shaped(self, values: Tensor) -> np.ndarray[Any, Any]:
        return values[:, 0].numpy() if self._single else values.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
