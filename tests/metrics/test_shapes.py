"""Scores of maps of classes and of binary labels, against scikit-learn and torchmetrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor
from torchmetrics.functional import jaccard_index
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multilabel_auroc,
    multilabel_average_precision,
    multilabel_exact_match,
)

from torchbayes import metrics


def maps(classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(6, classes, 5, 7, generator=generator, dtype=torch.float64).softmax(1)
    return probs, torch.randint(classes, (6, 5, 7), generator=generator)


def test_every_score_of_a_map_is_that_of_its_positions() -> None:
    probs, targets = maps()
    flat, labels = probs.movedim(1, -1).reshape(-1, 4), targets.flatten()
    one, other = (
        metrics.classification_scores(probs, targets),
        metrics.classification_scores(flat, labels),
    )
    assert one == other
    assert one["accuracy"] == pytest.approx(
        float(multiclass_accuracy(probs, targets, 4, average="micro"))
    )
    assert one["nll"] == pytest.approx(sk.log_loss(labels, flat.numpy(), labels=range(4)))
    kept, known = metrics.rows(probs, torch.where(targets == 1, 255, targets), ignore_index=255)
    assert torch.equal(known, labels[labels != 1])
    assert torch.equal(kept, flat[labels != 1])
    uncertain = torch.rand(6, 5, 7)
    table = metrics.classification_scores(
        probs, targets, mutual_information=uncertain, ood_probs=probs[:2],
        ood_mutual_information=uncertain[:2] + 1,
    )  # fmt: skip
    assert table["auroc_ood_mutual_information"] == 1


def test_maps_and_labels_that_do_not_fit_are_refused() -> None:
    probs, targets = maps()
    with pytest.raises(ValueError, match=r"expected \(6, 5, 7\) to match probs \(6, 4, 5, 7\)"):
        metrics.accuracy(probs, targets[:, :, :3])
    with pytest.raises(ValueError, match=r"label 255.*ignore_index"):
        metrics.accuracy(probs, torch.where(targets == 1, 255, targets))


def test_intersection_over_union_is_that_of_others() -> None:
    probs, targets = maps()
    guess = probs.argmax(1)
    each = sk.jaccard_score(targets.flatten(), guess.flatten(), average=None)
    np.testing.assert_allclose(metrics.iou(probs, targets), each)
    theirs = jaccard_index(guess, targets, task="multiclass", num_classes=4)
    assert metrics.mean_iou(probs, targets) == pytest.approx(float(theirs), rel=1e-6)
    ignored = torch.where(targets == 2, 255, targets)
    theirs = jaccard_index(guess, ignored, task="multiclass", num_classes=4, ignore_index=255)
    ours = metrics.iou(*metrics.rows(probs, ignored, ignore_index=255))
    # A class that is predicted but never true has an intersection of 0.
    assert ours[2] == 0
    assert float(ours.mean()) == pytest.approx(float(theirs), rel=1e-6)


def test_a_class_that_does_not_occur_has_no_iou() -> None:
    probs = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    assert math.isnan(float(metrics.iou(probs, torch.tensor([0, 1]))[2]))
    assert metrics.mean_iou(probs, torch.tensor([0, 1])) == 1


@pytest.mark.parametrize("labels", [1, 5])
def test_binary_scores_are_those_of_others(labels: int) -> None:
    generator = torch.Generator().manual_seed(labels)
    probs = torch.rand(200, labels, generator=generator, dtype=torch.float64)
    targets = (torch.rand(200, labels, generator=generator) < probs).long()
    table = metrics.binary_scores(probs, targets)
    assert table["accuracy"] == pytest.approx(float(((probs > 0.5) == targets).double().mean()))
    assert table["auroc"] == pytest.approx(sk.roc_auc_score(targets, probs, average="macro"))
    assert table["aupr"] == pytest.approx(sk.average_precision_score(targets, probs))
    if labels > 1:
        exact = multilabel_exact_match(probs, targets, labels)
        assert table["exact"] == pytest.approx(float(exact))
        assert table["auroc"] == pytest.approx(
            float(multilabel_auroc(probs, targets, labels)), rel=1e-5
        )
        theirs = multilabel_average_precision(probs, targets, labels)
        assert table["aupr"] == pytest.approx(float(theirs), rel=1e-5)
    flat, true = probs.flatten().numpy(), targets.flatten().numpy()
    assert table["nll"] == pytest.approx(sk.log_loss(true, flat))
    assert table["brier"] == pytest.approx(2 * sk.brier_score_loss(true, flat))
    if labels == 1:
        assert metrics.binary_scores(probs[:, 0], targets[:, 0].bool()) == table


def test_binary_scores_that_are_undefined_or_wrong() -> None:
    never = metrics.binary_scores(torch.rand(5), torch.zeros(5))
    assert math.isnan(never["auroc"])
    some = torch.tensor([[0.2, 0.9], [0.3, 0.1]])
    table = metrics.binary_scores(some, torch.tensor([[0, 1], [0, 0]]))
    assert table["auroc"] == 1  # of the second label; the first is never 1
    for probs, targets, message in (
        (torch.rand(4), torch.rand(4), "other than 0 and 1"),
        (2 + torch.rand(4), torch.ones(4), "apply sigmoid"),
        (torch.rand(4, 1), torch.ones(4), "equal shapes"),
        (torch.rand(4, 1, 2), torch.ones(4, 1, 2), "flatten"),
    ):
        with pytest.raises(ValueError, match=message):
            metrics.binary_scores(probs, targets)
