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

# The columns that are computed at once: down from the diagonal, which is all that a symmetric matrix needs.
_COLUMNS, _BLOCKS = 128, 8


class FactorSums:
    """Running sums of the two second moments of one layer.

    Args:
        weight: The layer's weight, of shape (outputs, …).
        bias: The layer's bias, if it is to be a column of the weight matrix.

    Attributes:
        inputs: Σ a aᵀ over examples and positions; only the lower triangle is right.
        outputs: Σ (g/M)(g/M)ᵀ, as well: the gradients are those of a mean over M examples.
        rows: Number of examples times positions; 0 if the layer was not used.
        examples: Number of examples of the blocks in which the layer was used.
        wanted: Whether uses are to be added; otherwise the layer's uses are not looked at.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.inputs: Tensor | None = None
        self.outputs: Tensor | None = None
        self.wanted = True
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
            # Zeros, because processes send each other whole matrices.
            self.inputs = rows.new_zeros(size + with_bias, size + with_bias)
            self.outputs = gradients.new_zeros(gradients.shape[1], gradients.shape[1])
        fresh = self.rows == 0
        _add_lower(self.inputs[:size, :size], rows, fresh)
        _add_lower(self.outputs, gradients, fresh)
        if with_bias:
            last, sums = self.inputs[size], rows.sum(0)
            last[:size] = sums if fresh else sums + last[:size]
            last[size] = self.rows + len(rows)
        self.rows += len(rows)


def _add_lower(total: Tensor, rows: Tensor, fresh: bool) -> None:
    """Add rowsᵀ rows to the lower triangle of `total`, or overwrite it."""
    size = len(total)
    width = max(_COLUMNS, -(-size // _BLOCKS))
    for start in range(0, size, width):
        columns = rows[:, start : start + width]
        total[start:, start : start + width].addmm_(
            rows[:, start:].t(), columns, beta=0.0 if fresh else 1.0
        )
