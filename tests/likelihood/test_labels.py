"""Likelihoods of labels: ignored ones, weights of classes and examples, binary and multi-label."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special, stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.likelihood import as_likelihood, inferred_likelihood


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def log_loss(logits: Tensor, targets: Tensor) -> np.ndarray[Any, Any]:
    """−log p of each label, (examples, …), by SciPy."""
    log_probs = special.log_softmax(logits.numpy(), axis=1)
    picked = np.take_along_axis(log_probs, targets.numpy()[:, None], axis=1)
    return -np.squeeze(picked, 1)


# -- Categorical: ignored labels and weights ----------------------------------------------------------


def test_ignored_rows_do_not_count() -> None:
    logits, targets = normals(20, 3), labels(3, 20)
    kept = torch.arange(20) % 3 > 0
    likelihood = tb.Categorical(ignore_index=-7)
    loss = likelihood.loss(logits, torch.where(kept, targets, -7))
    assert float(loss) == pytest.approx(log_loss(logits, targets)[kept].mean(), rel=1e-12)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits[kept], targets[kept])))
    assert likelihood.count(torch.where(kept, targets, -7)) == int(kept.sum())
    nothing = likelihood.loss(logits, torch.full((20,), -7))
    assert float(nothing) == 0


def test_ignored_positions_of_a_map_add_nothing_to_the_sum_of_an_example() -> None:
    logits, targets = normals(4, 3, 5, 6), labels(3, 4, 5, 6)
    kept = labels(2, 4, 5, 6, seed=1).bool()
    loss = tb.Categorical(ignore_index=255).loss(logits, torch.where(kept, targets, 255))
    truth = (log_loss(logits, targets) * kept.numpy()).sum() / 4
    assert float(loss) == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_weights_multiply_and_the_sum_is_divided_by_the_examples(shape: tuple[int, ...]) -> None:
    """A tempered likelihood: not divided by the sum of the weights."""
    logits, targets = normals(10, 4, *shape), labels(4, 10, *shape)
    classes, examples = torch.tensor([0.5, 1.0, 2.0, 4.0]).double(), normals(10, seed=2).exp()
    each = log_loss(logits, targets) * classes[targets].numpy()
    likelihood = tb.Categorical(class_weight=classes).double()
    assert float(likelihood.loss(logits, targets)) == pytest.approx(each.sum() / 10, rel=1e-6)
    total = (each.reshape(10, -1).sum(1) * examples.numpy()).sum() / 10
    assert float(likelihood.loss(logits, targets, examples)) == pytest.approx(total, rel=1e-6)
    ones = tb.Categorical().loss(logits, targets, torch.ones(10))
    assert float(ones) == pytest.approx(float(tb.Categorical().loss(logits, targets)), rel=1e-12)


@pytest.mark.parametrize(
    "likelihood",
    [tb.Categorical(), tb.Bernoulli(), tb.Poisson(), tb.GaussianNoise(), tb.StudentT()],
)
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(4), "one weight per example"),
        (torch.ones(3, 2), "one weight per example"),
        (torch.tensor([1.0, -1.0, 1.0]), "negative"),
        (torch.tensor([1.0, math.nan, 1.0]), "undefined"),
    ],
)
def test_bad_weights_are_refused(likelihood: tb.Likelihood, weights: Tensor, message: str) -> None:
    outputs = torch.zeros(3, 2)
    targets = labels(2, 3) if isinstance(likelihood, tb.Categorical) else torch.ones(3, 2)
    with pytest.raises(ValueError, match=message):
        likelihood.loss(outputs, targets, weights)


def test_bad_settings_are_refused() -> None:
    for wrong in ([1.0, -1.0], [[1.0, 2.0]], [math.inf, 1.0]):
        with pytest.raises(ValueError, match="per class"):
            tb.Categorical(class_weight=torch.tensor(wrong))
    with pytest.raises(ValueError, match="3 entries but the network has 2 classes"):
        tb.Categorical(class_weight=[1, 2, 3]).loss(torch.zeros(2, 2), torch.zeros(2).long())
    for wrong in (0.0, -1.0, [1.0, math.nan]):
        with pytest.raises(ValueError, match="positive_weight is"):
            tb.Bernoulli(positive_weight=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 entries but the network has 3 labels"):
        tb.Bernoulli(positive_weight=[1, 2]).loss(torch.zeros(4, 3), torch.ones(4, 3))


# -- Bernoulli ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 4), (30, 2, 3)])
def test_bernoulli_loss_is_scipys(shape: tuple[int, ...]) -> None:
    logits, targets = 3 * normals(*shape), labels(2, *shape)
    each = -stats.bernoulli(special.expit(logits.numpy())).logpmf(targets.numpy())
    truth = each.reshape(30, -1).sum(1).mean()
    for kind in (torch.long, torch.float32, torch.bool):
        loss = tb.Bernoulli().loss(logits, targets.to(kind))
        assert float(loss) == pytest.approx(truth, rel=1e-10)
    weights = normals(30, seed=3).exp()
    weighted = (each.reshape(30, -1).sum(1) * weights.numpy()).mean()
    assert float(tb.Bernoulli().loss(logits, targets, weights)) == pytest.approx(weighted)


def test_positive_weight_is_torchs() -> None:
    logits, targets = normals(12, 3), labels(2, 12, 3).double()
    for factor in (2.5, [1.0, 5.0, 0.5]):
        weight = torch.tensor(factor).double()
        truth = F.binary_cross_entropy_with_logits(
            logits, targets, pos_weight=weight, reduction="sum"
        )
        loss = tb.Bernoulli(factor).loss(logits, targets)
        assert float(loss) == pytest.approx(float(truth) / 12, rel=1e-6)


def test_bernoulli_refuses_what_is_no_label() -> None:
    with pytest.raises(ValueError, match="targets contain -1, which is no binary label"):
        tb.Bernoulli().loss(torch.zeros(2), torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="one target per output"):
        tb.Bernoulli().loss(torch.zeros(2, 3), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"contain 0\.5"):
        tb.Bernoulli().check(torch.zeros(2, 1), torch.tensor([0.5, 1.0]))


# -- What torch's losses and the targets denote -------------------------------------------------------


def test_losses_of_torch_are_translated() -> None:
    weight = torch.tensor([1.0, 3.0])
    classes = as_likelihood(nn.CrossEntropyLoss(weight, ignore_index=1))
    assert isinstance(classes, tb.Categorical)
    assert classes.ignore_index == 1
    assert torch.equal(classes.class_weight, weight)  # type: ignore[arg-type]
    assert as_likelihood(nn.CrossEntropyLoss()).ignore_index is None  # type: ignore[union-attr]
    binary = as_likelihood(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])))
    assert isinstance(binary, tb.Bernoulli)
    logits, targets = normals(5, 1), labels(2, 5, 1).double()
    truth = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))(logits, targets)
    assert float(binary.loss(logits, targets)) == pytest.approx(float(truth))
    assert isinstance(as_likelihood(nn.PoissonNLLLoss()), tb.Poisson)


@pytest.mark.parametrize(
    ("outputs", "targets", "kind"),
    [
        ((2, 3), labels(3, 20), tb.Categorical),
        ((2, 2), labels(2, 20), tb.Categorical),
        ((2, 2), labels(2, 20).bool(), tb.Categorical),
        ((2, 3, 4, 4), labels(3, 5, 4, 4), tb.Categorical),
        ((2, 1), labels(2, 20), tb.Bernoulli),
        ((2,), labels(2, 20), tb.Bernoulli),
        ((2, 1), labels(2, 20, 1).bool(), tb.Bernoulli),
        ((2, 1, 4, 4), labels(2, 5, 4, 4), tb.Bernoulli),
        ((2, 1), normals(20), tb.GaussianNoise),
        ((2, 3), normals(20, 3), tb.GaussianNoise),
        ((2, 1), labels(5, 20).double(), tb.GaussianNoise),
    ],
)
def test_what_is_inferred_without_a_word(
    outputs: tuple[int, ...], targets: Tensor, kind: type
) -> None:
    assert type(inferred_likelihood(torch.zeros(outputs), targets)) is kind


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        ((2, 1), labels(2, 20).double()),
        ((2,), labels(2, 20).float()),
        ((2, 3), labels(2, 20, 3)),
        ((2, 3), labels(2, 20, 3).float()),
    ],
)
def test_what_is_inferred_with_a_warning(outputs: tuple[int, ...], targets: Tensor) -> None:
    with pytest.warns(UserWarning, match=r"all targets are 0 or 1.*Bernoulli.*GaussianNoise"):
        assert type(inferred_likelihood(torch.zeros(outputs), targets)) is tb.Bernoulli


def test_one_hot_targets_are_not_guessed_at() -> None:
    for hot in (F.one_hot(labels(3, 20)), F.one_hot(labels(3, 20)).float()):
        with pytest.raises(
            ValueError, match=r"one-hot classes: pass targets.argmax\(1\).*Bernoulli"
        ):
            inferred_likelihood(torch.zeros(2, 3), hot)


def test_labels_are_checked_before_training() -> None:
    check = tb.Categorical().check
    with pytest.raises(ValueError, match=r"label -100 is out of range.*ignore_index=-100"):
        check(torch.zeros(2, 3), torch.tensor([0, -100]))
    tb.Categorical(ignore_index=-100).check(torch.zeros(2, 3), torch.tensor([0, -100]))
    with pytest.raises(ValueError, match="every target is -100"):
        tb.Categorical(ignore_index=-100).check(torch.zeros(2, 3), torch.tensor([-100]))
    with pytest.raises(ValueError, match=r"Poisson\(\) for counts"):
        check(torch.zeros(2, 1), torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=r"pass targets\[:, 0\]"):
        check(torch.zeros(2, 3), torch.zeros(2, 1).long())


@pytest.mark.parametrize("shape", [(30,), (30, 1)])
def test_classes_as_real_numbers_are_not_taken_for_a_regression(shape: tuple[int, ...]) -> None:
    targets = (torch.arange(30) % 3).double().reshape(shape)
    with pytest.raises(ValueError, match=r"pass targets.long\(\)"):
        inferred_likelihood(torch.zeros(2, 3), targets)
    assert isinstance(inferred_likelihood(torch.zeros(2, 1), targets), tb.GaussianNoise)


def test_a_label_out_of_range_in_a_later_batch_is_named() -> None:
    """Only the first batch of a loader is checked before training."""
    x, y = torch.randn(40, 2), torch.cat([torch.zeros(20), torch.full((20,), 3)]).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    for method in ("map", "vogn"):
        with pytest.raises(ValueError, match="label 3 is out of range: the network has 2 classes"):
            tb.fit(nn.Linear(2, 2), loader, method, progress=False)
