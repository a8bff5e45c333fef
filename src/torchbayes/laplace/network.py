"""The network as Laplace runs it: from a batch of inputs to the tensor that the likelihood takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchbayes.core.batch import call, device_of, network_dtype, suited
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.core.private import private_copy

__all__ = ["Network"]


class Network:
    """A module and where the likelihood's tensor is in what it returns.

    Args:
        model: The network, in evaluation mode.
        output: A key or an attribute's name, an index, or a function of what the network returns.
    """

    def __init__(self, model: nn.Module, output: Output = None) -> None:
        self.model, self.output = model, output
        self.device = device_of(model)
        self._dtype = network_dtype(model)

    def __call__(self, inputs: Any) -> Tensor:
        """Run the network."""
        return output_tensor(
            call(self.model, inputs), self.output, network=type(self.model).__name__
        )

    def private(self) -> Network:
        """Return the same network on a private copy of its module."""
        return Network(private_copy(self.model), self.output)

    def suited(self, inputs: Any) -> Any:
        """Move inputs to the network's device and type."""
        return suited(inputs, self.device, self._dtype)
