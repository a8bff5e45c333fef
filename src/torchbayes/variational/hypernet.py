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
weights have none of their own, and there is no KL term. It is MAP on θ with an implicit q(w). In memory W2
is transposed, one hidden unit after the other: what a unit that is off does not need is then in one piece.

Deviations from the paper: the projection of a shortcut is a convolution of its block and is generated
too; weight decay leaves norm layers' scales and shifts alone, as everywhere in this library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.autocast import no_autocast
from torchbayes.core.batch import untraced
from torchbayes.core.declaration import register
from torchbayes.core.parameters import Params, check_types, trainable
from torchbayes.posterior import Weights
from torchbayes.posterior.generated import Generated, hidden
from torchbayes.posterior.latents import Latent, uniform_positive
from torchbayes.variational.hidden_units import HiddenUnits, fits
from torchbayes.variational.residual_blocks import (
    default_layers,
    find_blocks,
    latent_groups,
    named_layers,
)  # fmt: skip
from torchbayes.variational.selection import RandomWrapper, tree

__all__ = ["STRATEGIES", "Hypernet"]

STRATEGIES = ("all-in-one", "block-wise", "layer-wise")


@register(
    "hypernet", family="ensemble, masks, generator", posterior="Generated",
    summary="small networks that generate the weights from noise",
    paper="Ukai et al. 2019, Bayesian estimation and model averaging of CNNs by hypernetwork",
)  # fmt: skip
class Hypernet(RandomWrapper):
    """Any network with some of its weights generated from noise, one draw per call.

    Outputs are the network's own, so any loss and any torch optimiser will do. `HypernetSGD` does what
    `torch.optim.SGD` does in a fraction of the time and memory: the gradient of W2, 32 times the size of
    what it generates, is an outer product and never formed.

    Weights that are not generated (stem, classifier, norm layers, biases) are ordinary parameters. Every
    call draws, in evaluation mode too: no single set of weights is better than one of the draws.

    Args:
        model: The network, whose other weights are shared, not copied.
        strategy: `"all-in-one"` (one latent for all weights), `"block-wise"` (one for each residual
            block) or `"layer-wise"` (one for each weight).
        latent: p(z): one of `torchbayes.latents`, or any function of a size and a generator. U(0, 1), the
            default, has the lowest error per draw in the paper; draws with N(0, 1) differ more, but a
            network without batch norm, such as LeNet-5, then hardly learns in its first epochs, or diverges.
        latent_dim: Size of z.
        hidden_dim: Number of hidden units of every generator.
        layers: Names or patterns of the layers, or of single weights, to generate. By default every
            convolution inside residual blocks; in a network without blocks every matrix or kernel except
            the last layer's.
        blocks: Names of the residual blocks. By default the elements of an `nn.Sequential` or
            `nn.ModuleList` with two or more convolutions.
        generator: Source of initial weights and latents; torch's global generator if not given. Its state
            is part of `state_dict()`.

    Attributes:
        first: W1 of every generated weight, (hidden_dim, latent_dim), as `first.NAME`.
        second: W2 of every generated weight, (hidden_dim, *its shape), as `second.NAME`.
        generated: Names of the generated weights.
        blocks: Names of the residual blocks.
        groups: Name of the latent of every generated weight.

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

    first: nn.Module
    second: nn.Module

    def __init__(
        self,
        model: nn.Module,
        strategy: str = "all-in-one",
        latent: Latent = uniform_positive,
        latent_dim: int = 32,
        hidden_dim: int = 32,
        *,
        layers: Params | None = None,
        blocks: Iterable[str] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}: expected {' or '.join(STRATEGIES)}")
        for label, size in (("latent_dim", latent_dim), ("hidden_dim", hidden_dim)):
            if size < 1:
                raise ValueError(f"{label} is {size}: expected at least 1")
        if not callable(latent):
            raise TypeError(
                f"latent is {latent!r}: expected one of torchbayes.latents or a function (size, generator)"
            )
        found = find_blocks(model, blocks)
        if strategy == "block-wise" and not found:
            raise ValueError(
                f"{type(model).__name__} has no residual blocks for strategy 'block-wise': name them in "
                "blocks=… or choose 'all-in-one' or 'layer-wise'"
            )
        names = default_layers(model, found) if layers is None else named_layers(model, layers)
        own = trainable(model)
        check_types(model, own)
        weights: Weights = {name: own[name] for name in names}
        # He's uniform bound √(6 / fan in); a tenth of it in the output layer (section 4.1).
        inner, outer = math.sqrt(6 / latent_dim), 0.1 * math.sqrt(6 / hidden_dim)
        w1 = {
            n: _uniform(w, (hidden_dim, latent_dim), inner, generator) for n, w in weights.items()
        }
        w2 = {
            n: _uniform(w, (*w.shape, hidden_dim), outer, generator).movedim(-1, 0).contiguous()
            for n, w in weights.items()
        }
        super().__init__(model, weights, generator, first=tree(w1), second=tree(w2))
        self.blocks, self.generated = found, names
        self.strategy, self.latent, self.latent_dim = strategy, latent, latent_dim
        self.groups = latent_groups(names, found, strategy)
        self.in_place = False
        self.drawn: dict[str, tuple[Tensor, Tensor]] = {}
        # By the names of the large W2 that `HypernetSGD` trains.
        self.units: dict[str, HiddenUnits] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"units": {}}

    def _triples(self) -> list[tuple[str, Tensor, Tensor, Tensor]]:
        """Return name, the network's own parameter, W1 and W2 of every generated weight."""
        return list(zip(self.generated, *self._current(), strict=True))

    def latents(self) -> Weights:
        """Draw z for every group of weights."""
        like = self._current()[1][0]
        return {
            group: self.latent(self.latent_dim, self.generator).to(like)
            for group in dict.fromkeys(self.groups.values())
        }

    def generate(self, latents: Weights) -> Weights:
        """Return the weights w = W2·relu(W1·z), with their graph.

        Args:
            latents: z of every group, from `latents()`.
        """
        triples = self._triples()
        # In full precision: autocast rounds the weights where the network uses them.
        with no_autocast(triples[0][2].device):
            return {
                name: torch.tensordot(hidden(first, latents[self.groups[name]]), second, dims=1)
                for name, _, first, second in triples
            }

    @torch.no_grad()
    def draw_in_place(self) -> None:
        """Write one draw into the network's own parameters.

        The network is then an ordinary one with these weights. `drawn` keeps z and the hidden activation
        of every weight, from which, with the network's gradients, `HypernetSGD` computes its step.
        """
        latents, triples = self.latents(), self._triples()
        with no_autocast(triples[0][2].device):
            for name, own, first, second in triples:
                activation = hidden(first, latents[self.groups[name]])
                self.drawn[name] = (latents[self.groups[name]], activation)
                if name in self.units and fits(second):
                    self.units[name].draw(second, activation, own)
                elif own.is_contiguous():
                    torch.mv(second.flatten(1).t(), activation, out=own.view(-1))
                else:
                    own.copy_(torch.tensordot(activation, second, dims=1))

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network under one draw of its weights."""
        if self.in_place and self.training:
            if not self.drawn:
                self.draw_in_place()
            return self.model(*args, **kwargs)
        return self._call(self.generate(self.latents()), args, kwargs)

    def posterior(self) -> Generated:
        """Return a copy of the current posterior, the network's buffers included."""
        _, first, second = (dict(zip(self.generated, p, strict=True)) for p in self._current())
        second = {name: tensor.movedim(0, -1) for name, tensor in second.items()}
        held, about = self._snapshot()
        others = {n: t for n, t in held.items() if n not in self.groups}
        return Generated(others, first, second, self.groups, self.latent, **about)

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a generator's state."""
        self.drawn = {}
        super().set_extra_state(state)

    def extra_repr(self) -> str:
        """Summarise the generated weights."""
        count, tensors = sum(own.numel() for own in self._current()[0]), len(self.generated)
        name = getattr(self.latent, "__name__", "latent")
        return f"{count:,} generated weights in {tensors} tensors, {self.strategy}, {name}"


def _uniform(
    like: Tensor, shape: tuple[int, ...], bound: float, generator: torch.Generator | None
) -> Tensor:
    device = like.device if generator is None else generator.device
    result = torch.empty(shape, dtype=like.dtype, device=device)
    return result.uniform_(-bound, bound, generator=generator).to(like.device)
