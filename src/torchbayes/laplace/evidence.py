"""The evidence of a Laplace posterior, and the prior and noise that maximise it.

D. MacKay, The Evidence Framework Applied to Classification Networks, 1992; A. Immer et al., Scalable Marginal
Likelihood Estimation for Model Selection in Deep Learning, ICML 2021:

log p(D | δ, σ) ≈ log p(D | θ*, σ) − ½ [log det(s·H + Δ) − log det Δ + (θ* − μ)ᵀ Δ (θ* − μ)],  s = 1/σ²

with the curvature H at the weights θ* and the prior N(μ, Δ⁻¹). It is exact for linear regression at its
maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchbayes.laplace.outputs import Observed
from torchbayes.laplace.structure import Precision, Structure
from torchbayes.posterior import Weights

__all__ = ["log_evidence", "maximise", "scan"]

GRID = torch.logspace(-6, 8, 43, dtype=torch.float64)
"""Precisions from which the search for the best one starts."""


def log_evidence(
    structure: Structure, observed: Observed, precision: Precision, means: Mapping[str, Tensor],
    noise: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the log evidence in nats, differentiable in the precisions and the noise."""
    terms = []
    for name, weight in structure.weights.items():
        delta = precision[name]
        squares = (weight.detach().double() - means[name]).square()
        if delta.numel() == 1:
            terms.append(weight.numel() * delta.log() - delta * squares.sum())
        else:
            terms.append((delta.log() - delta * squares).sum())
    prior = torch.stack([term.cpu() for term in terms]).sum()
    log_det = structure.log_det(precision, observed.scale(noise))
    return observed.log_likelihood(noise).cpu() + 0.5 * (prior - log_det.cpu())


def scan(value: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the precision of `GRID` with the largest value."""
    values = torch.stack([value(delta).detach() for delta in GRID])
    return GRID[int(values.nan_to_num(-torch.inf).argmax())]


def maximise(value: Callable[..., Tensor], starts: list[Tensor], steps: int = 50) -> list[Tensor]:
    """Maximise a function of positive numbers by L-BFGS on their logarithms.

    Args:
        value: The function.
        starts: Tensors of positive numbers to start from.
        steps: Largest number of iterations.
    """
    logs = [start.detach().double().log().requires_grad_() for start in starts]
    optimizer = torch.optim.LBFGS(
        logs, max_iter=steps, tolerance_grad=1e-6, tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -value(*(log.exp() for log in logs))
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return [log.detach().exp() for log in logs]


def by_tensor(values: Tensor, weights: Weights) -> dict[str, Tensor]:
    """Return one precision for every weight tensor, from a vector of them or one number for all."""
    if values.dim() == 0:
        return dict.fromkeys(weights, values)
    return dict(zip(weights, values.unbind(), strict=True))
