"""A sampler that torchbayes does not have: Langevin dynamics whose noise rises in the first updates."""

import math

import torchbayes as tb
from torchbayes.optim.sampler import Sampler


def langevin_update(theta, grad, eta, *, epsilon, share, n, delta):
    """θ ← θ − ε/2 ∇U + √ε · share · η with ∇U = n·grad + δθ, in place."""
    theta.mul_(1 - epsilon / 2 * delta).add_(grad, alpha=-epsilon / 2 * n)
    theta.add_(eta, alpha=share * math.sqrt(epsilon))


@tb.register(
    "tempered-langevin",
    family="a chain's samples",
    posterior="Samples",
    target="posterior",
    summary="Langevin dynamics with noise that rises at the start",
    paper="made up for a test",
)
class TemperedLangevin(Sampler):
    """Langevin dynamics with noise that rises at the start.

    Args:
        model: The network.
        lr: Step size; 0.2/`train_size` if None.
        train_size: Number of training examples.
        prior: Precision of a Gaussian prior, or a prior.
        temperature: T divides the log-likelihood.
        rise: Updates until the noise has its full size.
        params: Parameters of the model, or groups of them; all trainable ones if None.
        generator: Source of the noise.
    """

    update = staticmethod(langevin_update)

    def __init__(
        self,
        model,
        lr=None,
        *,
        train_size,
        prior=1.0,
        temperature=1.0,
        rise=100,
        params=None,
        generator=None,
    ):
        super().__init__(
            model,
            0.2 / train_size if lr is None else lr,
            train_size=train_size,
            prior=prior,
            temperature=temperature,
            params=params,
            generator=generator,
            settings={"rise": rise},
        )

    def scalars(self, group, step):
        """ε, and how much of the noise there is."""
        return {"epsilon": group["lr"], "share": min(1.0, step / group["rise"])}
