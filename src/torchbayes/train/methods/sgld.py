"""SGLD as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.sgld import SGLD
from torchbayes.train.chains import Collection, SamplerMethod, prior_called
from torchbayes.train.method import Plan, register

__all__ = ["SgldMethod"]


@register
class SgldMethod(SamplerMethod):
    """Stochastic gradient Langevin dynamics: gradient descent with noise, and its states as samples.

    Args:
        lr: The step size ε; 0.2 / train_size, which is a learning rate of 0.1, if not given.
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

    name = "sgld"
    family = "a chain's samples"
    posterior_kind = "Samples"
    summary = "samples of the weights by gradient descent with noise"
    paper = "Welling & Teh 2011; a baseline of the HWA paper"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float | None = None,
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
            lambda net, belief: SGLD(
                net,
                lr,
                train_size=plan.train_size,
                prior=belief,
                temperature=temperature,
                generator=plan.generator,
            ),
            density,
        )
