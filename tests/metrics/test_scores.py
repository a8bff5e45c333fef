"""The tables of results.json: keys, agreement with single metrics, undefined values."""

import json
import math

import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from torchbayes import metrics

BASE = [
    "accuracy",
    "nll",
    "ece",
    "ece_equal_mass",
    "mce",
    "brier",
    "auroc_misclassification",
    "auroc_misclassification_entropy",
    "aurc",
]
OOD = ["auroc_ood", "auroc_ood_mutual_information", "auroc_ood_confidence", "fpr95_ood"]


def test_keys_without_ood(predictions):
    probs, targets = predictions()
    table = metrics.classification_scores(probs, targets)
    assert list(table) == BASE
    assert all(type(value) is float for value in table.values())
    json.dumps(table, allow_nan=False)
    known = torch.linspace(0, 1, len(probs))
    assert metrics.classification_scores(probs, targets, mutual_information=known) == table


def test_values_are_those_of_the_single_metrics(predictions):
    probs, targets = predictions()
    table = metrics.classification_scores(probs, targets)
    for key in BASE:
        if key not in ("ece_equal_mass", "aurc", "auroc_misclassification_entropy"):
            assert table[key] == getattr(metrics, key)(probs, targets), key
    by_entropy = metrics.auroc_misclassification(probs, targets, by_entropy=True)
    assert table["auroc_misclassification_entropy"] == by_entropy
    assert table["ece_equal_mass"] == metrics.ece(probs, targets, equal_mass=True)
    assert table["aurc"] == metrics.aurc(probs.max(1).values, probs.argmax(1) == targets)


def test_ood_scores_agree_with_scikit_learn(predictions):
    probs, targets = predictions(n=300)
    foreign = predictions(n=200, seed=1)[0].sqrt()
    foreign = foreign / foreign.sum(1, keepdim=True)
    generator = torch.Generator().manual_seed(2)
    known_information = torch.rand(300, generator=generator)
    foreign_information = torch.rand(200, generator=generator) + 0.3
    table = metrics.classification_scores(
        probs,
        targets,
        mutual_information=known_information,
        ood_probs=foreign,
        ood_mutual_information=foreign_information,
    )
    assert list(table) == BASE + OOD
    assert all(type(value) is float for value in table.values())
    labels = [0] * 300 + [1] * 200
    both = torch.cat([probs, foreign])
    entropy = -(both * both.log()).sum(1)
    assert table["auroc_ood"] == pytest.approx(roc_auc_score(labels, entropy))
    assert table["auroc_ood_confidence"] == pytest.approx(
        roc_auc_score(labels, -both.max(1).values)
    )
    assert table["auroc_ood_mutual_information"] == pytest.approx(
        roc_auc_score(labels, torch.cat([known_information, foreign_information]))
    )
    fpr, tpr, _ = roc_curve(labels, entropy, drop_intermediate=False)
    assert table["fpr95_ood"] == pytest.approx(fpr[tpr >= 0.95].min())


def test_undefined_values_are_nan():
    probs, targets = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1])
    table = metrics.classification_scores(probs, targets, ood_probs=probs)
    assert [key for key, value in table.items() if math.isnan(value)] == [
        "auroc_misclassification",
        "auroc_misclassification_entropy",
        "auroc_ood_mutual_information",
    ]
    assert table["auroc_ood"] == 0.5


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"ood_mutual_information": torch.ones(3)}, "without ood_probs"),
        ({"mutual_information": torch.ones(3)}, "mutual_information has 3 values, expected 2"),
        ({"ood_probs": torch.full((4, 3), 1 / 3)}, "ood_probs has 3 classes, expected the 2"),
        ({"ood_probs": torch.tensor([[2.0, -1.5]])}, "of ood_probs sums to .*softmax"),
        (
            {"ood_probs": torch.full((4, 2), 0.5), "mutual_information": torch.ones(2)},
            "both or neither",
        ),
        (
            {
                "ood_probs": torch.full((4, 2), 0.5),
                "mutual_information": torch.ones(2),
                "ood_mutual_information": torch.ones(2),
            },
            "ood_mutual_information has 2 values, expected 4",
        ),
    ],
)
def test_rejects_mismatched_extras(extra, message):
    probs, targets = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=message):
        metrics.classification_scores(probs, targets, **extra)


def test_regression_table():
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    means = torch.randn(3, n, generator=generator, dtype=torch.float64)
    stds = 0.5 + torch.rand(3, n, generator=generator, dtype=torch.float64)
    which = torch.randint(3, (1, n), generator=generator)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    targets = (means.gather(0, which) + stds.gather(0, which) * noise)[0]
    table = metrics.regression_scores(means, stds, targets)
    assert list(table) == [
        "rmse", "nll", "crps", "coverage50", "width50", "coverage90", "width90", "coverage95", "width95",
    ]  # fmt: skip
    assert all(type(value) is float for value in table.values())
    assert table["rmse"] == metrics.rmse(means.mean(0), targets)
    assert table["nll"] == metrics.gaussian_mixture_nll(means, stds, targets)
    assert table["crps"] == metrics.gaussian_mixture_crps(means, stds, targets)
    # The targets are drawn from the mixture, so coverage is binomial around its target.
    for share in (0.5, 0.9, 0.95):
        error = math.sqrt(share * (1 - share) / n)
        assert table[f"coverage{100 * share:.0f}"] == pytest.approx(share, abs=4 * error)


def test_regression_width_of_one_gaussian():
    table = metrics.regression_scores(torch.zeros(1, 3), torch.full((1, 3), 2.0), torch.zeros(3))
    assert table["width95"] == pytest.approx(2 * 1.959963984540054 * 2.0)
