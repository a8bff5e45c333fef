"""A hypernetwork: small networks that generate the weights of another one from noise.

K. Ukai, T. Matsubara and K. Uehara, Bayesian estimation and model averaging of convolutional neural
networks by hypernetwork, Nonlinear Theory and Its Applications 10(1), 2019.

| symbol | here | from |
| --- | --- | --- |
| z ~ p(z) | `latent`, one draw per batch | section 3.1 |
| g(z; θ) = W2·relu(W1·z), no biases | `net.first`, `net.second` | sections 3.3, 4.1 |
| z_dim, h_dim | `latent_dim`, `hidden_dim` | section 4.1 |
| all-in-one, block-wise, layer-wise | `strategy` | section 3.2 |

The loss is the cross-entropy alone: θ has a Gaussian prior (weight decay on W1 and W2), the generated
weights have none of their own, and there is no KL term. It is MAP on θ with an implicit q(w).

Deviations from the paper: the projection of a shortcut is a convolution of its block and is generated
too; weight decay leaves norm layers' scales and shifts alone, as everywhere in this library.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.parameters import trainable
from torchbayes.core.registry import register
from torchbayes.posterior import Weights, Wrapper, snapshot
from torchbayes.posterior.generated import Generated, hidden
from torchbayes.posterior.latents import Latent, uniform_positive
from torchbayes.variational.residual_blocks import (
    default_layers,
    find_blocks,
    latent_groups,
    named_layers,
)
from torchbayes.variational.selection import aliases, places, tree

__all__ = ["STRATEGIES", "Hypernet"]

STRATEGIES = ("all-in-one", "block-wise", "layer-wise")


@register(
    "hypernet", family="ensemble, masks, generator", posterior="Generated",
    summary="small networks that generate the weights from noise",
    paper="Ukai et al. 2019, Bayesian estimation and model averaging of CNNs by hypernetwork",
)  # fmt: skip
class Hypernet(Wrapper):
    """Any network with some of its weights generated from noise, one draw per call.

    Outputs are the network's own, so any loss and any torch optimiser serve. `HypernetSGD` does what
    `torch.optim.SGD` does at a fraction of the time and memory: the gradient of W2, 32 times the size of
    what it generates, is an outer product and never made.

    Weights that are not generated (stem, classifier, norm layers, biases) are ordinary parameters. Every
    call is a draw, in evaluation mode too: there is no better single set of weights than one of the draws.

    Args:
        model: The network, whose other weights are shared, not copied.
        strategy: `"all-in-one"` (one latent for all weights), `"block-wise"` (one for each residual
            block) or `"layer-wise"` (one for each weight).
        latent: p(z): one of `torchbayes.latents`, or any function of a size and a generator. U(0, 1), the
            default, has the paper's lowest error of a draw; N(0, 1) has draws that differ more, but with it
            a network without batch norm, such as LeNet-5, hardly learns in its first epochs, or diverges.
        latent_dim: The size of z.
        hidden_dim: The hidden units of every generator.
        layers: The names of the layers, or of single weights, to generate. By default every convolution
            inside residual blocks; in a network without blocks every matrix or kernel but the last layer's.
        blocks: The names of the residual blocks, where they are not found by themselves: elements of an
            `nn.Sequential` or `nn.ModuleList` with two convolutions or more.
        generator: Where initial weights and latents come from; torch's global generator if not given. Its
            state is part of `state_dict()`.

    Attributes:
        generated: The names of the generated weights.
        blocks: The names of the residual blocks.
        groups: For every generated weight the name of its latent.

    Raises:
        ValueError: If the network has no such layers or blocks, or an argument is not as described.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.models import wide_resnet
        >>> net = tb.Hypernet(wide_resnet(10, 1), latent=tb.latents.uniform_positive)
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> net.generated[:2]
        ['layer1.0.conv1.weight', 'layer1.0.conv2.weight']
        >>> net.posterior()
        Generated(78,337 weights of WideResNet, 76,288 of them generated)
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: str = "all-in-one",
        latent: Latent = uniform_positive,
        latent_dim: int = 32,
        hidden_dim: int = 32,
        *,
        layers: Iterable[str] | None = None,
        blocks: Iterable[str] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}: expected {' or '.join(STRATEGIES)}")
        for label, size in (("latent_dim", latent_dim), ("hidden_dim", hidden_dim)):
            if size < 1:
                raise ValueError(f"{label} is {size}: expected at least 1")
        if not callable(latent):
            raise TypeError(
                f"latent is {latent!r}: expected one of torchbayes.latents or a function (size, generator)"
            )
        own = trainable(model)
        self.blocks = find_blocks(model, blocks)
        if strategy == "block-wise" and not self.blocks:
            raise ValueError(
                f"{type(model).__name__} has no residual blocks for strategy 'block-wise': name them in "
                "blocks=… or choose 'all-in-one' or 'layer-wise'"
            )
        self.generated = (
            default_layers(model, self.blocks) if layers is None else named_layers(model, layers)
        )
        self.strategy, self.latent, self.latent_dim = strategy, latent, latent_dim
        self.groups = latent_groups(self.generated, self.blocks, strategy)
        self.generator = generator
        weights: Weights = {name: own[name] for name in self.generated}
        # He's uniform bound √(6 / fan in); a tenth of it in the output layer (section 4.1).
        self.first = tree(
            {
                name: _uniform(w, (hidden_dim, latent_dim), math.sqrt(6 / latent_dim), generator)
                for name, w in weights.items()
            }
        )
        self.second = tree(
            {
                name: _uniform(
                    w, (*w.shape, hidden_dim), 0.1 * math.sqrt(6 / hidden_dim), generator
                )
                for name, w in weights.items()
            }
        )
        self._aliases = aliases(model, weights)
        self._places = [places(m, self.generated) for m in (model, self.first, self.second)]
        self.in_place = False
        self.drawn: dict[str, tuple[Tensor, Tensor]] = {}

    def _triples(self) -> list[tuple[str, Tensor, Tensor, Tensor]]:
        """Name, the network's own parameter, W1 and W2 of every generated weight."""
        own, first, second = ([getattr(m, leaf) for m, leaf in p] for p in self._places)
        return list(zip(self.generated, own, first, second, strict=True))

    def latents(self) -> Weights:
        """A draw of z for every group of weights."""
        like = self._triples()[0][2]
        return {
            group: self.latent(self.latent_dim, self.generator).to(like)
            for group in dict.fromkeys(self.groups.values())
        }

    def generate(self, latents: Weights) -> Weights:
        """The weights w = W2·relu(W1·z) that latents give, with their graph.

        Args:
            latents: z of every group, as `latents()` gives them.
        """
        with self._full_precision():
            return {
                name: torch.matmul(second, hidden(first, latents[self.groups[name]]))
                for name, _, first, second in self._triples()
            }

    def _full_precision(self) -> Any:
        """Where weights are made; autocast rounds them where the network uses them."""
        device = self._triples()[0][2].device.type
        if not torch.amp.is_autocast_available(device):
            return contextlib.nullcontext()
        return torch.autocast(device, enabled=False)

    @torch.no_grad()
    def draw_in_place(self) -> None:
        """Write one draw into the network's own parameters.

        The network is then an ordinary one with these weights. `drawn` keeps z and the hidden activation
        of every weight, of which and of the network's gradients `HypernetSGD` makes its step.
        """
        latents = self.latents()
        with self._full_precision():
            for name, own, first, second in self._triples():
                activation = hidden(first, latents[self.groups[name]])
                self.drawn[name] = (latents[self.groups[name]], activation)
                if own.is_contiguous():
                    torch.mv(second.view(-1, len(activation)), activation, out=own.view(-1))
                else:
                    own.copy_(torch.matmul(second, activation))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network under one draw of its weights."""
        if self.in_place and self.training:
            if not self.drawn:
                self.draw_in_place()
            return self.model(*args, **kwargs)
        drawn = self.generate(self.latents())
        weights = {alias: w for name, w in drawn.items() for alias in self._aliases[name]}
        return torch.func.functional_call(self.model, weights, args, kwargs, tie_weights=False)

    def posterior(self) -> Generated:
        """A copy of what has been learned so far; the network's buffers are part of it."""
        triples = self._triples()
        return Generated(
            {n: t for n, t in snapshot(self.model).items() if n not in self.groups},
            {name: first for name, _, first, _ in triples},
            {name: second for name, _, _, second in triples},
            self.groups,
            self.latent,
            model_name=type(self.model).__name__,
        )

    def get_extra_state(self) -> Tensor:
        """The generator's state, for `state_dict()`."""
        if self.generator is None:
            return torch.empty(0, dtype=torch.uint8)
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Go on with the generator's state."""
        self.drawn = {}
        if self.generator is not None and len(state):
            self.generator.set_state(state.cpu())

    def extra_repr(self) -> str:
        """Say what is generated."""
        count = sum(own.numel() for _, own, _, _ in self._triples())
        name = getattr(self.latent, "__name__", "latent")
        return (
            f"{count:,} generated weights in {len(self.generated)} tensors, {self.strategy}, {name}"
        )


def _uniform(
    like: Tensor, shape: tuple[int, ...], bound: float, generator: torch.Generator | None
) -> Tensor:
    result = torch.empty(shape, dtype=like.dtype, device=like.device)
    if generator is not None and generator.device != like.device:
        return result.copy_(
            torch.empty(shape, dtype=like.dtype, device=generator.device).uniform_(
                -bound, bound, generator=generator
            )
        )
    return result.uniform_(-bound, bound, generator=generator)
