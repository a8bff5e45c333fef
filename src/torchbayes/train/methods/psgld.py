"""PSGLD as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.psgld import PSGLD
from torchbayes.train.chains import Collection, SamplerMethod, prior_called
from torchbayes.train.method import Plan, register

__all__ = ["PsgldMethod"]


@register
class PsgldMethod(SamplerMethod):
    """Preconditioned SGLD: a step of its own for every weight, as in RMSprop.

    Args:
        lr: The step size ε; 0.006 / train_size, which is a learning rate of 0.003, if not given.
        decay: The share of the old value in the average of squared gradients.
        damping: λ, added to the root of that average.
        temperature: T divides the log-likelihood and leaves the prior alone; 1 is Bayes' rule.
        prior: `gaussian`, or `resnetpp` for the ATMC paper's priors on scales, directions and biases.
        prior_precision: The precision δ of the Gaussian prior N(0, 1/δ) on every weight.
        burn_in: The share of the run before the first sample.
        samples: The samples to keep, spread evenly over the rest of the run. With a cyclic schedule it is
            the last of each cycle instead.
        thinning: The updates from one sample to the next, in place of `samples`.
        chains: The chains that each process runs one after another, `epochs` epochs each; all but the
            first start anew from random weights.
        side_by_side: Run the chains of a process together, through `torch.func.vmap`: faster for small
            networks. They then see the same batches.
        sample_folder: Keep the samples as files in this folder instead of in memory.
    """

    name = "psgld"
    family = "a chain's samples"
    posterior_kind = "Samples"
    summary = "samples of the weights by RMSprop with noise"
    paper = "Li et al. 2016"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float | None = None,
        decay: float = 0.99,
        damping: float = 1e-5,
        temperature: float = 1.0,
        prior: str = "gaussian",
        prior_precision: float = 1.0,
        burn_in: float = 0.5,
        samples: int = 30,
        thinning: int | None = None,
        chains: int = 1,
        side_by_side: bool = False,
        sample_folder: str | None = None,
    ) -> None:
        collection = Collection(burn_in, samples, thinning, chains, sample_folder, side_by_side)
        super().__init__(model, likelihood, plan, collection)
        density = prior_called(prior, prior_precision)
        self.begin(
            lambda net, belief: PSGLD(
                net,
                lr,
                train_size=plan.train_size,
                prior=belief,
                temperature=temperature,
                decay=decay,
                damping=damping,
                generator=plan.generator,
            ),
            density,
        )
