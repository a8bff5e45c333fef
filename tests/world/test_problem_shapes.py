"""Problems other than one label or one number per example, as people have them: one test per finding."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torchbayes as tb
from torchbayes import metrics
from torchbayes.data import StreamLoader


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(count: int = 300, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, generator=seeded(seed))


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, outputs))


def train(net: nn.Module, data: Any, method: str = "map", **options: Any) -> tb.Run:
    settings: dict[str, Any] = {"epochs": 20, "batch_size": 50, "progress": False}
    return tb.fit(net, data, method, **(settings | options))


# -- Binary and multi-label ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["vogn", "ivon"])
def test_a_network_with_one_logit_takes_whole_labels(method: str) -> None:
    """Once: "label 1 is out of range: the network has 1 classes"."""
    x = inputs()
    y = (x[:, 0] > 0).long()
    run = train(network(1), (x, y), method, validation=(x, y))
    assert isinstance(run.likelihood, tb.Bernoulli)
    assert run.history[-1]["validation_accuracy"] > 0.95
    p = run.predict(x)
    assert isinstance(p, tb.BinaryPredictive)
    assert p.probs.shape == (300,)
    assert metrics.binary_scores(p.probs, y)["auroc"] > 0.99
    assert float((p.entropy - p.aleatoric - p.epistemic).abs().max()) < 1e-6


def test_real_targets_of_0_and_1_are_never_silently_a_regression() -> None:
    x = inputs()
    y = (x[:, 0] > 0).float()
    with pytest.warns(UserWarning, match=r"taken as binary labels.*GaussianNoise") as caught:
        run = train(network(1), (x, y), epochs=1)
    assert caught[0].filename == __file__  # it names the line that called fit
    assert isinstance(run.likelihood, tb.Bernoulli)
    as_numbers = train(network(1), (x, y), likelihood=tb.GaussianNoise(), epochs=1)
    assert isinstance(as_numbers.predict(x), tb.RegressionPredictive)


def test_the_loss_people_have_is_understood() -> None:
    x = inputs()
    y = (x[:, 0] > 0).float()
    run = train(network(1), (x, y), likelihood=nn.BCEWithLogitsLoss())
    assert isinstance(run.predict(x), tb.BinaryPredictive)
    counts = torch.poisson(x[:, 0].exp(), generator=seeded())
    run = train(network(1), (x, counts), likelihood=nn.PoissonNLLLoss())
    assert isinstance(run.likelihood, tb.Poisson)


@pytest.mark.parametrize("method", ["vogn", "ivon", "bbb", "sgld"])
def test_several_labels_that_do_not_exclude_each_other(method: str) -> None:
    x = inputs()
    y = (x > torch.tensor([0.0, 0.5, -0.5])).long()
    run = train(network(3), (x, y), method, likelihood=tb.Bernoulli())
    p = run.predict(x)
    assert isinstance(p, tb.BinaryPredictive)
    assert p.probs.shape == (300, 3)
    assert metrics.binary_scores(p.probs, y)["auroc"] > 0.9


def test_an_estimator_takes_a_network_with_one_output() -> None:
    x = inputs().numpy()
    y = np.where(x[:, 0] > 0, "yes", "no")
    net = tb.BayesianClassifier(network(1), "map", lr=0.02, epochs=30, random_state=0).fit(x, y)
    assert net.predict_proba(x).shape == (300, 2)
    np.testing.assert_allclose(net.predict_proba(x).sum(1), 1, rtol=1e-6)
    assert net.score(x, y) > 0.95
    two = tb.BayesianClassifier(network(2), "map", lr=0.02, epochs=30, random_state=0).fit(x, y)
    assert two.score(x, y) > 0.95


# -- Counts and outliers ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["vogn", "ivon"])
def test_counts_have_quantiles_and_samples(method: str) -> None:
    """Once: "Poisson has no quantile function … or sample it", and nothing to sample with."""
    x = inputs(600)
    counts = torch.poisson((1 + x[:, :1]).exp(), generator=seeded(1))
    options = {"lr": 0.03} if method == "ivon" else {}
    run = train(network(1), (x, counts), method, likelihood=tb.Poisson(), epochs=30, **options)
    p = run.predict(x)
    assert isinstance(p, tb.RegressionPredictive)
    covered = float((counts <= p.quantile(0.9)).double().mean())
    # A count reaches its 90 % quantile more often, because it jumps past it.
    assert 0.88 < covered < 0.98
    assert p.sample(3, seeded()).shape == (3, 600, 1)
    constant = tb.Poisson().predictive(counts.mean().log().expand(1, 600, 1))
    assert float(p.log_prob(counts).mean()) > float(constant.log_prob(counts).mean()) + 0.5
    copy = pickle.loads(pickle.dumps(run.likelihood))
    assert isinstance(copy, tb.Poisson)


@pytest.mark.parametrize("method", ["vogn", "ivon"])
def test_outliers_do_not_spoil_a_fit_with_heavy_tails(method: str) -> None:
    x = inputs(600)
    noise = 0.1 * torch.randn(600, 1, generator=seeded(1))
    noise[::20] += 8  # one in twenty is far off, always to the same side
    true = x[:, :1]
    options = {"lr": 0.03} if method == "ivon" else {}

    def error(likelihood: tb.Likelihood) -> float:
        run = train(
            network(1), (x, true + noise), method, likelihood=likelihood, epochs=30, **options
        )
        return float((run.predict(x).prediction - true).abs().mean())

    heavy, light = error(tb.StudentT(2.0, 0.2, learned=True)), error(tb.GaussianNoise(learned=True))
    assert heavy < 0.5 * light


@pytest.mark.filterwarnings("ignore:.*goes back to the beginning of epoch")
def test_noise_that_diverges_names_the_step() -> None:
    """Once: torch's "Expected parameter scale …" with the numbers of the whole batch."""
    x = inputs()
    y = x.sum(1, keepdim=True)
    with pytest.raises(tb.TrainingError, match=r"training broke down at step \d+") as caught:
        train(network(2), (x, y), "mle", likelihood=tb.GaussianNoise(predicted=True), lr=1e3)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        tb.TrainingError, match=r"step \d+ .*(outputs are|loss is) not finite"
    ) as caught:
        train(
            network(2), (x, y), "mle", lr=1e38,
            likelihood=lambda o: torch.distributions.Normal(o[:, :1], o[:, 1:].exp() + 1e-3),
        )  # fmt: skip
    assert "\n" not in str(caught.value)


