"""The posterior of Monte-Carlo dropout: weights, and the masks that are drawn with them.

All examples share one mask, so that a draw is one function of the input. For a single example its
distribution is the same as that of masks drawn per example.

A network's own dropout is found where it happens, in the calls of `torch.nn.functional.dropout` and its
relatives, which say "not training" in evaluation mode: the network is in that mode, batch norm included, and
the masks are applied nevertheless. What does not call them in that mode stays off: the dropout between the
layers of `nn.LSTM` and `nn.GRU`, and code that sets p to 0 itself, as the attention of transformers does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchbayes.core.batch import uncompiled
from torchbayes.core.names import named_modules
from torchbayes.core.opened import opened
from torchbayes.posterior.posterior import StoredPosterior, Weights

__all__ = [
    "DropoutPosterior",
    "OwnDropout",
    "check_share",
    "dropped_layers",
    "hooked",
    "own_dropout_layers",
]

_SEED = "dropout.seed"
_Drop = Callable[[Tensor, int], Tensor]  # outputs and their batch dimension
_LAYERS = (nn.Linear, _ConvNd, nn.RNNBase)
_ELEMENTS = (F.dropout, torch.dropout)
_CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
_ALPHA = (F.alpha_dropout, torch.alpha_dropout)
_ALPHA_CHANNELS = (F.feature_alpha_dropout, torch.feature_alpha_dropout)
_DROPS = {*_ELEMENTS, *_CHANNELS, *_ALPHA, *_ALPHA_CHANNELS}
_SELU_LIMIT = -1.7580993408473766  # what a dropped activation of a self-normalising network becomes


def own_dropout_layers(model: nn.Module) -> list[str]:
    """Name the network's modules that drop something: dropout layers, and attention with dropout."""
    found = []
    for name, _, module in named_modules(model):
        attends = isinstance(module, nn.MultiheadAttention) and module.dropout > 0
        if attends or (isinstance(module, _DropoutNd) and module.p > 0):
            found.append(name)
    return found


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


def check_share(p: float | None) -> float:
    """Return `p` if it is a valid probability of dropping."""
    if p is None or not 0 < p < 1:
        raise ValueError(f"p is {p}: expected the share of activations to drop, between 0 and 1")
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
        hooks.enter_context(uncompiled())  # the compiler does not look for new hooks
        yield


class OwnDropout(TorchFunctionMode):
    """Turns a network's own dropout on inside the block, whatever its mode.

    Args:
        p: Probability that an activation is dropped; that of the call if None.
        seed: Seed of the masks, one for all examples; if None, a mask per example from torch's generator.
        examples: Number of examples of the pass.
    """

    def __init__(self, p: float | None, seed: int | None = None, examples: int = 1) -> None:
        super().__init__()
        self.p, self.examples = p, examples
        self._seed = seed
        self._generator: torch.Generator | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a torch function; replace one that drops activations in training."""
        kwargs = {} if kwargs is None else kwargs
        if func in _DROPS:
            x, p = _arguments(func, *args, **kwargs)
            return self.drop(func, x, p)
        if func is F.multi_head_attention_forward:
            inside = opened(func)
            assert inside is not None
            with self:
                return inside(*args, **(kwargs | {"training": True}))
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def drop(self, func: Callable[..., Any], x: Tensor, p: float) -> Tensor:
        """Apply a mask to `x` as `func` would, a dropout function with probability p."""
        if p == 0.0:
            return x
        p = p if self.p is None else self.p
        if self._seed is None:
            dropped: Tensor = func(x, p, True)
            return dropped
        mask = self._mask(x, p, func in _CHANNELS or func in _ALPHA_CHANNELS)
        if func in _ALPHA or func in _ALPHA_CHANNELS:
            scale = ((1 - p) * (1 + p * _SELU_LIMIT**2)) ** -0.5
            kept = x * mask + _SELU_LIMIT * (1 - mask)
            return kept.mul_(scale).sub_(scale * _SELU_LIMIT * p)
        return x * mask.div_(1 - p)

    def _mask(self, x: Tensor, p: float, channels: bool) -> Tensor:
        """Draw a mask of 0 and 1 that is the same for every example; for whole channels if asked."""
        if self._generator is None:
            assert self._seed is not None
            self._generator = torch.Generator(x.device).manual_seed(self._seed)
        shape, n = list(x.shape), self.examples
        copies = 1
        if channels and x.dim() > 2:
            shape[2:] = [1] * (x.dim() - 2)
        if shape[0] == n:
            shape[0] = 1
        elif x.dim() > 1 and shape[1] == n:  # a sequence first, then the examples
            shape[1] = 1
        elif shape[0] % n == 0:  # such as the heads of every example
            shape[0], copies = shape[0] // n, n
        # Filled in one order whatever the outputs' memory format, so that pieces of a batch agree.
        mask = torch.empty(shape, dtype=x.dtype, device=x.device)
        mask.bernoulli_(1 - p, generator=self._generator)
        return mask if copies == 1 else mask.repeat(copies, *[1] * (mask.dim() - 1))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Attention whose weights are dropped; torch's function would draw the mask itself."""
        if dropout_p == 0.0 or self._seed is None:
            p = self.p if dropout_p > 0 and self.p is not None else dropout_p
            result: Tensor = F.scaled_dot_product_attention(
                query, key, value, attn_mask, p, is_causal, scale=scale, **kwargs
            )
            return result
        if kwargs.get("enable_gqa"):
            groups = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        scores = query @ key.transpose(-2, -1)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
        return self.drop(F.dropout, scores.softmax(-1), dropout_p) @ value


