"""Predictions that draw the outputs of layers in place of their weights: local reparameterisation.

D. Kingma, T. Salimans, M. Welling: Variational Dropout and the Local Reparameterization Trick, 2015, Eq. (6).
Under an independent Gaussian with means μ and variances σ², the outputs of a linear layer for one input x are
independent and normal, with means xμ and variances x²σ². Here every example draws its own.

What is exact: for one example, the outputs of a linear layer that gets one row per example have, given its
input, the joint distribution that weight draws give them, and weights of different layers are independent.
So the prediction for *one example* of a chain of such layers, with anything without weights in between, has
the distribution that weight draws give it, and means over draws converge to the same numbers.

What is not: examples get independent noise, so that nothing may be concluded from draws about several
examples together. Positions get independent noise as well, in a convolution and in a linear layer over a
sequence, where weight draws would move them together: each single output is right given the layer's input,
but what later layers make of several positions is an approximation.

A layer's outputs are drawn where that is less work. It saves a normal number for every weight, but takes one
for every output, and a second product; where the layer's inputs are the same under all draws, as those of the
first one are, both products are computed once. All other weights, and those that are used otherwise (in an
embedding, an LSTM, a norm, attention's packed projection) or more than once in a pass, are drawn in the
ordinary way, once for all examples of a pass. A pass with the means tells which these are, for every piece of
the inputs: how often a cell runs may depend on them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchbayes.core.autocast import no_autocast
from torchbayes.core.names import named_buffers
from torchbayes.core.noise import gaussians_, normal_
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Gaussian, Posterior, Weights
from torchbayes.predict.passes import Passes
from torchbayes.predict.results import Predictive
from torchbayes.predict.swapped import SwappedNetwork

__all__ = ["LocalDraws"]

_LAYERS: frozenset[Any] = frozenset([
    F.linear, F.conv1d, F.conv2d, F.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
])  # fmt: skip
_NAMES = ("input", "weight", "bias")

# Multiplications that take as long as a normal number: on one core 60 and 0.27 in a nanosecond, with matrices
# of 1000 × 1200 and 1200 × 1200, and 2.4 million numbers.
_NORMAL = 200


class _Uses(TorchFunctionMode):
    """Counts how often weights are used, and how often as the weight or the bias of a layer.

    Args:
        names: The weights' names by id.
        fixed: Tensors that are the same under all draws.
    """

    def __init__(self, names: dict[int, str], fixed: list[Tensor]) -> None:
        super().__init__()
        self._names = names
        self._fixed = _storages(fixed)
        self._dear: set[str] = set()
        self.all: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        self.biases: dict[str, str] = {}  # the name of the bias by that of the weight

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # To ask for a weight's shape is no use of it; its transpose is.
        if getattr(func, "__name__", "") != "__get__" or isinstance(result, Tensor):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._names:
                    self.all[self._names[id(leaf)]] += 1
        if func in _LAYERS:
            given = dict(zip(_NAMES, args, strict=False)) | kwargs
            weight, bias = (self._names.get(id(given.get(n))) for n in ("weight", "bias"))
            if weight is not None and id(given.get("input")) not in self._names:
                self.layers[weight] += 1
                once = _storage(given["input"]) in self._fixed
                if not saves_work(given["weight"], result, once=once):
                    self._dear.add(weight)
                if bias is not None:
                    self.layers[bias] += 1
                    self.biases[weight] = bias
        return result

    def single(self) -> set[str]:
        """Name the weights whose one use is in a layer that is worth it; a bias only with its weight."""
        once = {n for n, count in self.layers.items() if count == 1 and self.all[n] == 1}
        once -= self._dear
        return {n for n in once if n not in self.biases.values()} | {
            bias for weight, bias in self.biases.items() if {weight, bias} <= once
        }


def saves_work(weight: Tensor, outputs: Tensor, *, once: bool) -> bool:
    """Whether drawing a layer's outputs takes less work than drawing its weight.

    Args:
        weight: The weight.
        outputs: The layer's outputs.
        once: Whether its moments are computed once for all draws.

    Example:
        >>> weight = torch.zeros(1200, 1200)
        >>> [saves_work(weight, torch.zeros(examples, 1200), once=False) for examples in (100, 1000)]
        [True, False]
    """
    product = outputs.numel() * weight[0].numel()
    drawn = (0 if once else 2 * product) + _NORMAL * outputs.numel()
    return drawn <= product + _NORMAL * weight.numel()


def _storage(tensor: Any) -> int | None:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None


def _storages(tensors: list[Tensor]) -> set[int | None]:
    return {_storage(tensor) for tensor in tensors}


class _Rule(TorchFunctionMode):
    """Draws the outputs of layers.

    Args:
        weights: The names and the variances of the layers' weights and biases, by the id of their mean.
        constant: The ids of the weights without a spread.
        generator: Source of the noise.
        fixed: Tensors that are the same under all draws: a layer's moments for them are computed once.

    Attributes:
        used: The ids of the weights whose layers have run in this pass.
    """

    def __init__(
        self, weights: dict[int, tuple[str, Tensor]], constant: set[int], generator: torch.Generator,
        fixed: list[Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self._weights, self._constant, self._generator = weights, constant, generator
        self._fixed = _storages(fixed)
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}
        self.used: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LAYERS:
            return func(*args, **kwargs)
        given: dict[str, Any] = dict(zip(_NAMES, args, strict=False)) | kwargs
        inputs, weight, bias = (given.get(name) for name in _NAMES)
        if id(weight) not in self._weights or not isinstance(inputs, Tensor):
            return func(*args, **kwargs)
        name, variance = self._weights[id(weight)]
        if id(weight) in self.used:  # because of what was drawn: the means' pass had it once
            raise ValueError(
                f"the network uses its weight {name!r} once with the means of the weights and more often "
                "with a draw, so that its layer's outputs cannot be drawn: leave out local=True"
            )
        self.used.add(id(weight))
        key = None
        # A bias that is drawn in the ordinary way, or computed from such weights, is another one every time.
        settled = bias is None or id(bias) in self._weights or id(bias) in self._constant
        if settled and _storage(inputs) in self._fixed:
            place = inputs.data_ptr(), inputs.shape, inputs.stride(), inputs._version
            key = id(weight), *place
        if key not in self._known or key is None:
            rest = {name: value for name, value in kwargs.items() if name not in _NAMES}
            centre = func(*args, **kwargs)
            _, spread = self._weights.get(id(bias), ("", None))
            with no_autocast(inputs.device):
                squares = inputs.to(variance.dtype).square()
                width = func(squares, variance, spread, *args[3:], **rest).clamp_min_(0).sqrt_()
            width = width.to(centre.dtype)
            if key is None:
                return normal_(torch.empty_like(width), self._generator).mul_(width).add_(centre)
            self._known[key] = centre, width
        centre, width = self._known[key]
        return torch.addcmul(centre, normal_(torch.empty_like(width), self._generator), width)


class LocalDraws:
    """Predicts with the outputs of linear and convolution layers drawn for every example.

    Args:
        network: The network.
        posterior: An independent Gaussian.
        samples: Number of draws.
        generator: Source of the noise.
        device: Device of the network.
    """

    def __init__(
        self, network: SwappedNetwork, posterior: Posterior, samples: int, generator: torch.Generator,
        device: torch.device,
    ) -> None:  # fmt: skip
        if type(posterior) is not Gaussian:
            raise ValueError(
                f"local=True was given with a {type(posterior).__name__}: only under a torchbayes.Gaussian "
                "are the outputs of a layer independent and normal, so leave it out to draw weights"
            )
        self._network, self._samples, self._generator = network, samples, generator
        self.mean = {name: tensor.to(device) for name, tensor in posterior.mean().items()}
        self._std = {name: tensor.to(device) for name, tensor in posterior.std().items()}
        self._buffers = set(named_buffers(network.twin))
        self._variance: Weights = {}
        constant = set(network.names) - self._std.keys() - self._buffers
        self._constant = {id(self.mean.get(name, network.own(name))) for name in constant}

    def _whole(self) -> Weights:
        """Return the means, and copies of the buffers, which the network may write to."""
        own = {n: self._network.own(n) for n in self._buffers} | self.mean
        return self.mean | {name: own[name].clone() for name in self._buffers}

    def shifted(self) -> Weights:
        """Return weights that differ from the mean where draws do."""
        return {n: (self.mean[n] + std).to(self.mean[n]) for n, std in self._std.items()}

    def _look(self, passes: Passes, piece: Any, fixed: list[Tensor]) -> set[str]:
        """Find the weights whose layers' outputs are drawn in their place for some inputs."""
        before = {name: self.mean[name]._version for name in self._std}
        with _Uses({id(self.mean[name]): name for name in self._std}, fixed) as uses:
            passes.outputs([self._whole()], None, piece)
        changed = [name for name in before if self.mean[name]._version != before[name]]
        if changed:
            raise ValueError(
                f"the network writes to its weight {changed[0]!r} while it runs, so that its layers' "
                "outputs cannot be drawn: leave out local=True"
            )
        single: set[str] = uses.single()
        for name in single - self._variance.keys():
            std = self._std[name]
            # In float16, squares of numbers above 256 are infinite, and of those below 0.0002 they are 0.
            self._variance[name] = (std.float() if std.dtype is torch.float16 else std).square()
        return single

    def predict(
        self, batch: Any, passes: Passes, likelihood: Likelihood, max_memory: int
    ) -> list[Predictive]:
        """Predict a batch, in pieces that fit.

        Args:
            batch: The inputs.
            passes: Runs the network.
            likelihood: Meaning of the outputs.
            max_memory: Approximate limit in bytes.
        """
        pieces, size = passes.pieces(self._whole(), batch)
        count = max(1, max_memory // 8 // max(1, size))
        parts: list[Predictive] = []
        for piece in pieces:
            inputs = passes._suited(piece)
            fixed = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            single = self._look(passes, inputs, fixed)
            moments = {id(self.mean[n]): (n, self._variance[n]) for n in single}
            rule = _Rule(moments, self._constant, self._generator, fixed)
            rest = [name for name in self._std if name not in single]
            drawn = {name: torch.empty_like(self.mean[name]) for name in rest}
            merged: Predictive | None = None
            for start in range(0, self._samples, count):
                outputs: list[Tensor] = []
                for _ in range(min(count, self._samples - start)):
                    mean, std = ([of[name] for name in rest] for of in (self.mean, self._std))
                    gaussians_(list(drawn.values()), mean, std, self._generator)
                    rule.used.clear()
                    with rule:
                        outputs.append(passes.outputs([self._whole() | drawn], None, inputs))
                new = likelihood.predictive(torch.cat(outputs))
                merged = new if merged is None else merged.merge(new)
            assert merged is not None
            parts.append(merged)
        return parts
