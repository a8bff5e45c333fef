"""A network averaged over fixed draws, as one module without any randomness: what a file can hold.

The draws run one after the other, each with weights of its own; what is the same in all of them is held once.
The masks of a dropout posterior are drawn here and become constants.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchbayes.core.batch import arguments, network_dtype, suited
from torchbayes.core.names import named_weights
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Posterior, Weights
from torchbayes.posterior.posterior import assign
from torchbayes.predict.results import LabelPredictive, Predictive, RegressionPredictive

__all__ = ["DrawnNetwork", "prediction_tensors"]


def prediction_tensors(prediction: Predictive) -> dict[str, Tensor]:
    """Return the figures of a prediction under the names that they have in a file.

    Labels have `probabilities`, their `entropy` and its parts `aleatoric` and `epistemic`; numbers have a
    `mean`, a `std` and its parts.
    """
    if isinstance(prediction, LabelPredictive):
        named = {"probabilities": prediction.probs, "entropy": prediction.entropy}
    elif isinstance(prediction, RegressionPredictive):
        # The predictive's own std is a hypot, which ONNX does not have.
        parts = prediction.aleatoric.square() + prediction.epistemic.square()
        named = {"mean": prediction.mean, "std": parts.sqrt()}
    else:
        raise TypeError(
            f"a {type(prediction).__name__} has figures that a file has no names for: give a likelihood "
            "whose predictions are of labels or of numbers"
        )
    return named | {"aleatoric": prediction.aleatoric, "epistemic": prediction.epistemic}


class DrawnNetwork(nn.Module):
    """Predictions of a network under fixed draws of its weights, as named tensors.

    Args:
        network: The network, which is copied.
        posterior: What the draws are from.
        draws: The draws.
        likelihood: Meaning of the network's outputs.
        inputs: Some inputs, to draw the masks of dropout with.
        before: Function from the module's inputs to those of the network.
        after: Function of the prediction, such as a change of its temperature.
        output: Where the likelihood's tensor is in what the network returns.
    """

    def __init__(
        self, network: nn.Module, posterior: Posterior, draws: Sequence[Weights], likelihood: Likelihood,
        inputs: Any, *, before: Callable[[Any], Any] | None = None,
        after: Callable[[Predictive], Predictive] | None = None, output: Output = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.network = copy.deepcopy(network).cpu().eval().requires_grad_(False)
        self.likelihood = copy.deepcopy(likelihood).cpu().eval().requires_grad_(False)
        self.before, self.after, self.output = before, after, output
        self._posterior = posterior
        weights = [{name: tensor.cpu() for name, tensor in draw.items()} for draw in draws]
        own = named_weights(self.network)
        seeds = [name for name in weights[0] if name not in own]
        same = {
            name
            for name, first in weights[0].items()
            if name not in seeds and all(torch.equal(first, draw[name]) for draw in weights[1:])
        }
        assign(self.network, {name: weights[0][name] for name in same})
        # A seed is no tensor of the graph: it says which masks to draw, and they are drawn below.
        self._seeds = [{name: draw[name] for name in seeds} for draw in weights]
        self._names = [name for name in weights[0] if name not in same and name not in seeds]
        for number, draw in enumerate(weights):
            for index, name in enumerate(self._names):
                self.register_buffer(f"draw_{number}_{index}", draw[name])
        self._masks = [0] * len(weights)
        if any(self._seeds):
            self._draw_masks(inputs)

    def _draw(self, number: int) -> Weights:
        own = {n: getattr(self, f"draw_{number}_{i}") for i, n in enumerate(self._names)}
        return own | self._seeds[number]

    @torch.no_grad()
    def _draw_masks(self, inputs: Any) -> None:
        for number in range(len(self._masks)):
            with _Recorder() as recorder:
                self._outputs(number, self._prepared(inputs))
            for index, mask in enumerate(recorder.masks):
                self.register_buffer(f"mask_{number}_{index}", mask)
            self._masks[number] = len(recorder.masks)

    @contextmanager
    def _masked(self, number: int) -> Iterator[None]:
        if self._masks[number] == 0:
            yield
            return
        with _Replay([getattr(self, f"mask_{number}_{i}") for i in range(self._masks[number])]):
            yield

    def _prepared(self, inputs: Any) -> Any:
        inputs = inputs if self.before is None else self.before(inputs)
        return suited(inputs, "cpu", network_dtype(self.network))

    def _outputs(self, number: int, inputs: Any) -> Tensor:
        args, kwargs = arguments(inputs)
        returned = self._posterior.call(self.network, self._draw(number), *args, **kwargs)
        return output_tensor(returned, self.output, network=type(self.network).__name__)

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        """Return the figures of the prediction."""
        inputs = self._prepared(inputs)
        each = []
        for number in range(len(self._masks)):
            with self._masked(number):
                each.append(self._outputs(number, inputs))
        prediction = self.likelihood.predictive(torch.stack(each))
        return prediction_tensors(prediction if self.after is None else self.after(prediction))


class _Recorder(TorchFunctionMode):
    """Keeps the masks that a pass draws, in the order in which it draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.bernoulli_:
            self.masks.append(result.clone())
        return result


class _Replay(TorchFunctionMode):
    """Gives a pass the masks that `_Recorder` kept."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__()
        self._masks = iter(masks)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bernoulli_:
            return args[0].copy_(next(self._masks))
        return func(*args, **(kwargs or {}))
