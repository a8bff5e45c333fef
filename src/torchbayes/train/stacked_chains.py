"""Several chains of a small network run as one: stacked weights, losses through `torch.func.vmap`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from torchbayes.core.batch import arguments, uncompiled
from torchbayes.core.names import own_weights
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.core.parameters import trainable
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Weights
from torchbayes.prior import GaussianPrior, Prior
from torchbayes.train.method import loss_of
from torchbayes.train.throughput import arranged

__all__ = ["StackedChains", "StackedPrior"]


class StackedPrior(Prior):
    """A prior for each row of stacked weights.

    Args:
        prior: The prior of one chain's weights.
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior

    @classmethod
    def of(cls, prior: Prior) -> Prior:
        """Return the prior itself if it is the same for every entry, so that stacking does not matter."""
        if not isinstance(prior, GaussianPrior) or isinstance(prior.precision, dict):
            return cls(prior)
        return cls(prior) if isinstance(prior.mean, dict) else prior

    def log_prob_of(self, name: str, weight: Tensor) -> Tensor:
        """Return the sum over chains."""
        return torch.stack([self.prior.log_prob_of(name, row) for row in weight]).sum()

    def grad(self, weights: Weights) -> Weights:
        """Return the gradients of all chains, stacked."""
        rows = zip(*(tensor.detach().unbind() for tensor in weights.values()), strict=True)
        parts = [self.prior.grad(dict(zip(weights, row, strict=True))) for row in rows]
        return {name: torch.stack([part[name] for part in parts]) for name in weights}


class _Loss(nn.Module):
    """The loss as a function of the likelihood's parameters too."""

    def __init__(self, likelihood: Likelihood, output: Output, weights: Tensor | None) -> None:
        super().__init__()
        self.likelihood, self._output, self._weights = likelihood, output, weights

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        return loss_of(
            self.likelihood, output_tensor(outputs, self._output), targets, self._weights
        )


class StackedChains:
    """Stacked weights of several chains.

    Attributes:
        model: A copy of the network whose parameters have a first dimension for the chains: what the
            sampler moves.
        alive: Which chains are still finite, (chains,).

    Args:
        model: The network.
        likelihood: What its outputs mean.
        starts: Initial weights of every chain.
        output: Where the likelihood's tensor is in what the network returns.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        starts: Sequence[Weights],
        output: Output = None,
    ) -> None:
        buffer = next((name for name, _ in model.named_buffers()), None)
        if buffer is not None:
            raise ValueError(
                f"the network has the buffer {buffer!r}, which chains that run side by side would share: "
                "leave out side_by_side to run them one after another"
            )
        self._net, self._likelihood, self._output = model, likelihood, output
        self.model = copy.deepcopy(model)
        stacked: dict[int, nn.Parameter] = {}
        for name, old in trainable(self.model).items():  # chains share what is frozen
            rows = torch.stack([start[name] for start in starts]).detach().clone()
            stacked[id(old)] = nn.Parameter(rows)
        for module in self.model.modules():
            for name, p in list(module._parameters.items()):
                if id(p) in stacked:
                    module._parameters[name] = stacked[id(p)]
        device = next(iter(stacked.values())).device
        self.alive = torch.ones(len(starts), dtype=torch.bool, device=device)

    def losses(
        self, inputs: Any, targets: Tensor, weights: Tensor | None = None,
        noise: Mapping[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mean loss of a batch for every chain, (chains,).

        Args:
            inputs: The inputs of a batch.
            targets: Its targets.
            weights: The weights of its examples, or None.
            noise: The likelihood's own parameters by name, a row for each chain; if None, or without any,
                the present ones for all.
        """
        # vmap does not know other formats everywhere.
        positional, named = arguments(arranged(inputs, "contiguous"))

        def one(chain: Weights, level: Weights) -> Tensor:
            own = own_weights(self._net, chain)
            outputs = functional_call(self._net, own, positional, named)
            loss = _Loss(self._likelihood, self._output, weights)
            levels = {f"likelihood.{name}": value for name, value in level.items()}
            found: Tensor = functional_call(loss, levels, (outputs, targets))
            return found

        stacked: Weights = {**trainable(self.model)}
        with uncompiled():
            losses: Tensor = vmap(one, randomness="different")(stacked, dict(noise or {}))
        return losses

    @torch.no_grad()
    def check_gradients(self) -> list[int]:
        """Discard chains whose gradient is not finite and return their numbers."""
        finite = self.alive.clone()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            finite &= torch.isfinite(gradient).reshape(len(gradient), -1).all(1)
        died = (self.alive & ~finite).nonzero().flatten().tolist()
        self.alive = finite
        if not bool(finite.all()):
            # Zero failed chains so that they stay finite.
            for gradient in gradients:
                gradient[~finite] = 0
            for p in trainable(self.model).values():
                p[~finite] = 0
        return [int(number) for number in died]

    def weights(self, chain: int) -> Weights:
        """Return the weights of one chain."""
        return {name: p.detach()[chain].clone() for name, p in trainable(self.model).items()}
