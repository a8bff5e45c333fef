"""Accuracy, negative log-likelihood and Brier score of class probabilities.

`correct`, `confidence`, `entropy` and `label_log_probs` are for use inside the library: they take checked
input, so that a table of scores need not check it repeatedly.
"""

import math

import torch
from torch import Tensor

from torchbayes.metrics import _inputs


def correct(probs: Tensor, targets: Tensor) -> Tensor:
    """Return whether the most probable class, the first of equals, is the label (N,)."""
    return probs.argmax(dim=1) == targets


def confidence(probs: Tensor) -> Tensor:
    """Return each row's largest probability (N,) in float64, at most 1 whatever the rounding."""
    return probs.amax(dim=1).double().clamp(max=1.0)


def entropy(probs: Tensor) -> Tensor:
    """Return each row's entropy (N,) in nats and float64, with 0 log 0 = 0."""
    terms: Tensor = torch.special.entr(probs.double())
    return terms.sum(dim=1)


def label_log_probs(probs: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each label (N, ...) under probabilities (N, C, ...)."""
    return probs.gather(1, targets.long().unsqueeze(1)).squeeze(1).log()


def accuracy(probs: Tensor, targets: Tensor) -> float:
    """Compute the fraction of rows whose most probable class, the first of equals, is the label.

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).

    Example:
        >>> import torch
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        0.5
    """
    # Imported here because it takes over a second, which `import torchbayes` should not.
    from torchmetrics.functional.classification import multiclass_stat_scores

    probs, targets = _inputs.labelled(probs, targets)
    # Counts rather than multiclass_accuracy, whose division is in float32.
    counts = multiclass_stat_scores(
        probs.argmax(dim=1), targets, probs.shape[1], average="micro", validate_args=False
    )
    return int(counts[0]) / len(targets)


def top_k_accuracy(probs: Tensor, targets: Tensor, k: int = 5) -> float:
    """Compute the fraction of rows whose label is among the `k` most probable classes.

    Among equally probable classes the lower index ranks higher, so `k=1` is `accuracy`.

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).
        k: Number of classes that count, 1 to C.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
        >>> top_k_accuracy(probs, torch.tensor([1, 2]), k=2)
        0.5
    """
    probs, targets = _inputs.labelled(probs, targets)
    classes = probs.shape[1]
    if not 1 <= k <= classes:
        raise ValueError(
            f"k is {k}, expected 1 to {classes}, the number of classes: choose k in that range"
        )
    of_label = probs.gather(1, targets[:, None])
    earlier = torch.arange(classes) < targets[:, None]
    rank = ((probs > of_label) | ((probs == of_label) & earlier)).sum(dim=1)
    return float((rank < k).double().mean())


def nll(probs: Tensor, targets: Tensor) -> float:
    """Compute the mean negative log-probability of the labels, in nats.

    With Monte-Carlo averaged `probs` this is the loss of the averaged prediction, not the average
    loss of the draws. A label of probability 0 has infinite loss; so that one underflow does not
    ruin the score, label probabilities are clamped from below at the smallest normal number of
    their dtype. Such an example adds 87.3 nats to the sum (708.4 for float64 `probs`; float16 and
    bfloat16 use float32's floor), far above the log C of a uniform guess: it stays visible.

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).

    Example:
        >>> import torch
        >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0])), 4)
        1.0397
    """
    probs, targets = _inputs.labelled(probs, targets)
    wide = torch.float64 if probs.dtype == torch.float64 else torch.float32
    floor = math.log(torch.finfo(wide).tiny)
    # Subtracted rather than negated so that a perfect score is 0, not -0.
    return 0.0 - float(label_log_probs(probs.double(), targets).clamp(min=floor).mean())


def brier(probs: Tensor, targets: Tensor) -> float:
    r"""Compute the multi-class Brier score (Brier 1950): the mean over rows of $\sum_c (p_c - 1\{y = c\})^2$.

    The sum runs over all classes, so the score lies in [0, 2] and for two classes is twice the
    one-column score.

    Args:
        probs: Class probabilities (N, C).
        targets: Integer labels (N,).

    Example:
        >>> import torch
        >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
        1.25
    """
    probs, targets = _inputs.labelled(probs, targets)
    residual = probs.to(torch.float64, copy=True)
    residual[torch.arange(len(targets)), targets] -= 1
    return float(residual.square().sum(dim=1).mean())
