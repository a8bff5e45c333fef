"""Estimators of a Gaussian's gradients: how the examples of a batch share the noise of the weights.

An estimator is a context around the network's forward pass. The network sees plain sampled weights; where
`linear`, a convolution or a transposed convolution is called with a weight that *is* one of them, the
low-variance rule is used instead. Every other use of a weight (an LSTM, attention's projections, an
embedding) sees the ordinary sample: a layer that an estimator does not know costs variance, not
correctness. Padding modes, groups, dilation and tied weights work because the network's own code runs.

| estimator | layer output, for each example | from |
| --- | --- | --- |
| `shared_draw` | x (μ + σε) with one ε for the batch | Blundell et al. 2015 |
| `local_reparameterisation` | xμ + √(x²σ²) ζ, ζ for each output | Kingma, Salimans & Welling 2015 |
| `flipout` | xμ + ((x∘s) (σε)) ∘ r, random signs s and r | Wen et al. 2018, Eq. (4) |

Flipout's signs are per example and channel, so that each example's outputs, over all positions of an
image or a sequence, are those of one draw of the weights; a weight that is used twice has the same signs
both times. Dimension 0 of the network's first input counts the examples, and the rule is used where a
layer's input has that dimension too. Local reparameterisation has the right distribution for each output by
itself, but positions and repeated uses get noise of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchbayes.core.noise import normal_, random_signs
from torchbayes.variational.draw import Drawn, Spread

__all__ = ["Estimator", "flipout", "local_reparameterisation", "shared_draw"]

_LINEAR = F.linear
_LAYERS: frozenset[Any] = frozenset(
    [
        _LINEAR,
        *(F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ]
)
Layer = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Estimator(TorchFunctionMode):
    """A context in which layers with drawn weights follow a rule of their own.

    Args:
        drawn: The drawn weights.
        examples: The number of examples in the batch; None if it is not known.
        generator: Where further random numbers come from.

    Attributes:
        spread: What the rule needs of a weight.
        hits: How often each weight was used by the rule, by the weight's name.
    """

    spread: ClassVar[Spread] = Spread.NONE

    def __init__(
        self,
        drawn: Iterable[Drawn],
        examples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self._drawn = {id(weight.sample): weight for weight in drawn}
        self._examples, self._generator = examples, generator
        self.hits: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func not in _LAYERS:
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        inputs, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
        drawn = self._drawn.get(id(weight))
        if drawn is None or not isinstance(inputs, Tensor) or not self._takes(func, inputs, drawn):
            return func(*args, **kwargs)
        rest = {
            name: value for name, value in kwargs.items() if name not in ("input", "weight", "bias")
        }
        self.hits[drawn.name] += 1

        def layer(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            result: Tensor = func(inputs, weight, bias, *args[3:], **rest)
            return result

        fixed = None if bias is None else Drawn("", bias, bias)
        return self._rule(layer, func is _LINEAR, inputs, drawn, self._drawn.get(id(bias), fixed))

    def _takes(self, func: Any, inputs: Tensor, weight: Drawn) -> bool:
        """Whether the rule can be used for these inputs."""
        batched = 2 if func is _LINEAR else weight.sample.dim()
        return inputs.dim() >= batched

    def _rule(
        self, layer: Layer, linear: bool, inputs: Tensor, weight: Drawn, bias: Drawn | None
    ) -> Tensor:
        raise NotImplementedError


class shared_draw(Estimator):
    """One draw of the weights for the whole batch: Bayes by Backprop as published, and the fastest.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(3, 2), estimator=tb.shared_draw)
        >>> out = net(torch.ones(4, 3))
        >>> bool((out == out[0]).all())   # equal examples meet the same weights
        True
    """

    def __enter__(self) -> shared_draw:
        """Nothing to do, and so no mode to pay for."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to undo."""


class local_reparameterisation(Estimator):
    """Draws layers' outputs instead of their weights: the least gradient variance for linear layers.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(3, 2), estimator=tb.local_reparameterisation)
        >>> out = net(torch.ones(4, 3))
        >>> bool((out == out[0]).all()), dict(net.rule_hits)
        (False, {'weight': 1})
    """

    spread = Spread.VARIANCE

    def _rule(
        self, layer: Layer, linear: bool, inputs: Tensor, weight: Drawn, bias: Drawn | None
    ) -> Tensor:
        assert weight.mean is not None
        assert weight.spread is not None
        mean = layer(inputs, weight.mean, None if bias is None else bias.mean)
        variance = layer(inputs.square(), weight.spread, None if bias is None else bias.spread)
        # The root's slope at 0 is infinite; where there is no variance there is nothing to learn either.
        std = torch.where(variance > 0, variance, 1.0).sqrt() * (variance > 0)
        return mean + std * normal_(torch.empty_like(std), self._generator)


class flipout(Estimator):
    """Random signs make one draw of the weights a nearly independent one for each example.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(3, 2), estimator=tb.flipout)
        >>> len(net(torch.ones(8, 3)).unique(dim=0)) > 1   # equal examples meet different weights
        True
    """

    spread = Spread.DEVIATION

    def __init__(
        self,
        drawn: Iterable[Drawn],
        examples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(drawn, examples, generator)
        self._signs: dict[str, tuple[Tensor, Tensor]] = {}

    def _takes(self, func: Any, inputs: Tensor, weight: Drawn) -> bool:
        # Where dimension 0 is not the examples', signs along it would tear one example's draw apart.
        return super()._takes(func, inputs, weight) and inputs.shape[0] == self._examples

    def _rule(
        self, layer: Layer, linear: bool, inputs: Tensor, weight: Drawn, bias: Drawn | None
    ) -> Tensor:
        assert weight.mean is not None
        assert weight.spread is not None
        mean = layer(inputs, weight.mean, None if bias is None else bias.mean)
        channel = -1 if linear else 1
        if weight.name not in self._signs:
            shapes = [(len(inputs), inputs.shape[channel]), (len(inputs), mean.shape[channel])]
            count = sum(examples * channels for examples, channels in shapes)
            signs = random_signs(
                (count,), self._generator, dtype=inputs.dtype, device=inputs.device
            )
            before, after = signs.split([examples * channels for examples, channels in shapes])
            self._signs[weight.name] = before.view(shapes[0]), after.view(shapes[1])
        s, r = (_along(signs, inputs.dim(), channel) for signs in self._signs[weight.name])
        # The bias is a weight whose input is always 1: with r alone its joint distribution is right.
        deviation = layer(inputs * s, weight.spread, None if bias is None else bias.spread)
        return torch.addcmul(mean, deviation, r.to(mean.dtype))


def _along(signs: Tensor, dims: int, channel: int) -> Tensor:
    """Signs of shape (examples, channels) to be broadcast over all other dimensions."""
    shape = [1] * dims
    shape[0], shape[channel] = signs.shape
    return signs.view(shape)
