"""SGNHT as a method."""

from __future__ import annotations

from torch import nn

from torchbayes.likelihood import Likelihood
from torchbayes.optim.sgnht import SGNHT
from torchbayes.train.chains import Collection, SamplerMethod, prior_called
from torchbayes.train.method import Plan, register

__all__ = ["SgnhtMethod"]


@register
class SgnhtMethod(SamplerMethod):
    """Stochastic gradient Nosé-Hoover thermostats: momentum whose friction finds the gradient's noise.

    Args:
        lr: The time step h: thermostats react within about 0.1 / lr² updates, and a schedule scales the
            steps by it.
        average_step: The typical change of a weight per update, at the first `lr`; √(0.05 / train_size)
            if not given.
        max_step: The largest change of a weight in an update, at the first `lr`; no limit if not given.
        momentum: The share of the momentum that an update keeps in a noiseless gradient.
        per_parameter: A thermostat for every weight; if false, one for all, which is faster.
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

    name = "sgnht"
    family = "a chain's samples"
    posterior_kind = "Samples"
    summary = (
        "samples of the weights by momentum with thermostats that take out the gradient's noise"
    )
    paper = "Ding et al. 2014; the baseline of the ATMC paper"

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
        per_parameter: bool = True,
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
        if side_by_side and not per_parameter:
            raise ValueError(
                "one thermostat cannot serve several chains: leave out side_by_side, or use a thermostat per "
                "parameter"
            )
        collection = Collection(burn_in, samples, thinning, chains, sample_folder, side_by_side)
        super().__init__(model, likelihood, plan, collection)
        density = prior_called(prior, prior_precision)
        self.begin(
            lambda net, belief: SGNHT(
                net,
                lr,
                train_size=plan.train_size,
                prior=belief,
                temperature=temperature,
                average_step=average_step,
                max_step=max_step,
                momentum=momentum,
                per_parameter=per_parameter,
                generator=plan.generator,
            ),
            density,
        )
