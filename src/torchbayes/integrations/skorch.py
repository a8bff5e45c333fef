"""skorch: nets whose optimiser is one of torchbayes, and whose predictions average over the posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbayes.integrations.collector import Collector
from torchbayes.integrations.optimizers import made_optimizer
from torchbayes.likelihood import GaussianNoise, Likelihood
from torchbayes.likelihood.choose import as_likelihood
from torchbayes.optim import IVON
from torchbayes.optim.base import ModelOptimizer
from torchbayes.posterior import Posterior
from torchbayes.predict.binary import BinaryPredictive
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import Predictive
from torchbayes.train.noise import LearnedNoise

try:
    from skorch import NeuralNetClassifier, NeuralNetRegressor
except ImportError as error:
    raise ImportError("skorch is not installed: pip install skorch") from error

__all__ = ["BayesianNetClassifier", "BayesianNetMixin", "BayesianNetRegressor"]

_Array = np.ndarray[Any, Any]
_LR = 0.01  # skorch's own default, for optimisers that are not ours


def learned_noise() -> GaussianNoise:
    """Return the default likelihood of a regression."""
    return GaussianNoise(learned=True)


class BayesianNetMixin:
    """Makes any of skorch's nets Bayesian: `class Net(BayesianNetMixin, NeuralNetBinaryClassifier)`.

    An optimiser of torchbayes gets the module and the number of training examples; its other options are
    `optimizer__…` as usual. While a net trains, its callbacks score the mean or current weights; afterwards
    its predictions average over the posterior.

    Args:
        module: The module class or instance, whose outputs are logits or means.
        *args: Other arguments of the net.
        optimizer: A class of `torchbayes.optim`, or of `torch.optim` with an `averager`.
        lr: Learning rate; the optimiser's default if None.
        averager: Class or function that makes an averager of the module, such as `tb.SWAG` or
            `functools.partial(tb.SWAG, rank=5)`; it takes a snapshot after every epoch.
        burn_in: Share of the training before the first sample of a chain or snapshot of an average.
        thinning: Updates from one sample to the next; by default 30 are kept in all.
        samples: Number of draws for predictions.
        **kwargs: Other arguments of the net. `criterion` is a likelihood, such as `tb.StudentT`, or
            `nn.CrossEntropyLoss` or `nn.BCEWithLogitsLoss`.

    Attributes:
        posterior_: What was learned about the weights.
    """

    module_: nn.Module
    criterion_: nn.Module
    optimizer_: Any
    initialized_: bool
    max_epochs: int
    get_params_for: Callable[[str], dict[str, Any]]
    get_dataset: Callable[..., Any]
    get_iterator: Callable[..., Any]
    get_split_datasets: Callable[..., Any]
    check_is_fitted: Callable[[], None]

    def __init__(
        self, module: Any, *args: Any, optimizer: Any = IVON, lr: float | None = None,
        averager: Any = None, burn_in: float = 0.5, thinning: int | None = None, samples: int = 32,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(module, *args, optimizer=optimizer, lr=lr, **kwargs)  # type: ignore[call-arg]
        self.averager, self.burn_in, self.thinning = averager, burn_in, thinning
        self.samples = samples

    # Training.

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimiser, and one for the likelihood's own parameters."""
        self.noise_ = LearnedNoise(self._likelihood())
        self.collector_: Collector | None = None
        self.finished_ = False
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        options = self.get_params_for("optimizer")
        if self.lr is not None:  # type: ignore[attr-defined]
            options.setdefault("lr", self.lr)  # type: ignore[attr-defined]
        if not (isinstance(optimizer, type) and issubclass(optimizer, ModelOptimizer)):
            options.setdefault("lr", _LR)
        self.sized_ = hasattr(self, "train_size_")  # not in net.initialize(), which has no data
        size = getattr(self, "train_size_", 1)
        self.optimizer_ = made_optimizer(optimizer, self.module_, lambda: size, options)
        return self

    def _likelihood(self) -> Likelihood:
        return as_likelihood(self.criterion_)

    def fit(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Initialise and train; see skorch."""
        self._count(X, y, fit_params)
        return super().fit(X, y, **fit_params)  # type: ignore[misc]

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None, **fit_params: Any) -> Any:
        """Train on; the posterior is then that of this call."""
        given = {key: v for key, v in fit_params.items() if key != "_routing_method"}
        train_set = self._count(X, y, given)
        batches = len(self.get_iterator(train_set, training=True))
        if not self.initialized_:
            self.initialize()  # type: ignore[attr-defined]
        elif not self.sized_ and not self.optimizer_.state:
            self.initialize_optimizer()
        for group in self.optimizer_.param_groups:
            if "train_size" in group and "train_size" not in self.get_params_for("optimizer"):
                group["train_size"] = self.train_size_
        source = self.optimizer_ if self.averager is None else self.averager(self.module_)
        self.collector_ = Collector(
            source, updates=max(1, self.max_epochs * batches), burn_in=self.burn_in,
            thinning=self.thinning,
        )  # fmt: skip
        self.finished_, self.batches_, self.batch_ = False, batches, 0
        super().partial_fit(X, y, classes, **fit_params)  # type: ignore[misc]
        self.collector_.finish(self.get_iterator(train_set, training=False))
        self.finished_ = True
        return self

    def _count(self, X: Any, y: Any, fit_params: dict[str, Any]) -> Any:
        """Note the number of training examples, without those held out, and return their data set."""
        train_set, _ = self.get_split_datasets(X, y, **fit_params)
        self.train_size_ = len(train_set)
        return train_set

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean loss of a batch."""
        if not isinstance(self.criterion_, Likelihood):
            loss: Tensor = super().get_loss(y_pred, y_true, *args, **kwargs)  # type: ignore[misc]
            return loss
        outputs = y_pred[0] if isinstance(y_pred, tuple) else y_pred
        targets = torch.as_tensor(y_true, device=outputs.device)
        if targets.dim() == 1 and outputs.dim() == 2 and outputs.shape[1] == 1:
            targets = targets[:, None]  # scikit-learn's targets are flat
        return self.criterion_.loss(outputs, targets)

    def train_step(self, batch: Any, **fit_params: Any) -> Any:
        """Update the weights and the noise level, and keep a sample or snapshot if it is time."""
        self.noise_.zero_grad()
        step = super().train_step(batch, **fit_params)  # type: ignore[misc]
        self.noise_.step()
        if self.collector_ is not None:
            self.batch_ += 1
            self.collector_.after_update(epoch_ended=self.batch_ % self.batches_ == 0)
        return step

    # What was learned.

    @property
    def posterior_(self) -> Posterior:
        """What was learned about the weights."""
        self.check_is_fitted()
        if self.collector_ is None:
            raise AttributeError(f"{type(self).__name__} has no posterior before fit()")
        return self.collector_.posterior()

    def predictive(self, X: Any) -> Predictive:
        """Return the prediction with its uncertainty decomposed, in tensors, always of the same draws."""
        batches = self.get_iterator(self.get_dataset(X), training=False)
        place = next((p.device for p in self.module_.parameters()), torch.device("cpu"))
        return predictive(
            self.module_, self.posterior_, batches, self.samples, likelihood=self._likelihood(),
            generator=torch.Generator(place).manual_seed(0),
        )  # fmt: skip

    def predict_proba(self, X: Any) -> _Array:
        """Return the probabilities (examples, classes), averaged over the posterior."""
        if not self.finished_:
            early: _Array = super().predict_proba(X)  # type: ignore[misc]
            return early
        p = self.predictive(X)
        if isinstance(p, BinaryPredictive):
            p = p.as_classes()
        probs: _Array = p.probs.cpu().numpy()  # type: ignore[attr-defined]
        return probs


class BayesianNetClassifier(BayesianNetMixin, NeuralNetClassifier):
    """skorch's classifier, with a posterior; its module gives logits.

    It takes the arguments of `BayesianNetMixin` and of `skorch.NeuralNetClassifier`.

    Example:
        >>> import torchbayes as tb
        >>> from sklearn.datasets import make_moons
        >>> from torchbayes.integrations.skorch import BayesianNetClassifier
        >>> X, y = make_moons(200, noise=0.1, random_state=0)
        >>> net = BayesianNetClassifier(
        ...     tb.models.mlp, module__in_features=2, module__num_classes=2, module__hidden=(32,),
        ...     optimizer=tb.IVON, lr=0.3, max_epochs=20, batch_size=16, verbose=0,
        ... )
        >>> net = net.fit(X.astype("float32"), y)
        >>> net.predict_proba(X.astype("float32")).shape, net.posterior_
        ((200, 2), Gaussian(162 weights of MLP))
    """

    def __init__(
        self, module: Any, *args: Any, criterion: Any = nn.CrossEntropyLoss, **kwargs: Any
    ) -> None:
        super().__init__(module, *args, criterion=criterion, **kwargs)


class BayesianNetRegressor(BayesianNetMixin, NeuralNetRegressor):
    """skorch's regressor, with a posterior and Gaussian noise of learned size; its module gives means.

    It takes the arguments of `BayesianNetMixin` and of `skorch.NeuralNetRegressor`. `criterion` is a
    likelihood, or a function that makes one.

    Example:
        >>> import numpy as np, torchbayes as tb
        >>> from torchbayes.integrations.skorch import BayesianNetRegressor
        >>> X = np.linspace(-1, 1, 100, dtype="float32")[:, None]
        >>> net = BayesianNetRegressor(
        ...     tb.models.mlp, module__in_features=1, module__num_classes=1, module__hidden=(16,),
        ...     optimizer=tb.SGHMC, max_epochs=20, verbose=0,
        ... ).fit(X, X[:, 0] ** 2)
        >>> mean, std = net.predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((100, 1), (100, 1))
    """

    def __init__(
        self, module: Any, *args: Any, criterion: Any = learned_noise, **kwargs: Any
    ) -> None:
        super().__init__(module, *args, criterion=criterion, **kwargs)

    def check_data(self, X: Any, y: Any) -> None:
        """Take flat targets too, as scikit-learn's are."""
        if y is None or np.ndim(y) != 1:
            super().check_data(X, y)

    def predict_proba(self, X: Any) -> _Array:
        """Return the means, as skorch's regressors do."""
        if not self.finished_:
            return super().predict_proba(X)
        means: _Array = self.predictive(X).mean.cpu().numpy()  # type: ignore[attr-defined]
        return means

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the means, and with `return_std` the standard deviations of new observations."""
        if not return_std:
            return self.predict_proba(X)
        p: Any = self.predictive(X)
        return p.mean.cpu().numpy(), p.std.cpu().numpy()
