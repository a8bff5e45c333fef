"""Precision, evidence and predictive equal those of laplace-torch 0.3, which is installed aside.

pip install --no-deps -r tests/laplace/peer.txt
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from tests.laplace.networks import task

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer = pytest.importorskip("laplace")

STRUCTURES = {"diagonal": "diag", "kronecker": "kron", "full": "full"}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the other library


def theirs(name: str, structure: str, prior: float) -> Any:
    own = task(name)
    regression = isinstance(own.likelihood, tb.GaussianNoise)
    options: dict[str, Any] = {"sigma_noise": 0.3} if regression else {}
    la = peer.Laplace(
        own.net, "regression" if regression else "classification", subset_of_weights="all",
        hessian_structure=STRUCTURES[structure], prior_precision=prior, **options,
    )  # fmt: skip
    la.fit(DataLoader(TensorDataset(own.x, own.y), batch_size=16))
    return la


def precision(la: tb.Laplace) -> torch.Tensor:
    """The posterior's precision matrix, from the covariance of its draws' linear map."""
    posterior = la.posterior()
    if isinstance(posterior, tb.Gaussian):
        return torch.diag(torch.cat([s.flatten() for s in posterior.std().values()]) ** -2)
    if isinstance(posterior, tb.KroneckerGaussian):
        blocks = []
        for name in la.names:
            left, right = posterior._outputs[name], posterior._inputs[name]
            basis = torch.kron(left.contiguous(), right.contiguous())
            blocks.append(basis @ torch.diag(posterior._scales[name].flatten() ** -2) @ basis.t())
        return torch.block_diag(*blocks)
    assert isinstance(posterior, tb.posterior.FullGaussian)
    return torch.linalg.inv(posterior.covariance())


def close(own: torch.Tensor, other: torch.Tensor) -> None:
    scale = other.abs().max().clamp_min(1e-12)
    assert float((own.to(other) - other).abs().max() / scale) < 1e-4


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["linear", "logistic", "conv"])
def test_equal_to_laplace_torch(name: str, structure: str) -> None:
    other = theirs(name, structure, 2.0)
    own = task(name).laplace(structure=structure, prior=2.0, batch_size=16)
    found = other.posterior_precision
    if structure == "kronecker":
        found = found.to_matrix()
    elif structure == "diagonal":
        found = torch.diag(found)
    close(precision(own), found.detach())
    evidence = float(other.log_marginal_likelihood())
    assert float(own.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-4)
    new = task(name).x[:7] * 1.5
    if name == "linear":
        mean, covariance = other(new)
        p = own.predictive(new)
        assert isinstance(p, tb.RegressionPredictive)
        close(p.mean, mean.detach())
        close(p.covariance, covariance.detach())  # type: ignore[attr-defined]
        return
    for link in ("probit", "bridge"):
        p = own.predictive(new, link)
        assert isinstance(p, tb.ClassPredictive)
        close(p.probs, other(new, link_approx=link).detach())
    # Draws agree within the error of their number.
    drawn = other(new, link_approx="mc", n_samples=20_000).detach()
    p = own.predictive(new, "mc", samples=20_000, generator=torch.Generator().manual_seed(0))
    assert isinstance(p, tb.ClassPredictive)
    assert float((p.probs - drawn).abs().max()) < 4 * (2 * 0.25 / 20_000) ** 0.5


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_is_the_same_function(structure: str) -> None:
    # Its values: the gradient of laplace-torch's Kronecker evidence in the noise is not that of its values.
    other, own = theirs("linear", structure, 2.0), task("linear").laplace(structure=structure)
    for delta, noise in ((0.1, 0.2), (5.0, 0.3), (0.7, 1.0)):
        there = float(other.log_marginal_likelihood(torch.tensor(delta), torch.tensor(noise)))
        assert float(own.log_marginal_likelihood(delta, noise)) == pytest.approx(there, rel=1e-4)
    # One precision for each weight tensor.
    there = float(other.log_marginal_likelihood(torch.tensor([0.5, 3.0])))
    here = own.log_marginal_likelihood(torch.tensor([0.5, 3.0]), 1.0)
    assert float(here) == pytest.approx(there, rel=1e-4)
