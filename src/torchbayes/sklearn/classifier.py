"""A Bayesian network as a scikit-learn classifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets
from sklearn.utils.validation import validate_data
from torch import nn

from torchbayes.core.outputs import Output
from torchbayes.likelihood import Bernoulli, Categorical, Likelihood, as_likelihood
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.results import ClassPredictive
from torchbayes.sklearn.base import ARRAYS, METHOD, Array, BayesianEstimator, tensor

__all__ = ["BayesianClassifier"]


class BayesianClassifier(ClassifierMixin, BayesianEstimator):  # type: ignore[misc]
    """A Bayesian network as a scikit-learn classifier.

    Args:
        model: The network, with one output per class (two classes may have one), or a function that builds
            one; by default LeNet-5 for images of at least 16 × 16 pixels and a ReLU network with two hidden
            layers of 64 for other data, both on standardised inputs.
        method: Name of a method in `torchbayes.METHODS`.
        lr: Learning rate; the method's own default if None.
        epochs: Number of passes over the training set; 100 if None, or as many as 2,000 updates take.
        batch_size: Examples per update.
        samples: Number of draws for predictions.
        options: Other options of the method; if None, `{"prior": 10.0}` for the default method.
        random_state: A seed, a NumPy generator, or None for a new seed at every fit.
        output: Where the tensor of the likelihood is in what the model returns; see `torchbayes.fit`.
        likelihood: Meaning of the outputs; by default classes, or one logit for two of them.
        class_weight: Weight of each class, by its label, or `"balanced"` for weights by which all classes
            count the same; they multiply those of the examples.

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

    classes_: Array

    def __init__(
        self, model: nn.Module | Callable[[], nn.Module] | None = None, method: str = METHOD, *,
        lr: float | None = None, epochs: int | None = None, batch_size: int = 64, samples: int = 32,
        options: Mapping[str, Any] | None = None, random_state: Any = None, output: Output = None,
        likelihood: Any = None, class_weight: Mapping[Any, float] | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, method, lr=lr, epochs=epochs, batch_size=batch_size, samples=samples,
            options=options, random_state=random_state, output=output, likelihood=likelihood,
        )  # fmt: skip
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianClassifier:
        """Train on inputs (examples, …) and labels (examples,).

        Args:
            X: Inputs.
            y: Labels.
            sample_weight: How often each example counts, (examples,); once if None.
        """
        X, y = validate_data(self, X, y, **ARRAYS)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has 1 class, {self.classes_[0]!r}: a classifier needs examples of at least 2"
            )
        self._fit_classes(X, y, sample_weight)
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> BayesianClassifier:
        """Go through some examples once, from the weights that the posterior has now.

        The first call makes the network and standardises inputs by its examples. The posterior after each
        call is one of as many examples as were seen in all calls.

        Args:
            X: Inputs.
            y: Labels.
            classes: All labels that there will be; needed in the first call.
            sample_weight: How often each example counts, (examples,); once if None.
        """
        first = not hasattr(self, "run_")
        X, y = validate_data(self, X, y, reset=first, **ARRAYS)
        check_classification_targets(y)
        _check_partial_fit_first_call(self, classes)
        strange = np.setdiff1d(y, self.classes_)
        if len(strange):
            raise ValueError(
                f"y has the class {strange[0]!r}, which is not among the classes of the first call, "
                f"{self.classes_.tolist()}: name all of them there"
            )
        self._fit_classes(X, y, sample_weight, more=not first, epochs=1)
        return self

    def _fit_classes(
        self, X: Array, y: Array, sample_weight: Any, more: bool = False, epochs: int | None = None
    ) -> None:
        factors = None if self.class_weight is None else self._factors(y)
        X, y, weights = self._weighted(X, y, sample_weight, factors)
        if epochs is None and weights is not None and len(np.unique(y)) < 2:
            raise ValueError(
                f"only the class {y[0]!r} has examples with a weight above 0: a classifier needs at least 2 "
                "classes"
            )
        numbers = torch.from_numpy(np.searchsorted(self.classes_, y)).long()
        if more:
            self._fit_more(tensor(X), numbers, weights)
            return
        self._begin()
        likelihood = self._likelihood()
        outputs = 1 if isinstance(likelihood, Bernoulli) else len(self.classes_)
        self._fit(tensor(X), numbers, outputs, likelihood, weights, epochs)

    def _factors(self, y: Array) -> Array:
        """Return the weight of each example's class."""
        wanted = self.class_weight
        if isinstance(wanted, Mapping):
            known = set(self.classes_.tolist())
            for label in wanted:
                if label not in known:
                    raise ValueError(
                        f"class_weight has the class {label!r}, which y does not have: its classes are "
                        f"{self.classes_.tolist()}"
                    )
            wanted = {label: wanted.get(label, 1.0) for label in np.unique(y).tolist()}
        found: Array = compute_sample_weight(wanted, y)
        return found

    def _likelihood(self) -> Likelihood | None:
        if self.likelihood is not None:
            return as_likelihood(self.likelihood)
        # Two classes may have one logit: `fit` finds out from the network's outputs.
        return None if len(self.classes_) == 2 and self.model is not None else Categorical()

    def predictive(self, X: Any) -> ClassPredictive:
        """Return the prediction with its uncertainty decomposed, in torch tensors."""
        result = self._predictive(X)
        if isinstance(result, BinaryPredictive):
            result = result.as_classes()
        if not isinstance(result, ClassPredictive):
            raise ValueError(
                f"likelihood is {self.likelihood!r}, whose predictions are no classes: use BayesianRegressor"
            )
        return result

    def predict_proba(self, X: Any) -> Array:
        """Return the probabilities (examples, classes), averaged over the posterior."""
        return self.predictive(X).probs.cpu().numpy()

    def predict(self, X: Any) -> Array:
        """Return the most probable label of every example."""
        numbers = self.predictive(X).prediction.cpu().numpy()
        labels: Array = self.classes_[numbers]
        return labels
