"""Distillation: one network that imitates what a posterior predicts.

A. Korattikara et al., Bayesian Dark Knowledge, NeurIPS 2015: the student S minimises the cross entropy
E_x[−Σ_y p(y | x, data) log S(y | x)] to the teacher's predictive p (their Eq. 4), over training inputs and
over inputs with noise added, where the teacher knows less.

Deviation from the paper: the teacher is a finished posterior, whose predictions are computed once, not a
chain that continues while the student learns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from torchbayes.core.digest import digest
from torchbayes.core.names import named_weights
from torchbayes.likelihood import Categorical, Likelihood
from torchbayes.likelihood.base import mean_nll
from torchbayes.posterior import Posterior
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive
from torchbayes.train.fit import fit
from torchbayes.train.identity import network_checksum
from torchbayes.train.progress import Progress
from torchbayes.train.run import Run
from torchbayes.train.schedule import Schedule

__all__ = ["SoftLabels", "distill"]


class SoftLabels(Likelihood):
    """Targets that are class probabilities, (examples, classes), instead of classes.

    Example:
        >>> import torch
        >>> from torchbayes.applications.distill import SoftLabels
        >>> SoftLabels().loss(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]])).item()   # log 2
        0.6931471824645996
    """

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute the mean cross entropy."""
        if outputs.shape != targets.shape:
            raise ValueError(
                f"the student gives {tuple(outputs.shape[1:])} outputs and the teacher "
                f"{tuple(targets.shape[1:])} classes: build it for the same classes"
            )
        if weights is None:
            return nn.functional.cross_entropy(outputs, targets)
        return mean_nll(nn.functional.cross_entropy(outputs, targets, reduction="none"), weights)

    def predictive(self, outputs: Tensor) -> ClassPredictive:
        """Predict as for class labels."""
        return Categorical().predictive(outputs)


def distill(
    student: nn.Module | Callable[[], nn.Module],
    teacher: nn.Module,
    posterior: Posterior,
    inputs: Tensor,
    *,
    samples: int = 32,
    copies: int = 2,
    noise_std: float = 0.1,
    epochs: int = 20,
    batch_size: int = 128,
    lr: float = 1e-3,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool | Progress = True,
    device: str | torch.device | None = None,
) -> Run:
    """Train one network to imitate the predictions of a whole posterior.

    Args:
        student: Network to train, or a function that builds it. It may be smaller than the teacher.
        teacher: Classifier that `posterior` belongs to.
        posterior: Posterior to imitate, such as a sampler's `Samples`.
        inputs: Inputs of the teacher, in memory, without targets.
        samples: Number of the teacher's draws.
        copies: Copies of each input that the student sees, all but one of them noisy.
        noise_std: Standard deviation of that noise.
        epochs: Passes through the copies.
        batch_size: Examples per update.
        lr: Learning rate of Adam, annealed to 0 by a cosine.
        seed: Random seed.
        folder: Run folder, from which the student's training can be resumed.
        resume: Continue the run in `folder`, if there is one.
        progress: Whether to show a progress bar, or a custom display.
        device: Device to train the student on, as for `fit`; its own if None.

    Returns:
        The student's run: its `posterior` is a point, its `predict` one forward pass.

    Example:
        >>> import torch, torchbayes as tb
        >>> teacher = torch.nn.Linear(2, 3)
        >>> q = tb.Gaussian(tb.snapshot(teacher), {"weight": torch.full((3, 2), 0.5)})
        >>> x = torch.randn(200, 2)
        >>> student = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> run = tb.applications.distill(student, teacher, q, x, epochs=30, lr=0.01, progress=False)
        >>> wanted = tb.predictive(teacher, q, x, samples=200).probs
        >>> bool((run.predict(x).probs - wanted).abs().mean() < 0.1)
        True
    """
    if copies < 1:
        raise ValueError(
            f"copies is {copies}: expected a number of copies of each input, at least 1"
        )
    if not noise_std >= 0:
        raise ValueError(f"noise_std is {noise_std:g}: expected a standard deviation from 0")
    generator = torch.Generator().manual_seed(seed)
    seen = [inputs]
    for _ in range(1, copies):
        noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
        seen.append(inputs + noise_std * noise.to(inputs.device))
    everything = torch.cat(seen)
    # The same draws for all inputs, so that the student learns the predictions of one set of networks.
    wanted = predictive(
        teacher, posterior, everything, samples, generator=generator, recalibrate=False
    )
    if not isinstance(wanted, ClassPredictive):
        raise TypeError(
            f"the teacher gives a {type(wanted).__name__}: only classifiers can be distilled"
        )
    config = {
        # Predictions may differ by rounding from one start to the next: what made them is compared instead.
        "data_checksum": digest(inputs),
        "teacher_checksum": _checksum(teacher, posterior),
        "copies": copies, "noise_std": noise_std, "samples": samples,
    }  # fmt: skip
    return fit(
        student, (everything, wanted.probs.to(everything.device)), "mle", config=config, device=device,
        epochs=epochs, batch_size=batch_size, likelihood=SoftLabels(), schedule=Schedule("cosine"),
        seed=seed, folder=folder, resume=resume, progress=progress, lr=lr,
    )  # fmt: skip


def _checksum(teacher: nn.Module, posterior: Posterior) -> str:
    """Return a digest of a teacher: layers, mean, a draw, and the weights that the posterior lacks."""
    draw = posterior.sample(torch.Generator().manual_seed(0))
    rest = {name: w for name, w in named_weights(teacher).items() if name not in draw}
    return digest(network_checksum(teacher), posterior.mean(), draw, rest)
