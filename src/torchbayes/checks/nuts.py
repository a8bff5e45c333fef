"""A small network's predictions beside those of the No-U-Turn Sampler, the reference for its posterior.

Hoffman and Gelman, "The No-U-Turn Sampler", JMLR 2014, as Pyro has it (extra `nuts`). The two figures are
those of Izmailov et al., "What are Bayesian neural network posteriors really like?", ICML 2021, section 4:
the share of examples on which both predict the same class, and the total variation ½ Σ |p − q|.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.likelihood import Categorical, Likelihood, as_likelihood
from torchbayes.posterior import Posterior, Samples, snapshot
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive
from torchbayes.prior import GaussianPrior, Prior

__all__ = ["NutsAgreement", "compare_to_nuts"]


@dataclass(frozen=True)
class NutsAgreement:
    """How near predictions are to the reference's.

    Attributes:
        agreement: The share of examples with the same most probable class.
        total_variation: ½ Σ |p − q| over classes, averaged over examples: 0 is the same, 1 is nothing alike.
        reference: NUTS's samples, a posterior like any other.
    """

    agreement: float
    total_variation: float
    reference: Samples


def compare_to_nuts(
    model: nn.Module,
    posterior: Posterior,
    data: tuple[Tensor, Tensor],
    inputs: Tensor,
    *,
    prior: Prior | None = None,
    likelihood: Likelihood | Any | None = None,
    samples: int = 200,
    warmup: int = 200,
    seed: int = 0,
) -> NutsAgreement:
    """Sample the exact posterior of a small network with NUTS and compare predictions with it.

    Every step of it goes through all of the training data several times: for networks of up to some
    hundred weights and data of up to some thousand examples.

    Args:
        model: The network; its own weights are where the chain starts.
        posterior: The posterior to be judged.
        data: The training inputs and targets.
        inputs: The inputs to predict.
        prior: The prior that the posterior was trained with; N(0, 1) of every weight if not given.
        likelihood: What the outputs mean; class logits if not given.
        samples: The samples of NUTS, and the draws of the posterior.
        warmup: The steps before them in which it finds its step size.
        seed: Of both.

    Raises:
        ImportError: If Pyro is not installed.
    """
    try:
        from pyro.infer import MCMC, NUTS
    except ImportError as error:
        raise ImportError(
            "compare_to_nuts needs Pyro: install it with pip install 'torchbayes[nuts]'"
        ) from error

    prior = GaussianPrior() if prior is None else prior
    likelihood = Categorical() if likelihood is None else as_likelihood(likelihood)
    x, y = data
    # The integrator's step size is found in float64, which the network then has to take.
    precise, x = copy.deepcopy(model).double().eval(), x.double()
    start = {name: p.detach().clone() for name, p in precise.named_parameters() if p.requires_grad}

    def potential(weights: dict[str, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(precise, weights, (x,))
        return len(x) * likelihood.loss(outputs, y) - prior.log_prob(weights)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        chain = MCMC(
            NUTS(potential_fn=potential),
            num_samples=samples,
            warmup_steps=warmup,
            initial_params=start,
            disable_progbar=True,
        )
        chain.run()
        drawn = chain.get_samples()
    reference = Samples(model)
    rest = snapshot(model)  # frozen weights and buffers
    for index in range(samples):
        moved = {name: value[index].to(rest[name].dtype) for name, value in drawn.items()}
        reference.append(rest | moved)
    p, q = (
        predictive(model, one, inputs, samples, likelihood, torch.Generator().manual_seed(seed))
        for one in (posterior, reference)
    )
    if not (isinstance(p, ClassPredictive) and isinstance(q, ClassPredictive)):
        raise ValueError("agreement and total variation are of classes: give a classifier")
    return NutsAgreement(
        float((p.prediction == q.prediction).double().mean()),
        float(0.5 * (p.probs - q.probs).abs().sum(1).mean()),
        reference,
    )
