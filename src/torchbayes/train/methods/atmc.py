"""ATMC as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.atmc import ATMC
from torchbayes.train.chains import Collection, SamplerMethod, prior_called
from torchbayes.train.method import Plan, register

__all__ = ["AtmcMethod"]


@register
class AtmcMethod(SamplerMethod):
    """Adaptive thermostat Monte Carlo: adds as much noise as the gradient's own leaves to add.

    Args:
        lr: The time step h: thermostats react within about 0.1 / lr² updates, and a schedule scales the
            steps by it. The paper has 0.001.
        average_step: The typical change of a weight per update, at the first `lr`; √(0.05 / train_size)
            if not given. The paper has 0.0003 for CIFAR-10.
        max_step: The largest change of a weight in an update, at the first `lr`; 10/3 of the average if not
            given, as in the paper; `inf` for a Gaussian momentum.
        momentum: The largest share of the momentum that an update keeps, at the first `lr`.
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

    name = "atmc"
    family = "a chain's samples"
    posterior_kind = "Samples"
    summary = "samples of the weights by momentum with thermostats that adapt the noise"
    paper = "Heek & Kalchbrenner 2019, Bayesian Inference for Large Scale Image Classification"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        plan: Plan,
        *,
        lr: float = 1e-2,
        average_step: float | None = None,
        max_step: float | None = None,
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
            lambda net, belief: ATMC(
                net,
                lr,
                train_size=plan.train_size,
                prior=belief,
                temperature=temperature,
                average_step=average_step,
                max_step=max_step,
                momentum=momentum,
                generator=plan.generator,
            ),
            density,
        )
