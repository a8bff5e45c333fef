"""What a network returns, as the one tensor that a likelihood takes.

Many networks return more than that: Hugging Face's a `ModelOutput`, torchvision's segmentation networks a
dictionary, recurrent ones a tuple with their last state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["Output", "output_tensor"]

Output: TypeAlias = str | int | Callable[[Any], Tensor] | None
"""Where the likelihood's tensor is in what a network returns: a key or attribute, an index or a function."""

_LOGITS = "logits"


def output_tensor(outputs: Any, output: Output = None, *, network: str = "the network") -> Tensor:
    """Return the tensor that the likelihood takes from what a network returned.

    Without `output` it is the tensor itself; what is called `logits` in a dictionary or an object, as in
    Hugging Face's `ModelOutput`; or the only tensor in a dictionary, tuple or list, such as the outputs of an
    LSTM beside the pair of its states.

    Args:
        outputs: What the network returned.
        output: A key or an attribute's name, an index, or a function of `outputs`.
        network: What to call the network in an error.

    Raises:
        TypeError: If there is no such tensor, or more than one.

    Example:
        >>> import torch
        >>> output_tensor({"logits": torch.zeros(1, 2), "hidden": torch.ones(1, 3)})
        tensor([[0., 0.]])
        >>> output_tensor((torch.zeros(1, 2), torch.ones(1, 3)), output=1)
        tensor([[1., 1., 1.]])
    """
    if output is None:
        return outputs if isinstance(outputs, Tensor) else _found(outputs, network)
    if callable(output):
        chosen = output(outputs)
        source = f"the function {getattr(output, '__name__', repr(output))} given as output="
    else:
        chosen, source = _named(outputs, output, network), f"what output={output!r} names"
    if not isinstance(chosen, Tensor):
        raise TypeError(
            f"{source} gives a {type(chosen).__name__} of what {network} returns ({_contents(outputs)}), "
            "but a likelihood takes a tensor"
        )
    return chosen


def _found(outputs: Any, network: str) -> Tensor:
    """Return the tensor if it is clear which one is meant."""
    keyed = isinstance(outputs, Mapping)
    known = outputs.get(_LOGITS) if keyed else getattr(outputs, _LOGITS, None)
    if isinstance(known, Tensor):
        return known
    parts = outputs.values() if keyed else outputs if isinstance(outputs, (tuple, list)) else ()
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    raise TypeError(
        f"{network} returns {_contents(outputs)}: say what the likelihood takes with output=, a key, an "
        "index or a function, as in output=0 or output=lambda outputs: outputs.scores"
    )


def _named(outputs: Any, output: str | int, network: str) -> Any:
    # A tensor has entries too, but they are examples.
    if not isinstance(outputs, Tensor):
        if isinstance(outputs, (Mapping, tuple, list)):
            try:
                return outputs[output]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                pass
        if isinstance(output, str) and hasattr(outputs, output):
            return getattr(outputs, output)
    hint = "leave it out" if isinstance(outputs, Tensor) else "give one that is there"
    raise TypeError(f"output is {output!r} but {network} returns {_contents(outputs)}: {hint}")


def _contents(outputs: Any) -> str:
    """Describe what a network returned: its type and the names or the number of its parts."""
    kind = type(outputs).__name__
    if isinstance(outputs, Tensor):
        return "a tensor"
    if isinstance(outputs, Mapping):
        return f"a {kind} with {', '.join(map(repr, outputs)) or 'no entries'}"
    if isinstance(outputs, (tuple, list)):
        return f"a {kind} of {', '.join(type(part).__name__ for part in outputs) or 'nothing'}"
    return f"a {kind}"
