"""Laplace posteriors against closed forms and brute force."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from tests.laplace.networks import Task, task
from torchbayes.experiments.cost import peak_memory
from torchbayes.posterior.full import flattened
from torchbayes.predict.closed_form import GaussianPredictive

STRUCTURES = ("diagonal", "kronecker", "full", "low_rank")


def jacobian(net: nn.Module, x: Tensor, names: list[str]) -> Tensor:
    """The outputs' derivatives, (examples, outputs, weights), by torch.func."""
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def outputs(some: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(net, weights | some, (one.unsqueeze(0),))[0]

    some = {name: weights[name] for name in names}
    each = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(some, x)
    return torch.cat([each[name].flatten(2) for name in names], 2).double()


def class_hessians(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        p = net(x).double().softmax(1)
    return torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)


def covariance(la: tb.Laplace) -> Tensor:
    """The covariance of a posterior's weights, in the order of `la.names`, from what it saves."""
    q = la.posterior()
    groups = {k: {n: t.double() for n, t in g.items()} for k, g in q._file_tensors().items()}
    if isinstance(q, tb.Gaussian):
        return torch.diag(flattened(groups["std"], la.names).square())
    if isinstance(q, tb.posterior.FullGaussian):
        return groups["root"]["root"] @ groups["root"]["root"].t()
    if isinstance(q, tb.posterior.ShrunkGaussian):
        std = torch.diag(flattened(groups["std"], la.names))
        v = torch.cat([groups["directions"][n].flatten(1) for n in la.names], 1)
        root = std @ (
            torch.eye(len(std)) - v.t() @ torch.diag(groups["shrinkage"]["shrinkage"]) @ v
        )
        return root @ root.t()
    blocks = []
    for name in la.names:
        if name in groups["std"]:
            blocks.append(torch.diag(groups["std"][name].flatten().square()))
            continue
        basis = torch.kron(
            groups["outputs"][name].contiguous(), groups["inputs"][name].contiguous()
        )
        blocks.append(basis @ torch.diag(groups["scales"][name].flatten().square()) @ basis.t())
    return torch.block_diag(*blocks)


# Closed forms.


def bayesian_regression(
    x: Tensor, y: Tensor, delta: float, noise: float
) -> tuple[Tensor, Tensor, float]:
    """Posterior mean and covariance of (weights, bias), and the log evidence, of y ~ N(Xw + b, σ²)."""
    phi = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    precision = phi.t() @ phi / noise**2 + delta * torch.eye(phi.shape[1])
    cov = torch.linalg.inv(precision)
    mean = cov @ phi.t() @ y.double() / noise**2
    marginal = phi @ phi.t() / delta + noise**2 * torch.eye(len(x))
    gaussian = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), marginal)
    return mean, cov, float(gaussian.log_prob(y[:, 0].double()))


