"""Likelihoods against scipy and NumPy, and on data whose noise is known."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special, stats
from torch import nn
from torch.distributions import (
    Bernoulli,
    Independent,
    MultivariateNormal,
    Normal,
    Poisson,
    StudentT,
)

import torchbayes as tb
from torchbayes.likelihood import as_likelihood


def normals(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- Categorical --------------------------------------------------------------------------------------


def test_categorical_loss_is_the_mean_log_loss() -> None:
    logits, labels = 3 * normals(50, 4), torch.arange(50) % 4
    truth = -special.log_softmax(logits.numpy(), axis=1)[np.arange(50), labels].mean()
    assert float(tb.Categorical().loss(logits, labels)) == pytest.approx(truth, rel=1e-12)


def test_categorical_loss_sums_over_the_positions_of_an_example() -> None:
    """The likelihood of an image is the product over its pixels; the mean is over images."""
    logits = normals(6, 3, 2, 5)
    labels = torch.randint(3, (6, 2, 5), generator=torch.Generator().manual_seed(0))
    log_probs = special.log_softmax(logits.numpy(), axis=1)
    picked = np.take_along_axis(log_probs, labels.numpy()[:, None], axis=1)
    truth = -picked.reshape(6, -1).sum(1).mean()
    assert float(tb.Categorical().loss(logits, labels)) == pytest.approx(truth, rel=1e-12)
    p = tb.Categorical().predictive(logits[None])
    assert p.probs.shape == (6, 3, 2, 5)
    assert p.entropy.shape == (6, 2, 5)


def test_extreme_logits_have_a_finite_loss() -> None:
    logits = torch.tensor([[1e4, 0.0]])
    assert float(tb.Categorical().loss(logits, torch.tensor([1]))) == 1e4


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_one_output_is_no_choice_of_classes(shape: tuple[int, ...]) -> None:
    """Its softmax would be 1 for every example, whatever the network says."""
    with pytest.raises(ValueError, match=r"at least 2.*GaussianNoise"):
        tb.Categorical().predictive(torch.zeros(3, *shape))
    with pytest.raises(ValueError, match=r"at least 2.*GaussianNoise"):
        tb.Categorical().loss(torch.zeros(shape), torch.zeros(5, dtype=torch.long))


# -- Gaussian noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("shape", [(20,), (20, 1), (20, 3), (20, 2, 3)])
def test_gaussian_loss_is_scipys(std: float, shape: tuple[int, ...]) -> None:
    outputs, targets = normals(*shape), normals(*shape, seed=1)
    truth = -stats.norm(outputs.numpy(), std).logpdf(targets.numpy()).reshape(20, -1).sum(1).mean()
    loss = tb.GaussianNoise(std).loss(outputs, targets)
    assert float(loss) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("likelihood", [tb.GaussianNoise(0.5), tb.likelihood.Observation(Poisson)])
def test_a_column_and_a_row_of_targets_are_the_same(likelihood: tb.likelihood.Observation) -> None:
    outputs = normals(7).exp()
    targets = torch.arange(7.0).double()
    losses = {
        round(float(likelihood.loss(outputs.reshape(a), targets.reshape(b))), 9)
        for a in ((7,), (7, 1))
        for b in ((7,), (7, 1), (7, 1, 1))
    }
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        ((6, 1), (5,)),
        ((6, 1), (1, 6)),
        ((3, 2), (2, 3)),
        ((3, 2), (6,)),
        ((3, 2), (3,)),
        ((6,), ()),
    ],
)
def test_targets_of_another_shape_are_refused(
    outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    likelihood = tb.GaussianNoise()
    with pytest.raises(ValueError, match="one target per output"):
        likelihood.loss(torch.zeros(outputs), torch.zeros(targets))
    with pytest.raises(ValueError, match="one target per output"):
        likelihood.predictive(torch.zeros(4, *outputs)).log_prob(torch.zeros(targets))


def test_learned_noise_finds_the_truth() -> None:
    """The optimum is the root mean square of the residuals, which is near the noise that made them."""
    true = 0.3
    x = normals(2000, 1, dtype=torch.float32)
    y = 2 * x + true * normals(2000, 1, seed=1, dtype=torch.float32)
    model, noise = nn.Linear(1, 1), tb.GaussianNoise(learned=True)
    optimizer = torch.optim.LBFGS(
        [*model.parameters(), *noise.parameters()], max_iter=100, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = noise.loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)
    design = np.column_stack([x.numpy(), np.ones(2000)])
    residuals = np.linalg.lstsq(design, y.numpy(), rcond=None)[1]
    assert float(noise.std.detach()) == pytest.approx(math.sqrt(residuals[0] / 2000), rel=1e-3)
    # The standard error of a standard deviation is std / √(2n).
    assert abs(float(noise.std.detach()) - true) < 4 * true / math.sqrt(2 * 2000)


def test_fixed_noise_is_not_trained_but_moves_and_saves() -> None:
    noise = tb.GaussianNoise(0.2)
    assert not any(p.requires_grad for p in noise.parameters())
    other = tb.GaussianNoise(5.0)
    other.load_state_dict(noise.state_dict())
    assert float(other.std) == pytest.approx(0.2)
    assert noise.double().loss(torch.zeros(1).double(), torch.zeros(1)).dtype == torch.float64


def test_predicted_noise_is_scipys() -> None:
    outputs, targets = normals(30, 4), normals(30, 2, seed=1)
    mean, log_std = outputs.numpy()[:, :2], outputs.numpy()[:, 2:]
    truth = -stats.norm(mean, np.exp(log_std)).logpdf(targets.numpy()).sum(1).mean()
    noise = tb.GaussianNoise(predicted=True)
    assert float(noise.loss(outputs, targets)) == pytest.approx(truth, rel=1e-12)
    p = noise.predictive(outputs[None])
    np.testing.assert_allclose(p.mean, mean)
    np.testing.assert_allclose(p.std, np.exp(log_std))
    with pytest.raises(ValueError, match=r"even number of outputs.*has 3"):
        noise.loss(torch.zeros(5, 3), torch.zeros(5, 1))


def test_a_prediction_stays_as_it_was_while_its_noise_is_trained_on() -> None:
    noise = tb.GaussianNoise(0.5, learned=True)
    p = noise.predictive(torch.zeros(3, 4, 1))
    before = p.std.numpy()  # without a gradient
    with torch.no_grad():
        noise.log_std.add_(1)
    np.testing.assert_array_equal(p.std.numpy(), before)
    assert not p.log_prob(torch.zeros(4)).requires_grad


def test_copies_of_a_likelihood_are_their_own() -> None:
    noise = tb.GaussianNoise(0.5, learned=True)
    for other in (copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))):
        with torch.no_grad():
            other.log_std.fill_(math.log(3.0))
        target = torch.zeros(1)
        truth = -stats.norm(0, 3).logpdf(0)
        assert other.loss(target, target).item() == pytest.approx(truth, rel=1e-6)
    assert float(noise.std.detach()) == pytest.approx(0.5)


@pytest.mark.parametrize("std", [0.0, -1.0, math.inf, math.nan])
def test_impossible_noise(std: float) -> None:
    with pytest.raises(ValueError, match="expected a noise level above 0"):
        tb.GaussianNoise(std)


def test_noise_is_learned_or_predicted() -> None:
    with pytest.raises(ValueError, match="either learned or predicted"):
        tb.GaussianNoise(learned=True, predicted=True)


# -- Any distribution ---------------------------------------------------------------------------------


def test_counts_and_heavy_tails_are_scipys() -> None:
    outputs, counts = normals(25, 2), torch.arange(50).reshape(25, 2) % 7
    poisson = tb.likelihood.Observation(lambda out: Poisson(out.exp()))
    truth = -stats.poisson(np.exp(outputs.numpy())).logpmf(counts.numpy()).sum(1).mean()
    assert float(poisson.loss(outputs, counts)) == pytest.approx(truth, rel=1e-10)
    student = tb.likelihood.Observation(lambda out: StudentT(4.0, out, 0.5))
    targets = normals(25, 2, seed=2)
    truth = -stats.t(4, outputs.numpy(), 0.5).logpdf(targets.numpy()).sum(1).mean()
    assert float(student.loss(outputs, targets)) == pytest.approx(truth, rel=1e-10)
    p = student.predictive(outputs[None])
    np.testing.assert_allclose(p.mean, outputs)
    np.testing.assert_allclose(p.std, stats.t(4, 0, 0.5).std() * np.ones((25, 2)), rtol=1e-10)


def test_distributions_over_vectors() -> None:
    outputs, targets = normals(9, 3), normals(9, 3, seed=1)
    covariance = torch.tensor([[2.0, 0.5, 0], [0.5, 1, 0], [0, 0, 3]]).double()
    vector = tb.likelihood.Observation(lambda out: MultivariateNormal(out, covariance))
    truth = [
        stats.multivariate_normal(m, covariance.numpy()).logpdf(y)
        for m, y in zip(outputs.numpy(), targets.numpy(), strict=True)
    ]
    assert float(vector.loss(outputs, targets)) == pytest.approx(-np.mean(truth), rel=1e-10)
    p = vector.predictive(torch.stack([outputs, outputs]))
    np.testing.assert_allclose(p.log_prob(targets), truth, rtol=1e-10)
    joint = tb.likelihood.Observation(lambda out: Independent(Normal(out, 1.0), 1))
    plain = tb.GaussianNoise(1.0)
    assert float(joint.loss(outputs, targets)) == pytest.approx(
        float(plain.loss(outputs, targets)), rel=1e-6
    )


def test_a_function_that_gives_no_distribution() -> None:
    with pytest.raises(TypeError, match=r"gives a Tensor but must give a torch\.distributions"):
        tb.likelihood.Observation(lambda out: out).loss(torch.zeros(2), torch.zeros(2))  # type: ignore[arg-type, return-value]


# -- What passes for a likelihood ---------------------------------------------------------------------


def test_as_likelihood_takes_what_is_clear() -> None:
    noise = tb.GaussianNoise()
    assert as_likelihood(noise) is noise
    assert isinstance(as_likelihood(nn.CrossEntropyLoss()), tb.Categorical)
    made = as_likelihood(lambda out: Bernoulli(logits=out))
    logits, targets = normals(6), torch.tensor([0.0, 1, 1, 0, 1, 0]).double()
    truth = float(F.binary_cross_entropy_with_logits(logits, targets))
    assert float(made.loss(logits, targets)) == pytest.approx(truth)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), ValueError, "label_smoothing=0.1"),
        (nn.CrossEntropyLoss(reduction="sum"), ValueError, "not a mean"),
        (nn.BCEWithLogitsLoss(reduction="none"), ValueError, "not a mean"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(2)), ValueError, "weights="),
        (nn.PoissonNLLLoss(log_input=False), ValueError, "logarithm"),
        (nn.GaussianNLLLoss(), ValueError, "predicted=True"),
        (nn.BCELoss(), ValueError, "sigmoid"),
        (nn.NLLLoss(), ValueError, "Categorical"),
        (nn.MSELoss(), ValueError, "how large the noise is"),
        (nn.L1Loss(), TypeError, "cannot use L1Loss"),
        ("mse", TypeError, "cannot use str"),
        (None, TypeError, "cannot use NoneType"),
    ],
)
def test_as_likelihood_refuses_the_rest(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_likelihood(value)
