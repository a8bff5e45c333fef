"""A private copy of a network that runs under one draw of its weights after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchbayes.core.batch import arguments
from torchbayes.core.names import named_weights
from torchbayes.core.private import private_copy
from torchbayes.posterior import Posterior, Weights

__all__ = ["SwappedNetwork"]


class SwappedNetwork:
    """Runs a network under draws of its weights, which it puts into a copy of its own and takes out again.

    Threads must not share one.

    Args:
        model: The network, which is copied.
        posterior: The posterior that the draws are from, which may run the network in its own way; None if
            draws are weights and nothing more.

    Attributes:
        twin: The private copy.
        posterior: The posterior, if it runs the network in its own way, otherwise None.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> network = SwappedNetwork(model)
        >>> network({"weight": torch.tensor([[2.0]]), "bias": torch.ones(1)}, torch.tensor([[3.0]]))
        tensor([[7.]])
    """

    def __init__(self, model: nn.Module, posterior: Posterior | None = None) -> None:
        self.twin = private_copy(model)
        plain = posterior is None or type(posterior).call is Posterior.call
        self.posterior = None if plain else posterior
        names = {id(tensor): name for name, tensor in named_weights(self.twin).items()}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {n: [] for n in names.values()}
        for module in self.twin.modules():
            for members in (module._parameters, module._buffers):
                for leaf, tensor in members.items():
                    if tensor is not None:
                        self._places[names[id(tensor)]].append((members, leaf))
        self._own = {name: places[0][0][places[0][1]] for name, places in self._places.items()}

    @property
    def names(self) -> list[str]:
        """The names of all parameters and buffers."""
        return list(self._places)

    def own(self, name: str) -> Tensor:
        """Return the weight or buffer that the copy has while no draw is in it."""
        tensor: Tensor = self._own[name]
        return tensor

    def fix(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights into the copy that are the same in all draws."""
        for name, tensor in weights.items():
            own = self._own[name]
            fixed = nn.Parameter(tensor, False) if isinstance(own, nn.Parameter) else tensor
            self._own[name] = fixed
            self._put(name, fixed)

    def _put(self, name: str, tensor: Any) -> None:
        for members, leaf in self._places[name]:
            members[leaf] = tensor

    def __call__(self, draw: Weights, inputs: Any) -> Any:
        """Return what the network returns under a draw."""
        args, kwargs = arguments(inputs)
        if self.posterior is not None:
            return self.posterior.call(self.twin, draw, *args, **kwargs)
        try:
            for name, tensor in draw.items():
                self._put(name, tensor)
            return self.twin(*args, **kwargs)
        finally:
            # All of them: the network may have replaced a buffer.
            for name, tensor in self._own.items():
                self._put(name, tensor)