def _arguments(
    func: Any, input: Tensor, p: float | None = None, *_training: Any, **_kwargs: Any
) -> tuple[Tensor, float]:
    """Return the input of a dropout function and its probability, with the function's own default."""
    if p is not None:
        return input, float(p)
    return input, float(inspect.signature(func).parameters["p"].default)


class DropoutPosterior(StoredPosterior):
    """Trained weights and the dropout that was active while they were trained.

    Args:
        weights: The weights.
        p: Probability that an activation is dropped; if None, that of the network's own dropout.
        layers: The modules whose outputs are dropped.
        own: Whether these are the network's own dropout.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.
    """

    kind = "dropout"
    vmappable = False  # the seed of the masks must be a number
    shares_statistics = False  # the weights are those of training, and so was the dropout

    def __init__(
        self, weights: Weights, p: float | None, layers: Sequence[str], *, own: bool = False,
        model_name: str = "", rest: str = "",
    ) -> None:  # fmt: skip
        super().__init__(weights, model_name, rest)
        self.p: float | None = p if own and p is None else check_share(p)
        self.layers, self.own = list(layers), own

    def _random(self) -> Iterable[str]:
        return ()

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
        seed = int(draw[_SEED])
        if self.own:
            leaves = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim())
            examples = next(
                (t.shape[0] for t in leaves), 1
            )  # len() would make a constant of it in torch.export
            with OwnDropout(self.p, seed, max(1, examples)):
                return super().call(model, weights, *args, **kwargs)
        generator: torch.Generator | None = None
        p = check_share(self.p)

        def drop(outputs: Tensor, examples: int) -> Tensor:
            nonlocal generator
            if generator is None:
                generator = torch.Generator(outputs.device).manual_seed(seed)
            # Filled in one order whatever the outputs' memory format, so that pieces of a batch agree.
            one = outputs.narrow(examples, 0, 1)
            mask = torch.empty_like(one, memory_format=torch.contiguous_format)
            mask.bernoulli_(1 - p, generator=generator)
            return outputs * mask.div_(1 - p)

        with hooked(model, self.layers, drop):
            return super().call(model, weights, *args, **kwargs)

    def check(self, model: nn.Module) -> None:
        """Raise a `ValueError` that names the first weight or layer that `model` lacks."""
        super().check(model)
        dropped_layers(model, self.layers)

    def _file_settings(self) -> dict[str, Any]:
        return {"p": self.p, "layers": self.layers, "own": self.own}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> DropoutPosterior:
        p, own = settings["p"], bool(settings.get("own", False))
        layers = [str(n) for n in settings["layers"]]
        return cls(groups["mean"], None if p is None else float(p), layers, own=own)
