"""A Gaussian over the weight matrix of each layer whose covariance is a Kronecker product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchbayes.core.noise import normal_
from torchbayes.posterior.posterior import StoredPosterior, Weights, copied

__all__ = ["KroneckerGaussian", "as_matrix", "set_matrix"]


def as_matrix(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Copy a layer's weight to a matrix of one row per output, with the bias as its last column."""
    rows = weight.reshape(len(weight), -1)
    return rows.clone() if bias is None else torch.cat([rows, bias.unsqueeze(1)], 1)


def set_matrix(matrix: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write such a matrix back to a weight and a bias."""
    size = weight[0].numel()
    weight.copy_(matrix[:, :size].reshape(weight.shape))
    if bias is not None:
        bias.copy_(matrix[:, size])


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class KroneckerGaussian(StoredPosterior):
    """A matrix Gaussian for every layer, W = M + L_G (S ∘ E) L_Aᵀ with standard normal E.

    G. Zhang et al., Noisy Natural Gradient as Variational Inference, ICML 2018. The rows of W are a layer's
    outputs; the columns its inputs and, if it has one, its bias. The layers are independent of each other,
    and weights outside these layers have independent Gaussians.

    Without S the covariance is a Kronecker product. With the eigenvectors of two factors as L_G and L_A, S
    has the standard deviations in their basis: that of a precision G ⊗ A + δ, say, which is no product.

    Args:
        mean: The means, and buffers if the draws share some.
        outputs: L_G by the layer's weight name, including the scale of the whole distribution.
        inputs: L_A by the layer's weight name.
        biases: The name of the bias in the last column, by weight name, for layers with a bias.
        std: The standard deviations of independent weights. A weight that is named nowhere is deterministic.
        scales: S by the layer's weight name, of shape (outputs, inputs); ones for a layer without it.
        model_name: The class name of their model.
        rest: `digest_of_rest` of their model if some of its weights are not held.

    Example:
        >>> import torch, torchbayes as tb
        >>> q = tb.KroneckerGaussian(
        ...     {"weight": torch.zeros(2, 3)}, {"weight": 0.1 * torch.eye(2)}, {"weight": torch.eye(3)}
        ... )
        >>> q.sample(torch.Generator().manual_seed(0))["weight"].shape
        torch.Size([2, 3])
    """

    kind = "kronecker-gaussian"

    def __init__(
        self, mean: Weights, outputs: Weights, inputs: Weights,
        biases: Mapping[str, str] | None = None, std: Weights | None = None,
        scales: Weights | None = None, *, model_name: str = "", rest: str = "",
    ) -> None:  # fmt: skip
        super().__init__(mean, model_name, rest)
        # Copies in torch's own order and alignment: a product's last bit may depend on either.
        self._outputs = {name: _plain(tensor) for name, tensor in outputs.items()}
        self._inputs = {name: _plain(tensor) for name, tensor in inputs.items()}
        self._biases, self._std = dict(biases or {}), copied(std or {})
        self._scales = {name: _plain(tensor) for name, tensor in (scales or {}).items()}
        if self._outputs.keys() != self._inputs.keys():
            odd = sorted(self._outputs.keys() ^ self._inputs.keys())[0]
            raise ValueError(
                f"layer {odd!r} has one Kronecker factor: give both outputs and inputs"
            )
        for name in [*self._outputs, *self._biases.values(), *self._std]:
            if name not in self._mean:
                raise ValueError(f"weight {name!r} has a spread but no mean: name the same weights")
        for name in self._outputs:
            rows = len(self._mean[name])
            columns = self._mean[name][0].numel() + (name in self._biases)
            found = tuple(self._outputs[name].shape), tuple(self._inputs[name].shape)
            if found != ((rows, rows), (columns, columns)):
                raise ValueError(
                    f"layer {name!r} has factors of shapes {found}: expected ({rows}, {rows}) for its "
                    f"outputs and ({columns}, {columns}) for its inputs"
                )
            scale = self._scales.get(name)
            if scale is not None and scale.shape != (rows, columns):
                raise ValueError(
                    f"layer {name!r} has scales of shape {tuple(scale.shape)}: expected ({rows}, {columns})"
                )
        for name in self._scales.keys() - self._outputs.keys():
            raise ValueError(f"layer {name!r} has scales but no factors: give outputs and inputs")

    def std(self) -> Weights:
        """Return the marginal standard deviations of the weights that have one."""
        result = copied(self._std)
        for name, outputs in self._outputs.items():
            rows, columns = outputs.square(), self._inputs[name].square()
            scale = self._scales.get(name)
            if scale is None:
                matrix = rows.sum(1, keepdim=True) * columns.sum(1)
            else:
                matrix = rows @ scale.square() @ columns.t()
            self._write(result, name, matrix.sqrt())
        return result

    def _random(self) -> Iterable[str]:
        return self._outputs.keys() | self._std.keys() | set(self._biases.values())

    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """Draw M + L_G E L_Aᵀ for every layer."""
        draw = self.mean()
        for name, std in self._std.items():
            draw[name].addcmul_(normal_(torch.empty_like(std), generator), std)
        for name, outputs in self._outputs.items():
            inputs = self._inputs[name]
            noise = normal_(outputs.new_empty(len(outputs), len(inputs)), generator)
            if name in self._scales:
                noise *= self._scales[name]
            centre = as_matrix(*(self._mean[n] for n in self._layer(name)))
            self._write(draw, name, centre + outputs @ noise @ inputs.t())
        return draw

    def _layer(self, name: str) -> list[str]:
        return [name, self._biases[name]] if name in self._biases else [name]

    def _write(self, weights: Weights, name: str, matrix: Tensor) -> None:
        own = {n: torch.empty_like(self._mean[n]) for n in self._layer(name)}
        set_matrix(matrix, *own.values())
        weights |= own

    def _file_tensors(self) -> Mapping[str, Weights]:
        return {
            "mean": self._mean, "outputs": self._outputs, "inputs": self._inputs, "std": self._std,
            "scales": self._scales,
        }  # fmt: skip

    def _file_settings(self) -> dict[str, Any]:
        return {"biases": self._biases}

    @classmethod
    def _from_file(cls, groups: dict[str, Weights], settings: dict[str, Any]) -> KroneckerGaussian:
        biases = {str(weight): str(bias) for weight, bias in settings["biases"].items()}
        return cls(
            groups["mean"], groups.get("outputs", {}), groups.get("inputs", {}), biases,
            groups.get("std", {}), groups.get("scales", {}),
        )  # fmt: skip
