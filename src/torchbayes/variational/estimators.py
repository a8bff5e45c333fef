"""Estimators of a Gaussian's gradients: how the examples of a batch share the noise of the weights.

An estimator is a function that returns the rule of one forward pass, a context around it. The network sees
plain sampled weights; where `linear`, a convolution or a transposed convolution is called with a weight that
*is* one of them, the low-variance rule is used instead. Every other use of a weight (an LSTM, attention's
projections, an embedding) gets the ordinary sample: a layer that an estimator does not know costs variance,
not correctness. Padding modes, groups, dilation and tied weights work because the network's own code runs.

| estimator | layer output, for each example | from |
| --- | --- | --- |
| `shared_draw` | x (μ + σε) with one ε for the batch | Blundell et al. 2015 |
| `local_reparameterisation` | xμ + √(x²σ²) ζ, ζ for each output | Kingma, Salimans & Welling 2015 |
| `flipout` | xμ + ((x∘s) (σε)) ∘ r, random signs s and r | Wen et al. 2018, Eq. (4) |

Flipout's signs are per example and channel, so that each example's outputs, over all positions of an
image or a sequence, are those of one draw of the weights; a weight that is used twice has the same signs
both times. Dimension 0 of the network's first input counts the examples, and the rule is used where a
layer's input has that dimension too. Local reparameterisation gives each single output the right
distribution, but positions and repeated uses get independent noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchbayes.core.noise import normal_, random_signs
from torchbayes.variational.draw import Drawn, Spread

__all__ = ["Estimator", "Rule", "flipout", "local_reparameterisation", "shared_draw"]

_LAYERS: frozenset[Any] = frozenset([
    F.linear, F.conv1d, F.conv2d, F.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
])  # fmt: skip
_NAMES = ("input", "weight", "bias")


class Rule(TorchFunctionMode):
    """A context in which layers with drawn weights are computed by a low-variance rule.

    Args:
        generator: Source of further random numbers.

    Attributes:
        spread: What the rule needs to know of a weight.
        hits: Number of uses of each weight by the rule, by the weight's name.
    """

    spread: ClassVar[Spread] = Spread.NONE

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self._generator = generator
        self._drawn: dict[int, Drawn] = {}
        self._examples: int | None = None
        self.hits: Counter[str] = Counter()

    def over(self, drawn: Iterable[Drawn], examples: int | None) -> Rule:
        """Apply the rule to these weights and, if known, this number of examples."""
        self._drawn = {id(weight.sample): weight for weight in drawn}
        self._examples = examples
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func not in _LAYERS:
            return func(*args, **kwargs)
        given: dict[str, Any] = dict(zip(_NAMES, args, strict=False)) | kwargs
        inputs, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
        drawn = self._drawn.get(id(weight))
        if drawn is None or not isinstance(inputs, Tensor) or not self._takes(func, inputs, drawn):
            return func(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in _NAMES}
        self.hits[drawn.name] += 1
        noisy = self._drawn.get(id(bias))
        shift, spread_of_shift = (bias, None) if noisy is None else (noisy.mean, noisy.spread)
        mean = func(inputs, drawn.mean, shift, *args[3:], **rest)

        def spread(inputs: Tensor) -> Tensor:
            result: Tensor = func(inputs, drawn.spread, spread_of_shift, *args[3:], **rest)
            return result

        return self._rule(drawn.name, inputs, -1 if func is F.linear else 1, mean, spread)

    def _takes(self, func: Any, inputs: Tensor, weight: Drawn) -> bool:
        """Whether the rule can be used for these inputs."""
        return inputs.dim() >= (2 if func is F.linear else weight.sample.dim())

    def _rule(
        self, name: str, inputs: Tensor, channel: int, mean: Tensor,
        spread: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """Return the layer's output, given that for the mean weights and the layer with their spreads.

        Args:
            name: Name of the weight.
            inputs: The layer's inputs.
            channel: Dimension of the channels of inputs and outputs.
            mean: Output for the mean weights.
            spread: The layer with the spreads in place of the weights.
        """
        raise NotImplementedError


class Estimator(Protocol):
    """A function that makes the rule for one forward pass, such as `flipout`."""

    __name__: str

    def __call__(self, generator: torch.Generator | None = None, /) -> Rule:
        """Make the rule; `generator` is its source of random numbers."""


class SharedDraw(Rule):
    """The ordinary draw everywhere."""

    def __enter__(self) -> SharedDraw:
        """Do nothing, and so avoid the cost of a mode."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing."""


class LocalReparameterisation(Rule):
    """Draw normal outputs with the mean and variance that the weights give them."""

    spread = Spread.VARIANCE

    def _rule(
        self, name: str, inputs: Tensor, channel: int, mean: Tensor,
        spread: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        variance = spread(inputs.square())
        # The root's slope at 0 is infinite; where there is no variance there is nothing to learn either.
        std = torch.where(variance > 0, variance, 1.0).sqrt() * (variance > 0)
        return mean + std * normal_(torch.empty_like(std), self._generator)


class Flipout(Rule):
    """Use the batch's deviation with random signs for each example's inputs and outputs."""

    spread = Spread.DEVIATION

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__(generator)
        self._signs: dict[str, tuple[Tensor, Tensor]] = {}

    def _takes(self, func: Any, inputs: Tensor, weight: Drawn) -> bool:
        # Where dimension 0 is not the examples', signs along it would tear one example's draw apart.
        return super()._takes(func, inputs, weight) and inputs.shape[0] == self._examples

    def _rule(
        self, name: str, inputs: Tensor, channel: int, mean: Tensor,
        spread: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        if name not in self._signs:
            examples, sizes = len(inputs), [t.shape[channel] for t in (inputs, mean)]
            both = random_signs(
                (examples * sum(sizes),), self._generator, dtype=inputs.dtype, device=inputs.device
            )
            before, after = both.split([examples * size for size in sizes])
            self._signs[name] = before.view(examples, -1), after.view(examples, -1)
        s, r = (_along(signs, inputs.dim(), channel) for signs in self._signs[name])
        # The bias is a weight whose input is always 1: with r alone its joint distribution is right.
        return torch.addcmul(mean, spread(inputs * s), r.to(mean.dtype))


def _along(signs: Tensor, dims: int, channel: int) -> Tensor:
    """Reshape signs (examples, channels) to be broadcast over all other dimensions."""
    shape = [1] * dims
    shape[0], shape[channel] = signs.shape
    return signs.view(shape)


def shared_draw(generator: torch.Generator | None = None) -> Rule:
    """Draw the weights once for the whole batch: Bayes by Backprop as published, and the fastest.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(3, 2), estimator=tb.shared_draw)
        >>> out = net(torch.ones(4, 3))
        >>> bool((out == out[0]).all())   # equal examples meet the same weights
        True
    """
    return SharedDraw(generator)


def local_reparameterisation(generator: torch.Generator | None = None) -> Rule:
    """Draw layers' outputs instead of their weights: the least gradient variance for linear layers.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(3, 2), estimator=tb.local_reparameterisation)
        >>> out = net(torch.ones(4, 3))
        >>> bool((out == out[0]).all()), dict(net.rule_hits)
        (False, {'weight': 1})
    """
    return LocalReparameterisation(generator)


def flipout(generator: torch.Generator | None = None) -> Rule:
    """Turn one draw of the weights into a nearly independent one for each example by random signs.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(3, 2), estimator=tb.flipout)
        >>> out = net(torch.ones(8, 3))
        >>> bool((out == out[0]).all()), dict(net.rule_hits)
        (False, {'weight': 1})
    """
    return Flipout(generator)
