"""From a Gaussian over a network's outputs to a prediction.

| link | classes |
| --- | --- |
| `probit` | softmax(f / √(1 + π/8 · var)) (D. MacKay 1992) |
| `bridge` | the Dirichlet whose Laplace approximation in the logits is the Gaussian (Hobbhahn et al. 2022) |
| `mc` | the average softmax of drawn outputs |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchbayes.core.noise import normal_
from torchbayes.predict.results import ClassPredictive

__all__ = ["bridge", "draw_outputs", "probit"]

# Draws of the outputs for the aleatoric part of probit's entropy, which has no closed form.
_DRAWS = 32


def probit(outputs: Tensor, variance: Tensor) -> ClassPredictive:
    """Return MacKay's approximation of the average softmax.

    The expected entropy of a draw, the aleatoric part, is an average over 32 fixed draws of the outputs.

    Args:
        outputs: Means, (examples, classes).
        variance: Variances, (examples, classes).
    """
    probs = (outputs / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    generator = torch.Generator().manual_seed(0)
    spread = variance.sqrt()
    aleatoric = torch.zeros_like(outputs[:, 0])
    for _ in range(_DRAWS):
        noise = normal_(torch.empty(outputs.shape[1]), generator).to(outputs)
        drawn = torch.addcmul(outputs, spread, noise).softmax(1)
        aleatoric += torch.special.entr(drawn).sum(1) / _DRAWS
    return ClassPredictive(probs, aleatoric, 1)


def bridge(outputs: Tensor, variance: Tensor, row_sums: Tensor) -> ClassPredictive:
    """Return the Laplace bridge's Dirichlet mean, and the expected entropy of its draws.

    The Gaussian is first conditioned on Σ f = 0, to which softmax is indifferent.

    Args:
        outputs: Means, (examples, classes).
        variance: Variances, (examples, classes).
        row_sums: Sums of the rows of the covariance, (examples, classes).
    """
    total = row_sums.sum(1, keepdim=True).clamp_min(torch.finfo(outputs.dtype).tiny)
    mean = outputs - row_sums * outputs.sum(1, keepdim=True) / total
    least = torch.finfo(outputs.dtype).eps
    var = (variance - row_sums.square() / total).clamp_min(least)
    k = outputs.shape[1]
    spread = (mean + torch.logsumexp(-mean, 1, keepdim=True)).exp() / k**2
    alpha = (1 - 2 / k + spread) / var
    alpha = alpha.clamp(min=torch.finfo(outputs.dtype).tiny, max=1e30)
    total_alpha = alpha.sum(1, keepdim=True)
    probs = alpha / total_alpha
    inside = torch.digamma(total_alpha + 1) - torch.digamma(alpha + 1)
    return ClassPredictive(probs, (probs * inside).sum(1).clamp_min(0), 1)


def draw_outputs(
    outputs: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None
) -> Tensor:
    """Draw outputs, (samples, examples, …), from a Gaussian with these means and covariances.

    Args:
        outputs: Means, (examples, …).
        covariance: Covariances of the flattened outputs, (examples, outputs, outputs).
        samples: Number of draws.
        generator: Source of the draws.
    """
    flat = outputs.flatten(1)
    scale = covariance.diagonal(dim1=1, dim2=2).mean(1)
    # Rounding makes a covariance of low rank indefinite: raise its diagonal by as much as rounding may take,
    # and one of 0, where no uncertain weight matters, by something.
    jitter = 10 * flat.shape[1] * torch.finfo(flat.dtype).eps * scale
    jitter = jitter.clamp_min(torch.finfo(flat.dtype).tiny)
    raised = covariance.clone()
    raised.diagonal(dim1=1, dim2=2).add_(jitter.unsqueeze(1))
    root = torch.linalg.cholesky(raised)
    noise = normal_(flat.new_empty(samples, *flat.shape), generator)
    drawn = flat + torch.einsum("nij,snj->sni", root, noise)
    return drawn.view(samples, *outputs.shape)
