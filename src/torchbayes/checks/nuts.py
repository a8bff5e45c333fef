"""Compare a small network's predictions with those of the No-U-Turn Sampler, the reference posterior.

Hoffman and Gelman, "The No-U-Turn Sampler", JMLR 2014, by Pyro (extra `nuts`). The two figures are those
of Izmailov et al., "What are Bayesian neural network posteriors really like?", ICML 2021, section 4:
the share of examples on which both predict the same class, and the total variation ½ Σ |p − q|.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.device import forked_random_numbers
from torchbayes.core.names import own_weights
from torchbayes.core.outputs import output_tensor
from torchbayes.core.parameters import trainable
from torchbayes.likelihood import Categorical, Likelihood, as_likelihood
from torchbayes.posterior import Posterior, Samples, snapshot
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive
from torchbayes.prior import GaussianPrior, Prior

__all__ = ["NutsAgreement", "compare_to_nuts"]


@dataclass(frozen=True)
class NutsAgreement:
    """Agreement of predictions with the reference's.

    Attributes:
        agreement: Share of examples with the same most probable class.
        total_variation: ½ Σ |p − q| over classes, averaged over examples: 0 for equal predictions, at most 1.
        reference: Samples of NUTS, a posterior like any other.
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

    Every step passes through all the training data several times, so this is for networks of up to a few
    hundred weights and data sets of up to a few thousand examples.

    Args:
        model: Network; the chain starts at its weights.
        posterior: Posterior to assess.
        data: Training inputs and targets.
        inputs: Inputs to predict.
        prior: Prior that the posterior was trained with; N(0, 1) for every weight by default.
        likelihood: Likelihood of the outputs; categorical by default.
        samples: Number of samples of NUTS, and of draws from the posterior.
        warmup: Steps before them in which NUTS adapts its step size.
        seed: Random seed.

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
    # The integrator adapts its step size in float64, so the network runs in float64 too.
    precise, x = copy.deepcopy(model).double().eval(), x.double()
    start = {name: p.detach().clone() for name, p in trainable(precise).items()}

    def potential(weights: dict[str, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(precise, own_weights(precise, weights), (x,))
        return len(x) * likelihood.loss(output_tensor(outputs), y) - prior.log_prob(weights)

    with forked_random_numbers():
        torch.manual_seed(seed)
        chain = MCMC(
            NUTS(potential_fn=potential), num_samples=samples, warmup_steps=warmup,
            initial_params=start, disable_progbar=True,
        )  # fmt: skip
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
        raise ValueError("agreement and total variation are defined for classes: give a classifier")
    return NutsAgreement(
        float((p.prediction == q.prediction).double().mean()),
        float(0.5 * (p.probs - q.probs).abs().sum(1).mean()),
        reference,
    )
