"""Several chains of a small network run as one: stacked weights, losses through `torch.func.vmap`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from torchbayes.core.batch import arguments, map_leaves, map_tensors, uncompiled
from torchbayes.core.late import Late
from torchbayes.core.names import own_weights
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.core.parameters import trainable
from torchbayes.likelihood import Likelihood
from torchbayes.likelihood.base import checked_weights
from torchbayes.posterior import Weights
from torchbayes.prior import GaussianPrior, Prior
from torchbayes.train.method import loss_of
from torchbayes.train.throughput import arranged

__all__ = ["StackedChains", "StackedPrior"]


def _dimension(leaf: Any) -> int | None:
    """Return along which dimension what belongs to each chain is stacked."""
    return 0 if isinstance(leaf, Tensor) else None


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
        alike = isinstance(prior, GaussianPrior) and prior.shared is not None
        return prior if alike else cls(prior)

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
        left: Their numbers; those of an accelerator are known one step later.

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
        self._stacked: Weights = {
            **trainable(self.model)
        }  # by names that are not looked up at every step
        device = next(iter(stacked.values())).device
        self.alive = torch.ones(len(starts), dtype=torch.bool, device=device)
        self.left = list(range(len(starts)))
        self._late = Late()

    def losses(
        self, inputs: Any, targets: Tensor, weights: Tensor | None = None,
        noise: Mapping[str, Tensor] | None = None, *, apart: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the mean loss of a batch for every chain, (chains,).

        Args:
            inputs: The inputs of a batch.
            targets: Its targets.
            weights: The weights of its examples, or None.
            noise: The likelihood's own parameters by name, a row for each chain; if None, or without any,
                the present ones for all.
            apart: Whether each chain has a batch of its own, as large as the others': they follow each other
                in `inputs`, `targets` and `weights`, which then hold tensors only.
        """
        # vmap does not know other formats everywhere.
        batch = arguments(arranged(inputs, "contiguous")), targets, weights
        if apart:
            if weights is not None:
                checked_weights(weights, len(weights))
            batch = map_tensors(batch, lambda t: t.unflatten(0, (len(self.alive), -1)))

        def one(chain: Weights, level: Weights, batch: Any) -> Tensor:
            (positional, named), targets, weights = batch
            own = own_weights(self._net, chain)
            outputs = functional_call(self._net, own, positional, named)
            loss = _Loss(self._likelihood, self._output, weights)
            levels = {f"likelihood.{name}": value for name, value in level.items()}
            found: Tensor = functional_call(loss, levels, (outputs, targets))
            return found

        given = (0, 0, map_leaves(batch, _dimension) if apart else None)
        with uncompiled():
            losses: Tensor = vmap(one, given, randomness="different")(
                self._stacked, dict(noise or {}), batch
            )
        return losses

    @torch.no_grad()
    def check_gradients(self) -> list[int]:
        """Discard chains whose gradient is not finite and return their numbers.

        On an accelerator, the numbers are those of the step before.
        """
        finite = self.alive.clone()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            finite &= torch.isfinite(gradient).reshape(len(gradient), -1).all(1)
        self.alive = finite
        if finite.device.type != "cpu":
            died = self.look()
            self._late.exchange({str(i): fine for i, fine in enumerate(finite.unbind())}, None)
            for rows in (*gradients, *trainable(self.model).values()):
                mask = finite.view(-1, *[1] * (rows.dim() - 1))
                rows.copy_(torch.where(mask, rows, 0))
            return died
        died = self._note(finite.tolist())
        if not bool(finite.all()):
            # Zero failed chains so that they stay finite.
            for gradient in gradients:
                gradient[~finite] = 0
            for p in trainable(self.model).values():
                p[~finite] = 0
        return died

    def look(self) -> list[int]:
        """Look which chains an accelerator has found dead in the last step, if it has not been done."""
        read = self._late.rest()
        return [] if read is None else self._note([value > 0 for value in read[0].values()])

    def _note(self, alive: list[bool]) -> list[int]:
        """Note which chains are left, and return the others of those that were."""
        died = [number for number in self.left if not alive[number]]
        self.left = [number for number in self.left if alive[number]]
        return died

    def revive(self, alive: Tensor) -> None:
        """Continue from a checkpoint's `alive`."""
        self.alive, self._late = alive.to(self.alive.device), Late()
        self.left = [number for number, fine in enumerate(alive.tolist()) if fine]

    def weights(self, chain: int) -> Weights:
        """Return the weights of one chain."""
        return {name: p.detach()[chain].clone() for name, p in trainable(self.model).items()}