def fitted_regression(delta: float = 3.0, noise: float = 0.4) -> tuple[nn.Linear, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(30, 2, generator=g)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5 + noise * torch.randn(30, 1, generator=g)
    mean, _, _ = bayesian_regression(x, y, delta, noise)
    net = nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.copy_(mean[:2].t())
        net.bias.copy_(mean[2])
    return net, x, y


def test_linear_regression_is_exact() -> None:
    net, x, y = fitted_regression()
    la = tb.Laplace(net, (x, y), tb.GaussianNoise(0.4), structure="full", prior=3.0, batch_size=7)
    _, cov, evidence = bayesian_regression(x, y, 3.0, 0.4)
    torch.testing.assert_close(covariance(la), cov, rtol=1e-4, atol=1e-7)
    assert float(la.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-6)
    new = torch.randn(5, 2)
    phi = torch.cat([new, torch.ones(5, 1)], 1).double()
    p = la.predictive(new)
    assert isinstance(p, tb.RegressionPredictive)
    variance = (phi @ cov * phi).sum(1, keepdim=True)
    torch.testing.assert_close(p.epistemic.double().square(), variance, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(p.std.double().square(), variance + 0.16, rtol=1e-4, atol=1e-7)
    density = torch.distributions.Normal(p.mean.double(), (variance + 0.16).sqrt()).log_prob(
        torch.ones(5, 1)
    )
    torch.testing.assert_close(
        p.log_prob(torch.ones(5, 1)).double(), density[:, 0], rtol=1e-4, atol=1e-5
    )
    # An interval of the closed form.
    upper = p.mean.double() + 1.6448536 * (variance + 0.16).sqrt()
    torch.testing.assert_close(p.quantile(0.95).double(), upper, rtol=1e-4, atol=1e-4)


def test_draws_and_linearised_prediction_agree_for_a_linear_model() -> None:
    net, x, y = fitted_regression()
    la = tb.Laplace(net, (x, y), tb.GaussianNoise(0.4), structure="full", prior=3.0)
    new, draws = torch.randn(6, 2, generator=torch.Generator().manual_seed(2)), 4000
    drawn = tb.predictive(
        net, la.posterior(), new, draws, likelihood=la.likelihood,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    closed = la.predictive(new)
    assert isinstance(drawn, tb.RegressionPredictive)
    assert isinstance(closed, tb.RegressionPredictive)
    error = closed.epistemic / math.sqrt(draws)
    assert bool(((drawn.mean - closed.mean).abs() < 4 * error).all())
    # The relative error of a standard deviation from n draws is 1/√(2n).
    assert bool(((drawn.epistemic / closed.epistemic - 1).abs() < 4 / math.sqrt(2 * draws)).all())


# Brute force.


@pytest.mark.parametrize("name", ["logistic", "conv", "norm"])
def test_full_and_diagonal_are_the_gauss_newton_matrix(name: str) -> None:
    own = task(name)
    full = own.laplace(structure="full", prior=2.0, batch_size=20)
    j, h = jacobian(own.net, own.x, full.names), class_hessians(own.net, own.x)
    ggn = torch.einsum("ncp,ncd,ndq->pq", j, h, j)
    eye = torch.eye(len(ggn), dtype=torch.float64)
    torch.testing.assert_close(
        torch.linalg.inv(covariance(full)), ggn + 2 * eye, rtol=1e-3, atol=1e-2
    )
    diagonal = own.laplace(structure="diagonal", prior=2.0, batch_size=20)
    expected = (ggn.diagonal() + 2).reciprocal()
    torch.testing.assert_close(covariance(diagonal).diagonal(), expected, rtol=1e-4, atol=0.0)
    exact = float(torch.linalg.slogdet(ggn + 2 * eye)[1])
    assert float(full._structure.log_det(full._precision, torch.ones(()))) == pytest.approx(
        exact, rel=1e-5
    )


def test_a_full_posterior_has_more_weights_than_data_and_a_weak_prior() -> None:
    own = task("conv")
    la = own.laplace(structure="full", prior=1e-4, check=False)
    assert bool(torch.isfinite(la.predictive(own.x).log_prob(own.y)).all())


def test_low_rank_of_full_rank_is_the_whole_matrix() -> None:
    own = task("logistic")
    whole, low = (
        own.laplace(structure=s, prior=2.0, rank=15, batch_size=20) for s in ("full", "low_rank")
    )
    torch.testing.assert_close(covariance(low), covariance(whole), rtol=1e-3, atol=1e-5)
    evidence = float(whole.log_marginal_likelihood())
    assert float(low.log_marginal_likelihood()) == pytest.approx(evidence, rel=1e-5)
    per_tensor = torch.tensor([0.5, 4.0])
    evidence = float(whole.log_marginal_likelihood(per_tensor))
    assert float(low.log_marginal_likelihood(per_tensor)) == pytest.approx(evidence, rel=1e-5)


def test_low_rank_keeps_the_largest_directions() -> None:
    own = task("conv")
    la = own.laplace(structure="low_rank", rank=6, prior=2.0, batch_size=16)
    j, h = jacobian(own.net, own.x, la.names), class_hessians(own.net, own.x)
    largest = torch.linalg.eigvalsh(torch.einsum("ncp,ncd,ndq->pq", j, h, j))[-3:]
    precisions = torch.linalg.eigvalsh(torch.linalg.inv(covariance(la)))[-3:]
    torch.testing.assert_close(precisions - 2, largest, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["conv", "norm"])
def test_linearised_moments_against_a_brute_force_jacobian(name: str, structure: str) -> None:
    own = task(name)
    la = own.laplace(structure=structure, prior=0.5)
    new = own.x[:5] * 1.3
    j = jacobian(own.net, new, la.names)
    cov = j @ covariance(la) @ j.transpose(1, 2)
    with torch.no_grad():
        logits = own.net(new).double()
    p = la.predictive(new, "probit")
    assert isinstance(p, tb.ClassPredictive)
    variance = cov.diagonal(dim1=1, dim2=2)
    probs = (logits / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(p.probs.double(), probs, rtol=1e-3, atol=1e-5)
    # The whole covariance, through the one function that needs it, and in pieces of one example.
    from torchbayes.laplace.linearised import moments

    for what in ("covariance", "row_sums"):
        parts = list(moments(la._network, la._structure, la._solved, new, what, 1 << 20))
        if what == "covariance":
            found = torch.cat([part.covariance for part in parts if part.covariance is not None])
            torch.testing.assert_close(found.double(), cov, rtol=2e-3, atol=1e-4)
        else:
            sums = torch.cat([part.row_sums for part in parts if part.row_sums is not None])
            torch.testing.assert_close(sums.double(), cov.sum(2), rtol=2e-3, atol=1e-3)


def test_kronecker_takes_batch_norm_and_groups_by_their_diagonal() -> None:
    own = task("norm")
    la, diagonal = (own.laplace(structure=s, prior=2.0) for s in ("kronecker", "diagonal"))
    q, exact = la.posterior(), diagonal.posterior()
    assert isinstance(q, tb.KroneckerGaussian)
    assert isinstance(exact, tb.Gaussian)
    for name in (
        "1.weight",
        "1.bias",
        "3.weight",
    ):  # batch norm's scale and shift, a grouped convolution
        torch.testing.assert_close(q.std()[name], exact.std()[name], rtol=1e-4, atol=0.0)
    assert set(q._scales) == {"0.weight", "6.weight", "6.bias"}


def test_sampled_fisher_is_the_gauss_newton_matrix_on_average() -> None:
    own = task("logistic")
    exact = own.laplace(structure="diagonal", curvature="ggn")._structure.sums
    draws = 400
    drawn = own.laplace(structure="diagonal", curvature="sampled", samples=draws)._structure.sums
    for name, value in exact.items():
        # Sums of squared gradients over 80 examples and 400 labels: a few per cent.
        torch.testing.assert_close(drawn[name], value, rtol=0.1, atol=0.0)


def test_empirical_fisher_is_the_sum_of_squared_gradients() -> None:
    own = task("conv")
    la = own.laplace(structure="diagonal", curvature="empirical")
    weights = {n: p.detach() for n, p in own.net.named_parameters()}

    def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(own.net, w, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, own.x, own.y)
    for name in la.names:
        squares = la._structure.sums[f"squares/{name}"]
        torch.testing.assert_close(squares, gradients[name].square().sum(0), rtol=1e-3, atol=1e-6)


def test_predicted_noise_has_its_fisher_matrix() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(2, 2), torch.randn(40, 2)
    with torch.no_grad():
        net.weight.mul_(0.3)
    y = torch.randn(40, 1) * 0.9
    noise = tb.GaussianNoise(predicted=True)
    tb.fit(
        net,
        (x, y),
        likelihood=noise,
        epochs=400,
        batch_size=40,
        lr=0.02,
        in_place=True,
        progress=False,
    )
    la = tb.Laplace(net, (x, y), noise, structure="full", prior=1.0)
    with torch.no_grad():
        log_std = net(x)[:, 1].double()
    j = jacobian(net, x, la.names)
    fisher = torch.stack([(-2 * log_std).exp(), torch.full_like(log_std, 2.0)], 1)
    ggn = torch.einsum("ncp,nc,ncq->pq", j, fisher, j)
    torch.testing.assert_close(
        torch.linalg.inv(covariance(la)), ggn + torch.eye(6), rtol=1e-3, atol=1e-2
    )
    p = la.predictive(x)  # by draws: there is no closed form
    assert isinstance(p, tb.RegressionPredictive)
    assert p.draws == 100


# The evidence.


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_is_differentiable(structure: str) -> None:
    own = task("linear")
    la = own.laplace(structure=structure)
    one = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    each = torch.tensor([0.7, 2.0], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(la.log_marginal_likelihood, (one, noise))
    assert torch.autograd.gradcheck(la.log_marginal_likelihood, (each, noise))


def test_optimised_prior_and_noise_are_a_maximum() -> None:
    net, x, y = fitted_regression()
    la = tb.Laplace(net, (x, y), tb.GaussianNoise(1.0, learned=True), structure="full")
    la.optimize_prior()
    best, delta, noise = la.log_marginal_likelihood(), float(la.prior.precision), la.noise  # type: ignore[arg-type]
    assert noise is not None
    for factor in (0.9, 1.1):
        assert la.log_marginal_likelihood(delta * factor) < best
        assert la.log_marginal_likelihood(None, noise * factor) < best
    assert 0.25 < float(noise) < 0.6  # the data's is 0.4


def test_a_precision_per_layer_has_more_evidence() -> None:
    la = task("conv").laplace()
    one = la.optimize_prior()
    assert isinstance(one.precision, float)
    single = float(la.log_marginal_likelihood())
    each = la.optimize_prior(per_layer=True)
    assert isinstance(each.precision, dict)
    assert list(each.precision) == la.names
    assert float(la.log_marginal_likelihood()) > single
    p = la.predictive(task("conv").x[:3])
    assert len(p) == 3


def test_a_prior_by_held_out_data_beats_its_neighbours() -> None:
    own = task("conv")
    held = torch.randn(60, 2, 6, 6, generator=torch.Generator().manual_seed(5))
    labels = (held[:, 0, :3].sum((1, 2)) > 0).long() + (held[:, 1, 3:].sum((1, 2)) > 0).long()
    la = own.laplace()
    best = la.optimize_prior("validation", validation=(held, labels)).precision
    assert isinstance(best, float)

    def nll(delta: float) -> float:
        la.prior = delta  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(0)
        return -float(la.predictive(held, generator=generator).log_prob(labels).mean())

    assert nll(best) <= min(nll(10.0**power) for power in range(-4, 7, 2)) + 1e-6


def test_a_new_prior_needs_no_pass() -> None:
    own = task("conv")
    la = own.laplace(prior=1.0)
    la.prior = 7.0  # type: ignore[assignment]
    again = own.laplace(prior=7.0)
    torch.testing.assert_close(covariance(la), covariance(again))


# Posteriors.


@pytest.mark.parametrize("structure", STRUCTURES)
def test_posteriors_save_load_and_predict(structure: str, tmp_path: Path) -> None:
    own = task("norm")
    q = own.laplace(structure=structure).posterior()
    q.save(tmp_path / "q.safetensors")
    loaded = tb.load(tmp_path / "q.safetensors", own.net)
    first, second = (
        tb.predictive(
            own.net, p, own.x[:4], 5, generator=torch.Generator().manual_seed(0), recalibrate=False
        )
        for p in (q, loaded)
    )
    assert isinstance(first, tb.ClassPredictive)
    assert isinstance(second, tb.ClassPredictive)
    assert torch.equal(first.probs, second.probs)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_covariance(structure: str) -> None:
    own = task("logistic")
    la = own.laplace(structure=structure, prior=2.0)
    q, cov, count = la.posterior(), covariance(la), 5000
    generator = torch.Generator().manual_seed(0)
    centre = flattened(q.mean(), la.names)
    drawn = torch.stack([flattened(q.sample(generator), la.names) - centre for _ in range(count)])
    found = drawn.t().double() @ drawn.double() / count
    scale = cov.diagonal().sqrt()
    # An entry of a covariance from n draws is off by at most √(2/n) of the two deviations.
    assert bool(((found - cov).abs() < 5 * math.sqrt(2 / count) * torch.outer(scale, scale)).all())
    std = flattened(q.std(), la.names).double()  # type: ignore[attr-defined]
    torch.testing.assert_close(std.square(), cov.diagonal(), rtol=1e-3, atol=1e-7)


def test_the_network_is_not_changed() -> None:
    own = task("norm")
    before = copy.deepcopy(own.net.state_dict())
    flags = [p.requires_grad for p in own.net.parameters()]
    la = own.laplace(subset="last_layer")
    la.predictive(own.x[:3])
    la.optimize_prior()
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.values(), own.net.state_dict().values(), strict=True)
    )
    assert [p.requires_grad for p in own.net.parameters()] == flags


# Subsets.


def test_subsets_by_name_pattern_module_and_place() -> None:
    own = task("conv")
    last = ["8.weight", "8.bias"]
    for subset in ("last_layer", "8", "8.*", own.net[8], ["8.weight", own.net[8]]):  # type: ignore[index]
        assert own.laplace(subset=subset).names == last
    q = own.laplace(subset="last_layer").posterior()
    assert list(q.mean()) == last
    assert q.rest
    assert len(tb.predictive(own.net, q, own.x[:3], 4)) == 3


def test_frozen_weights_are_left_out_and_may_be_named() -> None:
    own = task("conv")
    net = copy.deepcopy(own.net)
    net[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    assert "0.weight" not in tb.Laplace(net, (own.x, own.y)).names
    assert tb.Laplace(net, (own.x, own.y), subset="0.weight").names == ["0.weight"]


def test_last_layer_equals_that_part_of_the_gauss_newton_matrix() -> None:
    own = task("conv")
    la = own.laplace(structure="full", subset="last_layer", prior=2.0)
    j, h = jacobian(own.net, own.x, la.names), class_hessians(own.net, own.x)
    ggn = torch.einsum("ncp,ncd,ndq->pq", j, h, j) + 2 * torch.eye(18)
    torch.testing.assert_close(torch.linalg.inv(covariance(la)), ggn, rtol=1e-3, atol=1e-3)


class Odd(nn.Module):
    """An embedding tied to the output, attention, layer norm, a weight-normalised layer and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = self.mix(self.lstm(x)[0].mean(1)).tanh()
        return F.linear(x, self.embed.weight)


@pytest.mark.filterwarnings("ignore:the network is not at a maximum")
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_odd_modules(structure: str) -> None:
    torch.manual_seed(0)
    net, tokens, labels = Odd(), torch.randint(7, (24, 5)), torch.randint(7, (24,))
    la = tb.Laplace(net, (tokens, labels), structure=structure, prior=1.0, batch_size=9)
    p = la.predictive(tokens[:4])
    assert isinstance(p, tb.ClassPredictive)
    torch.testing.assert_close(p.probs.sum(1), torch.ones(4))
    # By a Jacobian through autograd alone.
    outputs = net(tokens)
    expected = {n: torch.zeros_like(w) for n, w in la._structure.weights.items()}
    h = class_hessians(net, tokens)
    values, vectors = torch.linalg.eigh(h)
    named = dict(net.named_parameters())
    if structure == "full":
        sizes = [named[n].numel() for n in la.names]
        ggn = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64)
    for i in range(len(tokens)):
        for c in range(7):
            column = vectors[i, :, c].float() * values[i, c].clamp_min(0).sqrt().float()
            gradients = torch.autograd.grad(
                outputs[i], [named[n] for n in la.names], column, retain_graph=True
            )
            for name, g in zip(la.names, gradients, strict=True):
                expected[name] += g.square()
            if structure == "full":
                row = torch.cat([g.flatten() for g in gradients]).double()
                ggn.addr_(row, row)
    if structure == "full":
        torch.testing.assert_close(la._structure.sums["matrix"], ggn, rtol=1e-3, atol=1e-4)
        return
    if structure == "kronecker":  # what has no factors: here the tied weight, the norm and others
        own = {n for n in la.names if f"squares/{n}" in la._structure.sums}
        assert {"embed.weight", "norm.weight", "norm.bias"} <= own
        assert "attention.in_proj_weight" not in own
        expected = {n: value for n, value in expected.items() if n in own}
        # Attention's inputs are what its factor is of, and are counted once for the three projections.
        factor = la._structure._inputs["attention.in_proj_weight"]  # type: ignore[attr-defined]
        x = net.embed(tokens).detach().flatten(0, 1)
        found = factor.vectors @ torch.diag(factor.values.float()) @ factor.vectors.t()
        torch.testing.assert_close(found, x.t() @ x / len(x), rtol=1e-4, atol=1e-5)
    for name, value in expected.items():
        squares = la._structure.sums[f"squares/{name}"]
        torch.testing.assert_close(squares, value, rtol=1e-3, atol=1e-5)


# Size.


@pytest.mark.filterwarnings("ignore:the network is not at a maximum")
def test_a_thousand_classes_fit_into_little_memory() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1000))
    x, y = torch.randn(40, 5), torch.randint(1000, (40,))
    la = tb.Laplace(net, (x, y))
    assert la.curvature == "sampled"
    p = la.predictive(x[:4], max_memory=2 << 20)
    assert isinstance(p, tb.ClassPredictive)
    assert p.probs.shape == (4, 1000)
    assert len(la.predictive(x[:2], "bridge", max_memory=2 << 20)) == 2
    with pytest.raises(
        ValueError, match=r"covariance of 1,000 outputs takes .* MB .* max_memory is 2 MB"
    ):
        la.predictive(x[:4], "mc", max_memory=2 << 20)
    with pytest.raises(ValueError, match="21,120 × 21,120"):
        tb.Laplace(net, (x, y), structure="full")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is known on Linux only")
@pytest.mark.parametrize("kind", ["draws", "regression", "classes"])
def test_a_prediction_stays_below_max_memory(kind: str) -> None:
    torch.manual_seed(0)
    outputs, count, samples = {
        "draws": (10, 6000, 1000), "regression": (200, 1200, 1), "classes": (1000, 4, 100)
    }[kind]  # fmt: skip
    net, x = nn.Linear(16, outputs), torch.randn(count, 16)
    y = torch.randn(64, outputs) if kind == "regression" else torch.randint(outputs, (64,))
    la = tb.Laplace(net, (x[:64] if count > 64 else torch.randn(64, 16), y), check=False)
    link = None if kind == "regression" else "mc"
    la.predictive(x[:2], link, samples=2)
    with peak_memory() as peak:
        p = la.predictive(x, link, samples=samples, max_memory=64 << 20)
    assert len(p) == count
    if peak.bytes is None:
        pytest.skip("this kernel does not let a process reset its peak")
    assert peak.bytes < 64 << 20
    if isinstance(p, GaussianPredictive):  # variances: 1,200 covariances take 190 MB
        one = la.predictive(x[:2], "mc", samples=4000)
        assert isinstance(one, tb.RegressionPredictive)
        # The relative error of a standard deviation from n draws is 1/√(2n); 400 of them are compared.
        assert bool(((one.epistemic / p.epistemic[:2] - 1).abs() < 5 / math.sqrt(8000)).all())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is known on Linux only")
def test_hessians_of_many_classes_are_made_in_pieces() -> None:
    torch.manual_seed(0)
    data = torch.randn(64, 8), torch.randint(300, (64,))
    with peak_memory() as peak:  # 3 × 64 × 300² double numbers take 132 MB
        tb.Laplace(nn.Linear(8, 300), data, curvature="ggn", structure="diagonal", check=False)
    assert peak.bytes is None or peak.bytes < 64 << 20


def test_tasks_are_trained() -> None:
    own: Task = task("conv")
    with torch.no_grad():
        assert float((own.net(own.x).argmax(1) == own.y).float().mean()) > 0.9
