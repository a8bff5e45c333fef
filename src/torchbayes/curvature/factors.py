"""Kronecker factors of a layer's curvature: second moments of its input and of its output's gradient.

J. Martens and R. Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature, ICML 2015;
R. Grosse and J. Martens, A Kronecker-factored approximate Fisher matrix for convolution layers, ICML 2016.

| symbol | here |
| --- | --- |
| A = E[Σₜ a aᵀ], a an input (with a last entry 1 for a bias), t the T positions | `inputs` / M |
| G = E[(1/T) Σₜ g gᵀ], g the gradient of one example's loss at an output | `outputs` · M² / `rows` |

so that the curvature of the weight matrix W is about G ⊗ A, and exactly so for one output and one position.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["FactorSums"]


class FactorSums:
    """Running sums of the two second moments of one layer.

    Args:
        weight: The layer's weight, of shape (outputs, …).
        bias: The layer's bias, if it is to be a column of the weight matrix.

    Attributes:
        inputs: Σ a aᵀ over examples and positions.
        outputs: Σ (g/M)(g/M)ᵀ: the gradients are those of a mean over M examples.
        rows: Number of examples times positions; 0 if the layer was not used.
        examples: Number of examples of the blocks in which the layer was used.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.inputs: Tensor | None = None
        self.outputs: Tensor | None = None
        self.restart()

    def restart(self) -> None:
        """Start again, in the same buffers."""
        self.rows, self.examples = 0, 0.0

    def add(self, x: Tensor, g: Tensor) -> None:
        """Add one use of the layer.

        Args:
            x: Inputs, of shape (examples, positions, inputs).
            g: Gradients of the outputs, of shape (examples, positions, outputs).
        """
        rows, gradients = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        size = rows.shape[1]
        with_bias = self.bias is not None
        if self.inputs is None or self.outputs is None:
            self.inputs = rows.new_empty(size + with_bias, size + with_bias)
            self.outputs = gradients.new_empty(gradients.shape[1], gradients.shape[1])
        beta = 0.0 if self.rows == 0 else 1.0
        self.inputs[:size, :size].addmm_(rows.t(), rows, beta=beta)
        self.outputs.addmm_(gradients.t(), gradients, beta=beta)
        if with_bias:
            sums = rows.sum(0)
            if self.rows > 0:
                sums += self.inputs[size, :size]
            self.inputs[size, :size] = sums
            self.inputs[:size, size] = sums
            self.inputs[size, size] = self.rows + len(rows)
        self.rows += len(rows)
