"""Curvature of binary labels, weights of labels and labels that are missing, against autograd's Hessian."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb

N = 40
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
LABELS = torch.randint(0, 3, (N,), generator=GENERATOR)
SOME = torch.where(X[:, 2] > 0, LABELS, -100)
TAGS = torch.randint(0, 2, (N, 3), generator=GENERATOR)
CASES = {
    "binary": (tb.Bernoulli(), TAGS[:, 0]),
    "binary, real": (tb.Bernoulli(), TAGS[:, :1].float()),
    "several labels": (tb.Bernoulli(), TAGS),
    "rare labels": (tb.Bernoulli(positive_weight=[1.0, 2.0, 5.0]), TAGS),
    "one weight": (tb.Bernoulli(positive_weight=3.0), TAGS),
    "missing labels": (tb.Categorical(ignore_index=-100), SOME),
    "class weights": (tb.Categorical(class_weight=[1.0, 2.0, 5.0]), LABELS),
    "both": (tb.Categorical(ignore_index=-100, class_weight=[1.0, 2.0, 5.0]), SOME),
}


def network(targets: Tensor) -> nn.Linear:
    torch.manual_seed(0)
    binary = targets.dim() == 1 and int(targets.max()) == 1
    return nn.Linear(3, 1 if binary or targets.shape[1:] == (1,) else 3, bias=False)


def negative_log_likelihood(likelihood: tb.Likelihood, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over the examples; the outputs are linear in the weights, so its Hessian is Gauss–Newton's."""
    return likelihood.loss(X @ weight.T, targets) * likelihood.count(targets)


@pytest.mark.parametrize("case", CASES)
def test_the_posterior_is_the_inverse_hessian(case: str) -> None:
    likelihood, targets = CASES[case]
    net = network(targets)
    laplace = tb.Laplace(
        net, (X, targets), likelihood, structure="full", curvature="ggn", prior=1.0, check=False
    )
    weight = net.weight.detach()
    hessian = torch.autograd.functional.hessian(
        lambda w: negative_log_likelihood(likelihood, w, targets), weight
    ).reshape(weight.numel(), -1)  # type: ignore[union-attr]
    wanted = torch.linalg.inv(hessian + torch.eye(len(hessian))).diagonal().sqrt()
    assert torch.allclose(laplace.posterior().std()["weight"].flatten(), wanted, rtol=1e-3)
    # The evidence at these weights, with the normalisers of prior and Gaussian.
    total = negative_log_likelihood(likelihood, weight, targets) + weight.square().sum() / 2
    evidence = -total - torch.logdet(hessian + torch.eye(len(hessian))) / 2
    assert float(laplace.log_marginal_likelihood()) == pytest.approx(float(evidence), rel=1e-4)


@pytest.mark.parametrize("case", ["several labels", "rare labels", "both"])
def test_sampled_labels_have_the_same_curvature_on_average(case: str) -> None:
    likelihood, targets = CASES[case]
    net = network(targets)
    exact, sampled = (
        tb.Laplace(
            net, (X, targets), likelihood, structure="diagonal", curvature=kind, samples=500,
            check=False,
        ).posterior().std()["weight"]
        for kind in ("ggn", "sampled")
    )  # fmt: skip
    # 40 examples times 500 draws: about 1 % for a variance, half of it for a standard deviation.
    assert torch.allclose(exact, sampled, rtol=0.05)


def test_a_network_with_one_logit_predicts_binary_labels() -> None:
    likelihood, targets = CASES["binary"]
    laplace = tb.Laplace(network(targets), (X, targets), likelihood, check=False)
    assert isinstance(laplace.predictive(X), tb.BinaryPredictive)
