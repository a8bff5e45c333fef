"""Bayes by Backprop: an independent Gaussian over every weight, trained by gradient descent.

C. Blundell, J. Cornebise, K. Kavukcuoglu and D. Wierstra, Weight Uncertainty in Neural Networks, ICML 2015.

| symbol | here | from |
| --- | --- | --- |
| μ | the network's own parameters | section 3.2 |
| ρ, σ = log(1 + exp ρ) | `net.rho`, `net.posterior().std()` | section 3.2 |
| w = μ + σ∘ε | one forward pass | section 3.2 |
| KL[q(w) ‖ P(w)] | `net.kl()` | Eq. (1) |
| F = KL − E[log P(D ∣ w)] | `loss(net(x), y) + net.kl() / train_size`, times train_size | Eq. (1) |

Deviations from the paper: the KL term of a Gaussian prior is computed exactly instead of from the draw
(for other priors from the draw, Eq. (2)); norm layers' scales and shifts are deterministic by default.

Without an `init_std`, σ is at most 0.17/√(fan-in), as in VOGN without a damping, and starts at a quarter of
that: the KL term alone would widen every weight that the data do not determine to the prior's σ, and with so
much noise a deep network, or one for data with little noise, does not learn. A larger ρ is set back to the
bound before it is used.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchbayes.core.batch import untraced
from torchbayes.core.declaration import register
from torchbayes.core.fan_in import fan_ins, least_precision
from torchbayes.core.parameters import Params
from torchbayes.core.shards import refuse_sharded
from torchbayes.core.workspace import Workspace
from torchbayes.posterior import Gaussian, Weights
from torchbayes.prior import GaussianPrior, Prior, as_prior
from torchbayes.variational.draw import Draw, Spread
from torchbayes.variational.estimators import Estimator, shared_draw
from torchbayes.variational.flat_weights import Slab, slabs_of
from torchbayes.variational.kl import kl_term
from torchbayes.variational.selection import RandomWrapper, chosen, tree
from torchbayes.variational.softplus import bounds, inverse_softplus, softplus

__all__ = ["MeanField"]

# MOPED gives a weight of exactly 0 no spread, from which it could never recover.
_MOPED_FLOOR = 1e-3


class _Scratch:
    """What a mean field keeps between calls besides its state; copies are empty.

    Attributes:
        space: Large tensors for reuse.
        last: The last draw.
        asked: Whether `kl` was called for the last draw, and so is likely to be for the next.
    """

    def __init__(self) -> None:
        self.space = Workspace()
        self.last: Draw | None = None
        self.asked = True
        self._slabs: list[Slab] = []
        self._means: list[Tensor] = []

    def slabs(self, names: list[str], means: list[Tensor]) -> list[Slab]:
        """Return the weights in slabs, which are kept as long as the tensors are the same."""
        if len(means) != len(self._means) or not all(map(operator.is_, means, self._means)):
            self._slabs, self._means = slabs_of(names, means), means
        return self._slabs

    def __deepcopy__(self, memo: dict[int, Any]) -> _Scratch:
        return _Scratch()

    def __reduce__(self) -> tuple[type[_Scratch], tuple[()]]:
        return _Scratch, ()


@register(
    "bbb", family="a Gaussian", posterior="Gaussian", target="mean field",
    summary="a Gaussian of its own over every weight, by backpropagation",
    paper="Blundell et al. 2015, Weight Uncertainty in Neural Networks",
)  # fmt: skip
class MeanField(RandomWrapper):
    """Any network with an independent Gaussian over each of its weights (Bayes by Backprop).

    In training mode each call draws the weights once. In evaluation mode, and inside `mean_mode()`, it
    runs the network with the mean weights; inside `draw_mode()` it always draws. Outputs are the network's
    own, so any loss and any torch optimiser will do:

        loss = F.cross_entropy(net(x), y) + net.kl() / train_size

    The network's own parameters are the means: it remains usable on its own, and its class and the names
    of its weights do not change. Frozen parameters are left alone, tied ones share one distribution, and
    norm layers' scales and shifts are trained without one.

    Args:
        model: The network, whose weights are shared, not copied.
        prior: Prior of the weights: a `Prior`, or the precision δ of N(0, 1/δ).
        estimator: How examples share the noise: `shared_draw`, `local_reparameterisation` or `flipout`.
            Used in training mode; in evaluation mode all examples share a draw.
        init_std: Initial standard deviation of every weight, which is then free. If None, a quarter of
            0.17/√(fan-in), which is the largest that it may become.
        moped: Initial standard deviation as a share of the weight's size, in place of `init_std`, for a
            trained network: σ = moped · |w|, at least moped / 1000 (MOPED: Krishnan et al., Specifying Weight
            Priors in Bayesian Deep Neural Networks with Empirical Bayes, AAAI 2020; its prior is
            `GaussianPrior(mean=tb.snapshot(model))`).
        params: Weights to be random: names or patterns, such as `"head.*"` for the last layer only,
            modules or parameters. The rest is trained without a distribution, unless it is frozen. By
            default all trainable weights except norm layers'.
        generator: Source of the draws; torch's global generator if not given. Its state is part of
            `state_dict()`.

    Attributes:
        prior: The prior; may be replaced.
        estimator: The estimator; may be replaced.
        rule_hits: Number of uses of each weight by the estimator's low-variance rule in the last call.

    Raises:
        ValueError: If the network has no trainable weights, or an argument is not as described.

    Example:
        >>> import torch, torchbayes as tb
        >>> net = tb.MeanField(torch.nn.Linear(3, 1), prior=tb.GaussianPrior(precision=1.0), init_std=0.1)
        >>> x = torch.ones(1, 3)
        >>> bool(net(x) == net(x)), bool(net.eval()(x) == net(x))
        (False, True)
        >>> net.posterior()
        Gaussian(4 weights of Linear)
    """

    rho: nn.Module
    rate = 1e-2
    """The largest learning rate that `MLE` takes if none is given."""

    def __init__(
        self,
        model: nn.Module,
        prior: Prior | float = 1.0,
        estimator: Estimator = shared_draw,
        *,
        init_std: float | None = None,
        moped: float | None = None,
        params: Params | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        refuse_sharded(
            model.parameters(),
            f"{type(model).__name__} is sharded (fully_shard), but MeanField needs whole weights: use IVON, "
            "a sampler or SWAG, or keep the whole model in every process",
        )
        if init_std is not None and not (init_std > 0 and math.isfinite(init_std)):
            raise ValueError(f"init_std is {init_std:g}: expected a standard deviation above 0")
        if moped is not None and not (moped > 0 and math.isfinite(moped)):
            raise ValueError(f"moped is {moped:g}: expected a share of a weight's size above 0")
        if not callable(estimator):
            raise TypeError(
                f"estimator is {estimator!r}: expected shared_draw, local_reparameterisation or flipout"
            )
        prior = as_prior(prior)
        if isinstance(prior, GaussianPrior) and prior.scalar == 0:
            raise ValueError("prior is 0: without a prior the spread of the weights has no bound")
        weights = chosen(model, params)
        fans = fan_ins(model)
        bounds_of = {name: least_precision(fans[id(p)]) ** -0.5 for name, p in weights.items()}
        rho = tree(
            {
                name: _initial_rho(p, bounds_of[name] / 4 if init_std is None else init_std, moped)
                for name, p in weights.items()
            }
        )
        super().__init__(model, weights, generator, rho=rho)
        free = init_std is not None or moped is not None
        self._largest = None if free else [_rho(bounds_of[name]) for name in weights]
        self.prior, self.estimator = prior, estimator
        self.rule_hits: Counter[str] = Counter()
        self._drawing: bool | None = None
        self._noticed = False
        self._scratch = _Scratch()
        if isinstance(prior, GaussianPrior):
            for name, weight in weights.items():
                prior.moments(name, weight.detach())  # raises if the prior has none for this weight

    def _draw(self, spread: Spread = Spread.NONE, *, noise: bool = True) -> Draw:
        asked, self._scratch.asked = self._scratch.asked, False
        self._scratch.last = None  # so that its buffers are free for this draw
        means, rhos = self._current()
        if self._largest is not None and self.training:
            with torch.no_grad():
                torch._foreach_clamp_max_([rho.detach() for rho in rhos], self._largest)
        slabs = self._scratch.slabs(self._names, means)
        self._scratch.last = draw = Draw(
            self._scratch.space, slabs, means, rhos, self.prior,
            spread=spread, noise=noise, kl=asked, generator=self.generator,
        )  # fmt: skip
        return draw

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network: under one draw in training mode, at the mean in evaluation mode."""
        if not (self.training if self._drawing is None else self._drawing):
            return self.model(*args, **kwargs)
        estimator = self.estimator if self.training else shared_draw
        rule = estimator(self.generator)
        draw = self._draw(rule.spread)
        with rule.over(draw.drawn, _first_length(args, kwargs)):
            outputs = self._call({w.name: w.sample for w in draw.drawn}, args, kwargs)
        draw.release()
        self.rule_hits = rule.hits
        if rule.spread is not Spread.NONE and not rule.hits and not self._noticed:
            self._noticed = True
            warnings.warn(
                f"{estimator.__name__} found no linear or convolution layer in "
                f"{type(self.model).__name__} that it can be used for, so all examples of a batch share one "
                "draw: estimator=shared_draw does the same and is faster",
                stacklevel=2,
            )
        return outputs

    @untraced
    def kl(self) -> Tensor:
        """Return KL(q ‖ prior) summed over the random weights, in nats: a scalar to divide by `train_size`.

        Exact for a `GaussianPrior`. For any other prior it is log q(w) − log p(w) of the last draw, the
        one that the likelihood was computed with, or else of a new draw.
        """
        draw, self._scratch.asked = self._scratch.last, True
        if draw is None or draw.prior is not self.prior or not draw.current():
            draw = self._draw(noise=not kl_term(self.prior).closed)
        return draw.kl()

    @contextmanager
    def _mode(self, drawing: bool) -> Iterator[None]:
        before, self._drawing = self._drawing, drawing
        try:
            yield
        finally:
            self._drawing = before

    def mean_mode(self) -> Any:
        """Use the mean weights inside the context, also in training mode."""
        return self._mode(False)

    def draw_mode(self) -> Any:
        """Draw in every call inside the context, also in evaluation mode."""
        return self._mode(True)

    @torch.no_grad()
    def std(self) -> Weights:
        """Return σ of every random weight."""
        result: Weights = {}
        for name, rho in zip(self._names, self._current()[1], strict=True):
            result[name] = torch.empty_like(rho)
            columns = [result[name]], [torch.empty_like(rho)]
            self._scratch.space.apply(softplus, columns, [[rho]], **bounds(rho.dtype))
        return result

    def posterior(self) -> Gaussian:
        """Return a copy of the current posterior; the network's buffers are part of the mean."""
        mean, about = self._snapshot()
        return Gaussian(mean, self.std(), **about)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state like any module."""
        self._scratch = _Scratch()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MeanField:
        self._scratch = _Scratch()  # other devices and types need other buffers
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Summarise the random weights."""
        count = sum(rho.numel() for rho in self.rho.parameters())
        return f"{count:,} random weights, {self.estimator.__name__}, {type(self.prior).__name__}"


def _rho(std: float) -> float:
    return float(inverse_softplus(torch.tensor(std, dtype=torch.float64)))


def _initial_rho(weight: Tensor, init_std: float, moped: float | None) -> Tensor:
    weight = weight.detach()
    if moped is not None:
        return inverse_softplus(weight.abs().clamp_min(_MOPED_FLOOR).mul(moped))
    return inverse_softplus(torch.full_like(weight, init_std))


def _first_length(args: Any, kwargs: Any) -> int | None:
    """Return the number of examples in a batch: dimension 0 of the first tensor that has one."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return next((len(tensor) for tensor in tensors if tensor.dim() > 0), None)
