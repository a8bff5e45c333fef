"""Predictions averaged over draws of the weights, with their uncertainty decomposed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributions import AffineTransform, Distribution, TransformedDistribution
from torch.distributions.constraints import nonnegative_integer

from torchbayes.core.device import forked_random_numbers
from torchbayes.metrics.classification import label_log_probs
from torchbayes.metrics.mixture import mixture_log_prob, mixture_quantile
from torchbayes.predict.distributions import distribution_function, is_count, quantile_function

__all__ = [
    "ClassPredictive",
    "LabelPredictive",
    "Predictive",
    "RegressionPredictive",
    "check_parts",
    "like_predictions",
    "log_prob_of",
    "times",
]

# The beginning of torch's own message, which goes on with all numbers of the batch.
_REFUSAL = "Expected value argument"


def like_predictions(targets: Tensor, shape: torch.Size) -> Tensor:
    """Reshape `targets` like the predictions: (n,) and (n, 1) are equivalent, all else must agree.

    Without this, (n,) against (n, 1) would silently broadcast to (n, n).
    """
    wide, own = ([size for size in each[1:] if size != 1] for each in (shape, targets.shape))
    if targets.shape[:1] != shape[:1] or wide != own:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} but the network predicts {tuple(shape)}: "
            "give one target per output"
        )
    return targets.reshape(shape)


def log_prob_of(distribution: Distribution, targets: Tensor) -> Tensor:
    """Return the log-density of targets, or say that the distribution cannot have them."""
    try:
        # Ours do not validate arguments, and the formula would give half a count a density.
        if is_count(distribution) and not bool(nonnegative_integer.check(targets).all()):
            raise ValueError(_REFUSAL)
        return distribution.log_prob(targets)
    except ValueError as error:
        if not str(error).startswith(_REFUSAL):
            raise
        raise ValueError(
            f"the likelihood's {type(distribution).__name__} cannot have all of the targets, which go from "
            f"{targets.min():g} to {targets.max():g}: choose a likelihood that fits them"
        ) from error


class Predictive(ABC):
    """The prediction of a network averaged over its weights.

    Attributes:
        draws: Number of weight draws.
    """

    draws: int

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def prediction(self) -> Tensor:
        """The best single guess for every example."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of the uncertainty that more training data would not remove."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of the uncertainty that comes from not knowing the weights."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log-probability of each target under the averaged prediction."""

    @abstractmethod
    def sample(self, count: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw new observations from the averaged prediction.

        Args:
            count: Number of observations of every example.
            generator: Source of randomness; torch's global one if None.

        Returns:
            A tensor (count, examples, …).
        """

    @abstractmethod
    def merge(self, other: Predictive) -> Predictive:
        """Combine the predictions of two sets of draws for the same examples."""

    @abstractmethod
    def subset(self, index: Tensor) -> Predictive:
        """Return the predictions of the examples at `index`, in its order."""

    @staticmethod
    @abstractmethod
    def cat(parts: Sequence[Predictive]) -> Predictive:
        """Concatenate the predictions of the same draws for several sets of examples."""

    @abstractmethod
    def _contents(self) -> tuple[str, dict[str, Tensor]]:
        """Return what an example's prediction is, in words, and figures whose means are worth showing."""

    def __repr__(self) -> str:
        what, figures = self._contents()
        counts = [f"{len(self):,} example{'s' * (len(self) != 1)}", what]
        counts.append(f"{self.draws} draw{'s' * (self.draws != 1)}")
        means = ", ".join(f"mean {k} {float(v.double().mean()):.3g}" for k, v in figures.items())
        return f"{type(self).__name__}({', '.join(filter(None, counts))}: {means})"


def check_parts(parts: Sequence[Predictive], own: Sequence[Predictive]) -> None:
    """Raise a `ValueError` unless `own`, the parts of one kind, are all of them and from the same draws."""
    if not own or len(own) != len(parts) or len({part.draws for part in own}) > 1:
        raise ValueError(
            f"cannot join these {len(parts)} predictions: they must be of one kind and from the same draws"
        )


def times(sizes: Sequence[int], of: str) -> str:
    """Return sizes in words, such as "4 × 5 pixels", or "" if there are none."""
    return f"{' × '.join(map(str, sizes))} {of}" if sizes else ""


class LabelPredictive(Predictive):
    """Probabilities of labels averaged over draws, with their entropy split in two.

    Args:
        probs: The averaged probabilities.
        aleatoric: The entropy of a draw's probabilities, averaged over draws.
        draws: Number of draws.
    """

    def __init__(self, probs: Tensor, aleatoric: Tensor, draws: int) -> None:
        self.probs, self._aleatoric, self.draws = probs, aleatoric, draws

    def __len__(self) -> int:
        return len(self.probs)

    @property
    @abstractmethod
    def confidence(self) -> Tensor:
        """The probability of the most probable label."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of the averaged probabilities in nats: all of the uncertainty."""

    @property
    def aleatoric(self) -> Tensor:
        """The expected entropy of a draw's probabilities, in nats."""
        return self._aleatoric

    @property
    def epistemic(self) -> Tensor:
        """The mutual information of label and weights, in nats: entropy minus its aleatoric part."""
        return (self.entropy - self._aleatoric).clamp_min(0)


class ClassPredictive(LabelPredictive):
    """Class probabilities averaged over draws.

    Args:
        probs: The averaged probabilities, (examples, classes, …) as `cross_entropy` orders them.
        aleatoric: The entropy of a draw's probabilities, averaged over draws.
        draws: Number of draws.
    """

    def _contents(self) -> tuple[str, dict[str, Tensor]]:
        parts = times(self.probs.shape[1:2], "classes"), times(self.probs.shape[2:], "positions")
        figures = {"confidence": self.confidence, "epistemic": self.epistemic}
        return ", ".join(filter(None, parts)), figures

    @property
    def prediction(self) -> Tensor:
        """The most probable class."""
        return self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class."""
        return self.probs.amax(1)

    @property
    def entropy(self) -> Tensor:
        """The entropy of the averaged probabilities in nats: all of the uncertainty."""
        entropy: Tensor = torch.special.entr(self.probs).sum(1)
        return entropy

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log-probability of each target class."""
        return label_log_probs(self.probs, targets)

    def sample(self, count: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw classes, (count, examples, …); those of an example's positions independently."""
        last = self.probs.movedim(1, -1)
        drawn = torch.multinomial(
            last.reshape(-1, last.shape[-1]), count, replacement=True, generator=generator
        )
        return drawn.T.reshape(count, *last.shape[:-1])

    def merge(self, other: Predictive) -> ClassPredictive:
        """Average both predictions, weighted by their number of draws."""
        if not isinstance(other, ClassPredictive) or other.probs.shape != self.probs.shape:
            raise ValueError(
                "cannot merge these predictions: both must be of classes, for the same examples"
            )
        draws = self.draws + other.draws
        probs = torch.lerp(self.probs, other.probs, other.draws / draws)
        aleatoric = torch.lerp(self._aleatoric, other._aleatoric, other.draws / draws)
        return ClassPredictive(probs, aleatoric, draws)

    def subset(self, index: Tensor) -> ClassPredictive:
        """Return the predictions of the examples at `index`, in its order."""
        return ClassPredictive(self.probs[index], self._aleatoric[index], self.draws)

    @staticmethod
    def cat(parts: Sequence[Predictive]) -> ClassPredictive:
        """Concatenate the rows of all parts."""
        own = [part for part in parts if isinstance(part, ClassPredictive)]
        check_parts(parts, own)
        probs, aleatoric = [part.probs for part in own], [part._aleatoric for part in own]
        return ClassPredictive(torch.cat(probs), torch.cat(aleatoric), own[0].draws)


class _Scaled(TransformedDistribution):
    """A distribution in other units, with its mean and standard deviation."""

    def __init__(self, base: Distribution, shift: float | Tensor, scale: float | Tensor) -> None:
        super().__init__(base, [AffineTransform(shift, scale)], validate_args=False)
        self._moments = base.mean * scale + shift, base.stddev * scale

    @property
    def mean(self) -> Tensor:
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        return self._moments[1].square()


class RegressionPredictive(Predictive):
    """An equal mixture of the draws' predictive distributions.

    Args:
        outputs: The network's outputs under every draw, (draws, examples, …).
        distribution: Function from outputs of shape (examples, …) to a distribution of the targets.
    """

    def __init__(self, outputs: Tensor, distribution: Callable[[Tensor], Distribution]) -> None:
        self.outputs, self._distribution, self.draws = outputs, distribution, len(outputs)

    def __len__(self) -> int:
        return self.outputs.shape[1]

    def _contents(self) -> tuple[str, dict[str, Tensor]]:
        try:
            shape = self.means.shape[2:]
            figures = {"std": self.std, "epistemic": self.epistemic}
        except NotImplementedError:  # a distribution without moments
            shape, figures = self.outputs.shape[2:], {"output": self.outputs}
        return times([size for size in shape if size != 1], "numbers"), figures

    @property
    def _components(self) -> Distribution:
        with torch.no_grad():  # predictions must not keep the graph of a learned noise level
            return self._distribution(self.outputs.flatten(0, 1))

    def _by_draw(self, value: Tensor) -> Tensor:
        # Not len(), which would make a constant of the number of examples in torch.export.
        return value.reshape(self.draws, self.outputs.shape[1], *value.shape[1:])

    @property
    def means(self) -> Tensor:
        """Each draw's predicted mean, (draws, examples, …)."""
        return self._by_draw(self._components.mean)

    @property
    def stds(self) -> Tensor:
        """Each draw's predicted noise, (draws, examples, …)."""
        return self._by_draw(self._components.stddev)

    @property
    def mean(self) -> Tensor:
        """The predicted mean."""
        return self.means.mean(0)

    @property
    def prediction(self) -> Tensor:
        """The predicted mean."""
        return self.mean

    @property
    def std(self) -> Tensor:
        """The standard deviation of a new observation: noise and uncertainty about the weights combined."""
        return torch.hypot(self.aleatoric, self.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        """The standard deviation of the noise: the root of its mean variance."""
        return self.stds.square().mean(0).sqrt()

    @property
    def epistemic(self) -> Tensor:
        """The standard deviation of the predicted mean over draws."""
        return self.means.std(0, correction=0)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the log-density of each target under the mixture, summed over the outputs of an example."""
        components = self._components
        shape = self.means.shape[1:]
        repeated = like_predictions(targets, shape).expand(self.draws, *shape).flatten(0, 1)
        log_probs = self._by_draw(log_prob_of(components, repeated))
        joint = log_probs.flatten(2).sum(2) if log_probs.dim() > 2 else log_probs
        return mixture_log_prob(joint)

    def sample(self, count: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw new observations, (count, examples, …): a draw of the weights, then of its distribution."""
        if generator is None:
            generator = torch.default_generator
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
        shape = (count, len(self))
        own = torch.Generator().manual_seed(seed)
        picked = torch.randint(self.draws, shape, generator=own).to(self.outputs.device)
        outputs = self.outputs[picked, torch.arange(len(self), device=picked.device)]
        # Distributions draw from the global generator alone.
        with forked_random_numbers(), torch.no_grad():
            torch.manual_seed(seed)
            values = self._distribution(outputs.flatten(0, 1)).sample()
        return values.reshape(*shape, *values.shape[1:])

    def quantile(self, q: float) -> Tensor:
        """Return the value that a new observation stays below with probability `q`.

        Of counts, it is the smallest number that is reached with that probability.

        Args:
            q: A probability strictly between 0 and 1.
        """
        if not isinstance(q, (float, int)):
            try:
                q = float(q)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"q is a {type(q).__name__}: expected one probability, such as 0.95; call quantile once "
                    "for each"
                ) from error
        components = self._components
        try:
            each = self._by_draw(quantile_function(components, q))
        except NotImplementedError as error:
            raise TypeError(
                f"{type(components).__name__} has no quantile function: use mean and std, or quantiles of "
                "sample(1000)"
            ) from error

        def cdf(values: Tensor) -> Tensor:
            repeated = values.expand(self.draws, *values.shape).flatten(0, 1)
            return self._by_draw(distribution_function(components, repeated))

        value = mixture_quantile(q, each, cdf)
        # The bisection ends at the jump of a count's distribution function, or just above it.
        return value.floor() if is_count(components) else value

    def rescaled(self, shift: float | Tensor, scale: float | Tensor) -> RegressionPredictive:
        """Return the prediction of scale · y + shift, in float64: such as a target in its own units.

        Args:
            shift: Number that is added, or one for each output.
            scale: Positive number to multiply by first, or one for each output.
        """
        return RegressionPredictive(
            self.outputs.double(),
            lambda outputs: _Scaled(self._distribution(outputs), shift, scale),
        )

    def merge(self, other: Predictive) -> RegressionPredictive:
        """Return the mixture of both predictions."""
        shape = other.outputs.shape[1:] if isinstance(other, RegressionPredictive) else None
        if not isinstance(other, RegressionPredictive) or shape != self.outputs.shape[1:]:
            raise ValueError(
                "cannot merge these predictions: both must be of numbers, for the same examples"
            )
        return RegressionPredictive(torch.cat([self.outputs, other.outputs]), self._distribution)

    def subset(self, index: Tensor) -> RegressionPredictive:
        """Return the predictions of the examples at `index`, in its order."""
        return RegressionPredictive(self.outputs[:, index], self._distribution)

    @staticmethod
    def cat(parts: Sequence[Predictive]) -> RegressionPredictive:
        """Concatenate the rows of all parts."""
        own = [part for part in parts if isinstance(part, RegressionPredictive)]
        check_parts(parts, own)
        outputs = torch.cat([part.outputs for part in own], dim=1)
        return RegressionPredictive(outputs, own[0]._distribution)
