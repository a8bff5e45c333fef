"""SGHMC as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.sghmc import SGHMC
from torchbayes.train.chains import Collection, SamplerMethod, prior_called
from torchbayes.train.method import Plan, register

__all__ = ["SghmcMethod"]


@register
class SghmcMethod(SamplerMethod):
    """Stochastic gradient Hamiltonian Monte Carlo: momentum, friction and noise.

    Args:
        lr: The time step h, which a schedule scales the steps by.
        average_step: The typical change of a weight per update, at the first `lr`; √(0.05 / train_size)
            if not given.
        momentum: The share of the momentum that an update keeps, at the first `lr`.
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

    name = "sghmc"
    family = "a chain's samples"
    posterior_kind = "Samples"
    summary = "samples of the weights by gradient descent with momentum and noise"
    paper = "Chen et al. 2014"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 1e-2,
        average_step: float | None = None,
        momentum: float = 0.9,
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
            lambda net, belief: SGHMC(
                net,
                lr,
                train_size=plan.train_size,
                prior=belief,
                temperature=temperature,
                average_step=average_step,
                momentum=momentum,
                generator=plan.generator,
            ),
            density,
        )
