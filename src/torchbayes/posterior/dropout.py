"""The posterior of Monte-Carlo dropout: weights, and the masks that are drawn with them.

All examples share one mask, so that a draw is one function of the input. For a single example its
distribution is the same as that of masks drawn per example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from torchbayes.core.names import named_modules
from torchbayes.posterior.posterior import StoredPosterior, Weights

__all__ = ["DropoutPosterior", "check_share", "dropped_layers", "hooked"]

_SEED = "dropout.seed"
_Drop = Callable[[Tensor, int], Tensor]  # outputs and their batch dimension
_LAYERS = (nn.Linear, _ConvNd, nn.RNNBase)


def dropped_layers(model: nn.Module, layers: Sequence[str] | None) -> list[str]:
    """Name the modules whose outputs are dropped, by default all layers with weights but the last."""
    modules = {short: module for short, _, module in named_modules(model)}
    weighted = [n for n, m in modules.items() if isinstance(m, _LAYERS)]
    if layers is None:
        if len(weighted) < 2:
            raise ValueError(
                f"{type(model).__name__} has no convolution, linear or recurrent layer before its last one "
                "to put dropout after: name the modules in layers=…"
            )
        return weighted[:-1]
    for name in layers:
        if name not in modules:
            raise ValueError(
                f"{type(model).__name__} has no module {name!r}: see model.named_modules()"
            )
    return list(layers)


def check_share(p: float) -> float:
    """Return `p` if it is a valid probability of dropping."""
    if not 0 < p < 1:
        raise ValueError(f"p is {p:g}: expected the share of activations to drop, between 0 and 1")
    return p


@contextmanager
def hooked(model: nn.Module, layers: Sequence[str], drop: _Drop) -> Iterator[None]:
    """Pass the outputs of the named modules through `drop` inside the block; remove the hooks after it."""

    def hook(module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        if isinstance(module, nn.RNNBase):  # returns its outputs and its last state
            return drop(outputs[0], 0 if module.batch_first else 1), *outputs[1:]
        return drop(outputs, 0)

    with ExitStack() as hooks:
        modules = {short: module for short, _, module in named_modules(model)}
        for name in layers:
            hooks.enter_context(modules[name].register_forward_hook(hook))
        yield


class DropoutPosterior(StoredPosterior):
    """Trained weights and the dropout that was active while they were trained.

    Args:
        weights: The weights.
        p: Probability that an activation is dropped.
        layers: The modules whose outputs are dropped.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.
    """

    kind = "dropout"
    vmappable = False  # the seed of the masks must be a number

    def __init__(
        self, weights: Weights, p: float, layers: Sequence[str], *, model_name: str = "",
        rest: str = "",
    ) -> None:  # fmt: skip
        super().__init__(weights, model_name, rest)
        self.p, self.layers = check_share(p), list(layers)

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Return the weights and, under the key `dropout.seed`, the seed of the draw's masks."""
        device = "cpu" if generator is None else generator.device
        seed = torch.randint(2**62, (), generator=generator, device=device)
        return self.mean() | {_SEED: seed}

    def call(self, model: nn.Module, draw: Weights, *args: Any, **kwargs: Any) -> Any:
        """Run `model` under the draw's weights and masks."""
        weights = {name: tensor for name, tensor in draw.items() if name != _SEED}
        if _SEED not in draw:
            return super().call(model, weights, *args, **kwargs)
        generator: torch.Generator | None = None

        def drop(outputs: Tensor, examples: int) -> Tensor:
            nonlocal generator
            if generator is None:
                generator = torch.Generator(outputs.device).manual_seed(int(draw[_SEED]))
            # Filled in one order whatever the outputs' memory format, so that pieces of a batch agree.
            one = outputs.narrow(examples, 0, 1)
            mask = torch.empty_like(one, memory_format=torch.contiguous_format)
            mask.bernoulli_(1 - self.p, generator=generator)
            return outputs * mask.div_(1 - self.p)

        with hooked(model, self.layers, drop):
            return super().call(model, weights, *args, **kwargs)

    def check(self, model: nn.Module) -> None:
        """Raise a `ValueError` that names the first weight or layer that `model` lacks."""
        super().check(model)
        dropped_layers(model, self.layers)

    def _file_settings(self) -> dict[str, Any]:
        return {"p": self.p, "layers": self.layers}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> DropoutPosterior:
        return cls(groups["mean"], float(settings["p"]), [str(n) for n in settings["layers"]])
