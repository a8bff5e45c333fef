"""Any likelihood that is a distribution of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchbayes.likelihood.base import Likelihood, at_least_single, mean_nll
from torchbayes.predict.results import RegressionPredictive, like_predictions, log_prob_of

__all__ = ["Observation"]


class Observation(Likelihood):
    """Any likelihood: a function from the network's outputs to a `torch.distributions.Distribution`.

    Args:
        distribution: Function from outputs of shape (examples, …) to a distribution whose samples have the
            targets' shape.

    Example:
        >>> import torch, torchbayes as tb
        >>> times = tb.likelihood.Observation(lambda out: torch.distributions.Exponential(out.exp()))
        >>> round(times.loss(torch.zeros(3, 1), torch.ones(3, 1)).item(), 4)
        1.0
    """

    def __init__(self, distribution: Callable[[Tensor], Distribution]) -> None:
        super().__init__()
        self._of = distribution

    def distribution(self, outputs: Tensor) -> Distribution:
        """Return the distribution of the targets."""
        try:
            result = self._of(outputs)
            if isinstance(result, Distribution) and _is_unchecked(result):
                Distribution.__init__(result, result.batch_shape, result.event_shape, True)
        except ValueError as error:
            # Torch's own has all numbers in it.
            if not str(error).startswith("Expected parameter"):
                raise
            if not bool(torch.isfinite(outputs).all()):
                raise FloatingPointError("the network's outputs are not finite") from error
            raise ValueError(
                f"the likelihood's function cannot make a distribution of the network's outputs "
                f"({_parameter(str(error))}): transform them, as in outputs.exp() for what must be positive"
            ) from error
        if not isinstance(result, Distribution):
            raise TypeError(
                f"the likelihood's function gives a {type(result).__name__} but must give a "
                "torch.distributions.Distribution of the targets"
            )
        return result

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean over examples of −log p(targets | outputs)."""
        distribution = self.distribution(outputs)
        shape = distribution.batch_shape + distribution.event_shape
        values = like_predictions(targets, shape).to(at_least_single(outputs).dtype)
        return mean_nll(-log_prob_of(distribution, values), weights)

    def predictive(self, outputs: Tensor) -> RegressionPredictive:
        """Return the mixture of the draws' distributions."""
        return RegressionPredictive(outputs, self.distribution)


def _is_unchecked(distribution: Distribution) -> bool:
    """Whether torch has not checked a distribution's arguments although its maker did not ask for that.

    The import of Dynamo, by `torch.compile` or by another package, turns the check off in the whole process.
    """
    if torch.compiler.is_compiling():  # torch.export: there are no values to check
        return False
    return not Distribution._validate_args and "_validate_args" not in vars(distribution)


def _parameter(message: str) -> str:
    """Shorten torch's message on an invalid parameter to its first part, without the numbers."""
    name, _, constraint = message.partition("(")
    wanted = constraint.rpartition("the constraint ")[2].partition(",")[0]
    return f"{name.strip()} to satisfy {wanted.splitlines()[0]}"
