"""Distillation: one network that imitates what a posterior predicts.

A. Korattikara et al., Bayesian Dark Knowledge, NeurIPS 2015: the student S minimises the cross entropy
E_x[−Σ_y p(y | x, data) log S(y | x)] to the teacher's predictive p (their Eq. 4), over training inputs and
over inputs with noise added, where the teacher knows less.

Deviation from the paper: the teacher is a finished posterior, whose predictions are computed once, and not a
chain that goes on while the student learns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Posterior
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive
from torchbayes.train.fit import Run, fit
from torchbayes.train.progress import Progress
from torchbayes.train.schedule import Schedule

__all__ = ["SoftLabels", "distill"]


class SoftLabels(Likelihood):
    """Targets that are probabilities of classes, (examples, classes), in place of classes.

    Example:
        >>> import torch
        >>> from torchbayes.applications.distill import SoftLabels
        >>> SoftLabels().loss(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]])).item()   # log 2
        0.6931471824645996
    """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        if outputs.shape != targets.shape:
            raise ValueError(
                f"the student gives {tuple(outputs.shape[1:])} outputs and the teacher "
                f"{tuple(targets.shape[1:])} classes: build it for the same classes"
            )
        return F.cross_entropy(outputs, targets)

    def predictive(self, outputs: Tensor) -> ClassPredictive:
        """As for class labels."""
        probs = outputs.softmax(2)
        return ClassPredictive(
            probs.mean(0), torch.special.entr(probs).sum(2).mean(0), len(outputs)
        )


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
) -> Run:
    """Train one network to give the predictions of a whole posterior, at the cost of one.

    Args:
        student: The network to train, or a function that makes it. It may be smaller than the teacher.
        teacher: The network that `posterior` is of; a classifier.
        posterior: What to imitate, such as a sampler's `Samples`.
        inputs: Inputs in memory, without targets, as the teacher takes them.
        samples: The teacher's draws.
        copies: How often the student sees each input: once as it is and otherwise with noise.
        noise_std: The standard deviation of that noise.
        epochs: How often to go through the copies.
        batch_size: The examples per update.
        lr: The learning rate of Adam, which falls to 0 by a cosine.
        seed: Of everything random.
        folder: The run folder, if the student's training shall survive a kill.
        resume: Go on with the run in `folder`, if there is one.
        progress: Show a progress bar; or the object that shows it.

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
        raise ValueError(f"copies is {copies}: expected how often to see each input, at least 1")
    if not noise_std >= 0:
        raise ValueError(f"noise_std is {noise_std:g}: expected a standard deviation from 0")
    generator = torch.Generator().manual_seed(seed)
    seen = [inputs]
    for _ in range(1, copies):
        noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
        seen.append(inputs + noise_std * noise.to(inputs.device))
    everything = torch.cat(seen)
    # The same draws for all inputs, so that the student learns one posterior's predictions.
    wanted = predictive(teacher, posterior, everything, samples, generator=generator)
    if not isinstance(wanted, ClassPredictive):
        raise TypeError(
            f"the teacher gives a {type(wanted).__name__}: only classifiers can be distilled"
        )
    return fit(
        student,
        (everything, wanted.probs),
        "mle",
        epochs=epochs,
        batch_size=batch_size,
        likelihood=SoftLabels(),
        schedule=Schedule("cosine"),
        seed=seed,
        folder=folder,
        resume=resume,
        progress=progress,
        lr=lr,
    )