# -- Weights and ignored labels -----------------------------------------------------------------------


def weighted() -> tuple[Tensor, Tensor, Tensor]:
    x = inputs(200)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + x[:, :1].square()
    return x, y, torch.rand(200, generator=seeded(3)) * 2


def by_least_squares(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    root = w.double().sqrt()[:, None]
    return torch.linalg.lstsq(root * x.double(), root * y.double()).solution


@pytest.mark.parametrize("form", ["argument", "tensor data set", "loader", "pieces"])
def test_weights_of_examples_are_those_of_least_squares(form: str) -> None:
    x, y, w = weighted()
    data: Any = (x, y)
    options: dict[str, Any] = {"likelihood": tb.GaussianNoise(), "batch_size": 200}
    if form in ("argument", "pieces"):
        options |= {"weights": w, "accumulate": 3 if form == "pieces" else 1}
    elif form == "tensor data set":
        data = TensorDataset(x, y, w)
    else:
        data = StreamLoader(TensorDataset(x, y, w), 200, shuffle=True, seed=0, workers=0)
    torch.manual_seed(0)
    net = nn.Linear(3, 1, bias=False)
    run = train(net, data, "mle", lr=0.1, epochs=250, schedule="cosine", **options)
    found = run.model.weight.detach().double().T
    torch.testing.assert_close(found, by_least_squares(x, y, w), rtol=1e-3, atol=1e-3)
    plain = by_least_squares(x, y, torch.ones(200))
    assert float((found - plain).abs().max()) > 0.02  # the two can be told apart


@pytest.mark.parametrize("method", ["ivon", "sgld", "bbb", "ensemble"])
def test_a_weight_of_two_is_two_examples(method: str) -> None:
    """Half of the examples twice, or with weights 2 and 0: the same loss, the same draws."""
    x = inputs(40)
    y = (x[:, 0] > 0).long()
    twice = torch.cat([torch.arange(20), torch.arange(20)])
    w = torch.cat([2 * torch.ones(20), torch.zeros(20)])
    means = []
    for data, weights in (((x[twice], y[twice]), None), ((x, y), w)):
        net = network(2)
        options = {"members": 2} if method == "ensemble" else {}
        run = train(net, data, method, weights=weights, batch_size=40, epochs=5, **options)
        means.append(run.posterior.mean())
    for name, value in means[0].items():
        torch.testing.assert_close(means[1][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch_size", [200, 50])
def test_examples_without_a_label_leave_the_prior_its_weight(batch_size: int) -> None:
    """The maximum of the posterior of the labelled examples alone, by scikit-learn."""
    x = inputs(200)
    y = torch.distributions.Categorical(logits=x).sample()
    labelled = torch.arange(200) % 4 == 0
    precision = 5.0
    net = nn.Linear(3, 3, bias=False)
    run = train(
        net, (x, torch.where(labelled, y, -100)), "map", prior=precision, lr=0.05, schedule="cosine",
        likelihood=tb.Categorical(ignore_index=-100), epochs=batch_size, batch_size=batch_size,
        validation=(x, torch.where(labelled, y, -100)),
    )  # fmt: skip
    truth = LogisticRegression(C=1 / precision, fit_intercept=False, tol=1e-8)
    truth.fit(x[labelled].numpy(), y[labelled].numpy())
    found = run.model.weight.detach().numpy()
    np.testing.assert_allclose(found, truth.coef_, atol=0.003 if batch_size == 200 else 0.03)
    accuracy = truth.score(x[labelled].numpy(), y[labelled].numpy())
    assert run.history[-1]["validation_accuracy"] == pytest.approx(accuracy, abs=0.021)


def test_weights_that_cannot_be_are_refused() -> None:
    x, y, w = weighted()
    with pytest.raises(ValueError, match="one weight per example"):
        train(network(1), (x, y), weights=w[:7])
    with pytest.raises(ValueError, match="negative"):
        train(network(1), (x, y), weights=-w)
    loader = StreamLoader(TensorDataset(x, y), 10, shuffle=True, seed=0, workers=0)
    with pytest.raises(
        ValueError, match=r"weights are for inputs and targets in memory.*StreamLoader"
    ):
        train(network(1), loader, weights=w)

    class Own(tb.Likelihood):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
            return (outputs - targets).square().mean()

        def predictive(self, outputs: Tensor) -> tb.Predictive:
            raise NotImplementedError

    train(network(1), (x, y), likelihood=Own(), epochs=1)
    with pytest.raises(ValueError, match=r"Own\.loss does not take any"):
        train(network(1), (x, y), likelihood=Own(), weights=w)


# -- Graphs -------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        outputs: Tensor = adjacency @ self.two(torch.relu(adjacency @ self.one(features)))
        return outputs


def graph() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two communities, noisy features, and a chance of an edge that is larger within each."""
    y = (torch.arange(120) >= 60).long()
    close = torch.where(y[:, None] == y, 0.1, 0.01)
    edges = (torch.rand(120, 120, generator=seeded(1)) < close).float()
    adjacency = ((edges + edges.T) > 0).float() + torch.eye(120)
    features = y[:, None] + 2 * torch.randn(120, 8, generator=seeded(2))
    return (features, adjacency / adjacency.sum(1, keepdim=True)), y


@pytest.mark.parametrize("method", ["ivon", "sgld", "map"])
def test_a_graph_of_which_some_nodes_are_labelled(method: str) -> None:
    """Once: "mat1 and mat2 shapes cannot be multiplied (120x120 and 1x16)", with no way out."""
    whole, y = graph()
    labelled = torch.arange(120) % 4 == 0
    torch.manual_seed(0)
    run = tb.fit(
        Convolutions(), (whole, torch.where(labelled, y, -1)), method, split=False, epochs=150,
        likelihood=tb.Categorical(ignore_index=-1), validation=(whole, y), progress=False,
    )  # fmt: skip
    assert run.history[-1]["validation_accuracy"] > 0.8
    p = run.predict(whole, split=False)
    assert len(p) == 120
    hidden = metrics.accuracy(p.probs[~labelled], y[~labelled])  # type: ignore[attr-defined]
    assert hidden > 0.8


def test_what_cannot_be_passed_whole_is_refused() -> None:
    whole, y = graph()
    with pytest.raises(ValueError, match="accumulate is 2"):
        tb.fit(Convolutions(), (whole, y), split=False, accumulate=2)
    with pytest.raises(ValueError, match="split=False needs inputs and targets in memory"):
        tb.fit(Convolutions(), [(whole, y)], split=False)


# -- Segmentation -------------------------------------------------------------------------------------


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Blobs of two classes on a background; the border is not labelled."""
    centre = torch.rand(count, 2, 1, 1, generator=seeded(seed)) * 6 + 1
    grid = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"))
    inside = (grid - centre).square().sum(1) < 5
    kind = torch.randint(1, 3, (count, 1, 1), generator=seeded(seed + 1))
    labels = torch.where(inside, kind, 0)
    x = labels[:, None].float() + 0.7 * torch.randn(count, 1, 8, 8, generator=seeded(seed + 2))
    labels[:, 0] = 255
    return x, labels


@pytest.mark.parametrize("method", ["vogn", "ivon"])
def test_maps_of_classes_from_training_to_corrections(method: str) -> None:
    """Once: "label 255 is out of range", and no score or correction took a map."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    options = {"lr": 0.01} if method == "ivon" else {}
    data, held_out, test = pictures(200, 0), pictures(200, 10), pictures(200, 20)
    run = train(
        net, data, method, likelihood=tb.Categorical(ignore_index=255), epochs=15, **options
    )
    p, fresh = run.predict(held_out[0]), run.predict(test[0])
    assert isinstance(p, tb.ClassPredictive)
    assert isinstance(fresh, tb.ClassPredictive)
    rows = metrics.rows(fresh.probs, test[1], ignore_index=255)
    scores = metrics.classification_scores(*rows)
    assert scores["accuracy"] > 0.8
    assert metrics.mean_iou(*rows) > 0.5
    sets = tb.posthoc.conformal_sets(p, held_out[1], 0.9, ignore_index=255)(fresh)
    known = test[1] != 255
    covered = sets.gather(1, torch.where(known, test[1], 0)[:, None])[:, 0][known]
    # Coverage varies by about 0.15 from one picture to another.
    error = 0.15 * (2 / 200) ** 0.5
    assert float(covered.double().mean()) == pytest.approx(0.9, abs=3 * error)
    scale = tb.posthoc.temperature_scaling(p, held_out[1], ignore_index=255)
    before, after = (metrics.nll(*metrics.rows(q.probs, held_out[1], 255)) for q in (p, scale(p)))
    assert after <= before
    rule = tb.posthoc.abstain(p, held_out[1], 0.1, ignore_index=255)
    wrong = (fresh.prediction != test[1])[known & rule(fresh)]
    assert float(wrong.double().mean()) < 0.1
