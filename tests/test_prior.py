"""Priors against scipy, quadrature, finite differences and torch.distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.prior import as_prior, resnetpp_prior


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_weights() -> tb.Weights:
    generator = seeded()
    return {
        "conv": torch.randn(4, 2, 3, 3, generator=generator, dtype=torch.float64),
        "linear": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "bias": torch.randn(3, generator=generator, dtype=torch.float64),
        "scalar": torch.randn((), generator=generator, dtype=torch.float64),
    }


def numpy(weights: tb.Weights) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in weights.items()}


# -- Densities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "precision"), [(0.0, 1.0), (0.3, 25.0), (-2.0, 1e-4)])
def test_gaussian_density_is_scipys(mean: float, precision: float) -> None:
    weights = some_weights()
    truth = sum(stats.norm(mean, precision**-0.5).logpdf(w).sum() for w in numpy(weights).values())
    ours = tb.GaussianPrior(mean=mean, precision=precision).log_prob(weights)
    assert ours.shape == ()
    assert float(ours) == pytest.approx(truth, rel=1e-12)


def test_by_fan_in_the_sum_over_a_unit_has_the_same_spread() -> None:
    weights = some_weights()
    prior = tb.GaussianPrior(mean=0.1, precision=4.0, by_fan_in=True)
    fans = {"conv": 2 * 3 * 3, "linear": 4, "bias": 1, "scalar": 1}
    truth = sum(
        stats.norm(0.1, (4.0 * fans[name]) ** -0.5).logpdf(w).sum()
        for name, w in numpy(weights).items()
    )
    assert float(prior.log_prob(weights)) == pytest.approx(truth, rel=1e-12)
    for name, pull in prior.grad(weights).items():
        torch.testing.assert_close(pull, -4.0 * fans[name] * (weights[name] - 0.1))
    assert prior.scalar is None
    assert "by_fan_in=True" in repr(prior)
    assert repr(prior) != repr(tb.GaussianPrior(mean=0.1, precision=4.0))


@pytest.mark.parametrize(
    "method", ["map", "vogn", "ivon", "bbb", "sgld", "atmc", "laplace", "vbll"]
)
def test_by_fan_in_is_a_precision_per_weight_in_every_method(method: str) -> None:
    x = torch.randn(64, 6, generator=seeded())
    y = (x[:, 0] > 0).long()
    results = []
    for prior in (
        tb.GaussianPrior(precision=0.5, by_fan_in=True),
        tb.GaussianPrior(
            precision={
                "0.weight": torch.tensor(3.0), "0.bias": torch.tensor(0.5),
                "2.weight": torch.tensor(4.0), "2.bias": torch.tensor(0.5),
            }
        ),
    ):  # fmt: skip
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        if method == "laplace":  # whose method takes one number
            la = tb.Laplace(net.eval(), (x, y), prior=prior, check=False)
            results.append(la.posterior().std())
            continue
        run = tb.fit(net, (x, y), method, epochs=3, batch_size=16, prior=prior, progress=False)
        results.append(run.posterior.sample(seeded()))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name])


def test_gaussian_density_with_a_mean_and_precision_per_weight() -> None:
    weights = some_weights()
    generator = seeded(1)
    mean = {n: torch.randn(w.shape, generator=generator).double() for n, w in weights.items()}
    precision = {n: torch.rand(w.shape, generator=generator).double() for n, w in weights.items()}
    precision["bias"][1] = 0  # no prior on this one
    truth = 0.0
    for name, w in numpy(weights).items():
        proper = precision[name].numpy() > 0
        scale = precision[name].numpy()[proper] ** -0.5
        truth += stats.norm(mean[name].numpy()[proper], scale).logpdf(w[proper]).sum()
    prior = tb.GaussianPrior(mean=mean, precision=precision)
    assert float(prior.log_prob(weights)) == pytest.approx(truth, rel=1e-12)
    gradient = prior.grad(weights)
    assert gradient["bias"][1] == 0
    mixed = tb.GaussianPrior(mean=mean, precision=4.0).log_prob(weights)
    truth = sum(
        stats.norm(mean[name].numpy(), 0.5).logpdf(w).sum() for name, w in numpy(weights).items()
    )
    assert float(mixed) == pytest.approx(truth, rel=1e-12)


def test_a_precision_of_nought_gives_finite_gradients() -> None:
    weights = {"w": torch.randn(3, requires_grad=True)}
    prior = tb.GaussianPrior(precision={"w": torch.tensor([0.0, 1.0, 0.0])})
    prior.log_prob(weights).backward()
    assert torch.equal(weights["w"].grad, torch.tensor([0, -1, 0]) * weights["w"].detach())  # type: ignore[arg-type]


@pytest.mark.parametrize(("pi", "std1", "std2"), [(0.25, 1.0, 0.1), (0.5, 0.3, 0.01)])
def test_scale_mixture_density_is_scipys(pi: float, std1: float, std2: float) -> None:
    weights = some_weights()
    truth = sum(
        np.logaddexp(
            np.log(pi) + stats.norm(0, std1).logpdf(w),
            np.log1p(-pi) + stats.norm(0, std2).logpdf(w),
        ).sum()
        for w in numpy(weights).values()
    )
    assert float(tb.ScaleMixturePrior(pi, std1, std2).log_prob(weights)) == pytest.approx(truth)


def test_scale_mixture_integrates_to_one() -> None:
    prior = tb.ScaleMixturePrior(0.25, 1.0, math.exp(-3))

    def density(w: float) -> float:
        return math.exp(prior.log_prob({"w": torch.tensor([w], dtype=torch.float64)}))

    total, _ = integrate.quad(density, -12, 12, points=[-0.2, 0, 0.2], limit=200)
    assert total == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std2", [math.exp(-6), math.exp(-8)])
def test_scale_mixture_far_out_and_at_nought_is_finite(dtype: torch.dtype, std2: float) -> None:
    """The narrow component's density underflows at 50, and 1/std2² overflows half precision."""
    values = np.array([50.0, -50.0, 1.0, 0.0, 1e-4])
    weight = torch.tensor(values, dtype=dtype, requires_grad=True)
    prior = tb.ScaleMixturePrior(0.25, 1.0, std2)
    value = prior.log_prob({"w": weight})
    value.backward()
    wide = np.log(0.25) + stats.norm(0, 1).logpdf(values)
    narrow = np.log(0.75) + stats.norm(0, std2).logpdf(values)
    rounding = max(float(torch.finfo(dtype).eps), 1e-6)
    assert value.item() == pytest.approx(np.logaddexp(wide, narrow).sum(), rel=rounding)
    share = 1 / (1 + np.exp(np.minimum(narrow - wide, 700)))
    truth = -values * (share + (1 - share) / std2**2)
    assert weight.grad is not None
    np.testing.assert_allclose(weight.grad.double(), truth, rtol=20 * rounding)
    assert torch.equal(prior.grad({"w": weight})["w"], weight.grad)


@pytest.mark.parametrize("scale", [0.5, 5.0])
def test_group_laplace_integrates_to_one(scale: float) -> None:
    prior = tb.prior.GroupLaplacePrior(scale)

    def density(*w: float) -> float:
        return math.exp(prior.log_prob({"w": torch.tensor([w], dtype=torch.float64)}))

    line, _ = integrate.quad(density, -40 * scale, 40 * scale, points=[0])
    assert line == pytest.approx(1, abs=1e-6)
    # By symmetry in polar and spherical coordinates, the density being taken off the axes.
    edge = 60 * scale
    plane, _ = integrate.quad(lambda r: 2 * np.pi * r * density(0.6 * r, -0.8 * r), 0, edge)
    assert plane == pytest.approx(1, abs=1e-6)
    space, _ = integrate.quad(
        lambda r: 4 * np.pi * r**2 * density(r / 3, -2 * r / 3, 2 * r / 3), 0, edge
    )
    assert space == pytest.approx(1, abs=1e-6)


def test_group_laplace_groups_are_output_features() -> None:
    weights = some_weights()
    prior = tb.prior.GroupLaplacePrior(2.0)
    total = sum(float(prior.log_prob({"w": row[None]})) for row in weights["conv"])
    assert float(prior.log_prob({"w": weights["conv"]})) == pytest.approx(total)
    # A vector is a Laplace distribution on every entry, also as weight norm's scales (features, 1, …).
    laplace = stats.laplace(0, 2.0).logpdf(weights["bias"].numpy()).sum()
    for shape in ((3,), (3, 1), (3, 1, 1, 1)):
        value = prior.log_prob({"w": weights["bias"].reshape(shape)})
        assert float(value) == pytest.approx(laplace)
    norms = np.linalg.norm(weights["linear"].numpy(), axis=1)
    difference = float(
        prior.log_prob({"w": weights["linear"]}) - prior.log_prob({"w": 0 * weights["linear"]})
    )
    assert difference == pytest.approx(-norms.sum() / 2)


def test_a_group_of_noughts_has_a_gradient_of_nought() -> None:
    weight = torch.zeros(2, 3)
    weight[1] = 1
    gradient = tb.prior.GroupLaplacePrior(1.0).grad({"w": weight})["w"]
    assert torch.equal(gradient[0], torch.zeros(3))
    np.testing.assert_allclose(gradient[1], -np.ones(3) / np.sqrt(3), rtol=1e-6)


def test_unit_direction_is_the_papers_energy() -> None:
    weights = some_weights()
    truth = 0.0
    for w in numpy(weights).values():
        rows = w.reshape(len(w), -1) if w.ndim > 1 else w.reshape(-1, 1)
        truth -= (rows.shape[1] / 2 * ((rows**2).sum(1) - 1) ** 2).sum()
    assert float(tb.prior.UnitDirectionPrior().log_prob(weights)) == pytest.approx(truth)


# -- Gradients ----------------------------------------------------------------------------------------

PRIORS: list[Callable[[], tb.Prior]] = [
    lambda: tb.GaussianPrior(mean=0.3, precision=2.0),
    lambda: tb.GaussianPrior(
        mean={n: torch.ones_like(w) for n, w in some_weights().items()},
        precision={n: w.abs() for n, w in some_weights().items()},
    ),
    lambda: tb.ScaleMixturePrior(0.25, 1.0, 0.5),
    lambda: tb.prior.GroupLaplacePrior(2.0),
    lambda: tb.prior.UnitDirectionPrior(),
]


@pytest.mark.parametrize("make", PRIORS)
def test_gradients_are_finite_differences(make: Callable[[], tb.Prior]) -> None:
    prior, weights = make(), some_weights()
    names = list(weights)

    def value(*tensors: Tensor) -> Tensor:
        return prior.log_prob(dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(value, [weights[n].requires_grad_() for n in names])
    by_autograd = torch.autograd.grad(prior.log_prob(weights), list(weights.values()))
    with torch.no_grad():
        by_grad = prior.grad(weights)
    for name, truth in zip(names, by_autograd, strict=True):
        torch.testing.assert_close(by_grad[name], truth)
        assert not by_grad[name].requires_grad


@pytest.mark.parametrize("make", PRIORS)
def test_no_weights_have_density_one(make: Callable[[], tb.Prior]) -> None:
    assert float(make().log_prob({})) == 0


# -- KL -----------------------------------------------------------------------------------------------


def posterior() -> tb.Gaussian:
    weights = some_weights()
    std = {n: torch.rand(w.shape, generator=seeded(2)).double() + 0.1 for n, w in weights.items()}
    return tb.Gaussian(weights, {n: s for n, s in std.items() if n != "scalar"})


def test_kl_is_the_closed_form_and_leaves_deterministic_weights_out() -> None:
    q = posterior()
    ours = float(tb.GaussianPrior(mean=0.3, precision=4.0).kl(q))
    closed_form = torchs = 0.0
    p = torch.distributions.Normal(torch.tensor(0.3, dtype=torch.float64), 0.5)
    for name, std in q.std().items():
        ratio, shift = std.numpy() / 0.5, (q.mean()[name].numpy() - 0.3) / 0.5
        closed_form += (0.5 * (ratio**2 + shift**2 - 1) - np.log(ratio)).sum()
        normal = torch.distributions.Normal(q.mean()[name], std)
        torchs += float(torch.distributions.kl_divergence(normal, p).sum())
    assert ours == pytest.approx(closed_form, rel=1e-12)
    assert ours == pytest.approx(torchs, rel=1e-12)


def test_kl_is_the_average_of_the_log_ratio() -> None:
    q = posterior()
    generator = seeded(3)
    mean = {n: torch.randn(w.shape, generator=generator).double() for n, w in q.mean().items()}
    precision = {n: torch.rand(w.shape).double() + 0.5 for n, w in q.mean().items()}
    precision["bias"][0] = 0  # improper: left out of both sides
    prior = tb.GaussianPrior(mean=mean, precision=precision)
    proper = {name: precision[name].numpy() > 0 for name in q.std()}
    normals = {
        name: stats.norm(q.mean()[name][precision[name] > 0], std[precision[name] > 0])
        for name, std in q.std().items()
    }
    ratios = []
    for _ in range(500):
        draw = q.sample(generator)
        log_q = sum(
            normal.logpdf(draw[n].numpy()[proper[n]]).sum() for n, normal in normals.items()
        )
        ratios.append(log_q - float(prior.log_prob({name: draw[name] for name in normals})))
    error = np.std(ratios) / len(ratios) ** 0.5
    assert abs(float(prior.kl(q)) - np.mean(ratios)) < 4 * error


def test_kl_at_its_ends() -> None:
    q = tb.Gaussian({"w": torch.zeros(3)}, {"w": torch.ones(3)})
    assert float(tb.GaussianPrior().kl(q)) == 0
    assert float(tb.GaussianPrior(precision={"w": torch.zeros(3)}).kl(q)) == 0
    collapsed = tb.Gaussian({"w": torch.zeros(3)}, {"w": torch.tensor([1.0, 0.0, 1.0])})
    assert float(tb.GaussianPrior().kl(collapsed)) == math.inf


@pytest.mark.parametrize("make", PRIORS[2:])
def test_priors_without_a_closed_form_say_so(make: Callable[[], tb.Prior]) -> None:
    with pytest.raises(TypeError, match="no closed-form KL"):
        make().kl(posterior())


def test_kl_of_what_is_not_a_diagonal_gaussian_is_refused() -> None:
    mean = {"w": torch.zeros(3)}
    low_rank = tb.LowRankGaussian(mean, {"w": torch.ones(3)}, {"w": torch.ones(1, 3)})
    for wrong in (low_rank, tb.Point(mean)):
        with pytest.raises(TypeError, match="not a diagonal Gaussian"):
            tb.GaussianPrior().kl(wrong)  # type: ignore[arg-type]


# -- A posterior as a prior, and wrong arguments ------------------------------------------------------


def test_a_posterior_becomes_a_prior() -> None:
    weights = some_weights() | {"norm.num_batches_tracked": torch.tensor(3)}
    std = {"conv": torch.full((4, 2, 3, 3), 0.1).double(), "bias": torch.full((3,), 2.0).double()}
    q = tb.Gaussian(weights, std)
    prior = tb.GaussianPrior.from_posterior(q)
    assert float(prior.kl(q)) == pytest.approx(0, abs=1e-9)
    at = {name: w + 1 for name, w in some_weights().items()}
    truth = sum(
        stats.norm(weights[name].numpy(), std[name].numpy()).logpdf(at[name].numpy()).sum()
        for name in std
    )
    assert float(prior.log_prob(at)) == pytest.approx(truth)
    assert float(prior.grad(at)["bias"][0]) == pytest.approx(-1 / 4)
    assert torch.equal(prior.grad(at)["linear"], torch.zeros(3, 4, dtype=torch.float64))


def test_correlated_posteriors_give_their_marginals() -> None:
    mean, deviations = {"w": torch.zeros(3)}, torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]])
    low_rank = tb.LowRankGaussian(mean, {"w": torch.ones(3)}, {"w": deviations})
    kronecker = tb.KroneckerGaussian(
        {"w": torch.zeros(2, 2)}, {"w": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}, {"w": torch.eye(2)}
    )
    for q in (low_rank, kronecker):
        draws = torch.stack([d["w"] for d in q.draws(20_000, torch.Generator().manual_seed(0))])
        precision = tb.GaussianPrior.from_posterior(q).precision["w"]
        # A variance from n draws has a relative standard error of √(2/n) = 1 %.
        torch.testing.assert_close(precision, 1 / draws.var(0), rtol=0.05, atol=0)
    with pytest.raises(TypeError, match="a Point has no standard deviations"):
        tb.GaussianPrior.from_posterior(tb.Point(mean))


def test_a_precision_of_zero_is_no_prior() -> None:
    flat, weights = tb.GaussianPrior(precision=0.0), {"w": torch.tensor([3.0, -1.0])}
    assert float(flat.log_prob(weights)) == 0
    assert torch.equal(flat.grad(weights)["w"], torch.zeros(2))


def test_a_number_is_a_precision_and_never_a_mean() -> None:
    assert as_prior(2).precision == 2.0
    assert as_prior(prior := tb.ScaleMixturePrior()) is prior
    with pytest.raises(TypeError):
        tb.GaussianPrior(2.0)
    for wrong in (True, "gaussian", None):
        with pytest.raises(
            TypeError, match=r"expected a prior such as GaussianPrior\(…\), or a number"
        ):
            as_prior(wrong)
    with pytest.raises(ValueError, match="prior is -1: expected a precision"):
        as_prior(-1.0)


def test_a_prior_is_known_by_its_numbers() -> None:
    """Run folders tell by this whether a run is resumed with its own prior."""
    assert repr(tb.GaussianPrior(precision=2.0)) == "GaussianPrior(mean=0, precision=2)"

    def of(value: float) -> str:
        return repr(
            tb.GaussianPrior(
                mean={"w": torch.zeros(2)}, precision={"w": torch.tensor([1.0, value])}
            )
        )

    assert of(2.0) == of(2.0) != of(3.0)
    assert (
        repr(tb.ScaleMixturePrior(0.25, 1.0, 0.5))
        == "ScaleMixturePrior(pi=0.25, std1=1.0, std2=0.5)"
    )
    assert "0x" not in repr(resnetpp_prior())


def test_a_collapsed_posterior_cannot_become_a_prior() -> None:
    q = tb.Gaussian({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 1.0])})
    with pytest.raises(ValueError, match="'w' has a standard deviation of 0"):
        tb.GaussianPrior.from_posterior(q)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tb.GaussianPrior(precision=-1.0), "is -1"),
        (lambda: tb.GaussianPrior(precision=math.nan), "is nan"),
        (lambda: tb.GaussianPrior(precision=math.inf), "is inf"),
        (
            lambda: tb.GaussianPrior(precision={"w": torch.tensor([1.0, -1.0])}),
            "'w' has the entry -1",
        ),
        (
            lambda: tb.GaussianPrior(precision={"w": torch.tensor(math.inf)}),
            "'w' has the entry inf",
        ),
        (lambda: tb.ScaleMixturePrior(pi=0.0), "pi is 0"),
        (lambda: tb.ScaleMixturePrior(pi=1.0), "pi is 1"),
        (lambda: tb.ScaleMixturePrior(std1=0.0), "std1 is 0"),
        (lambda: tb.ScaleMixturePrior(std2=math.inf), "std2 is inf"),
        (lambda: tb.prior.GroupLaplacePrior(scale=-1.0), "scale is -1"),
    ],
)
def test_wrong_settings(make: Callable[[], tb.Prior], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_prior_of_other_weights() -> None:
    weights = {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match="no mean for weight 'w'"):
        tb.GaussianPrior(mean={"v": torch.zeros(3)}).log_prob(weights)
    # (3, 1) against (3,) would broadcast to nine terms.
    for shape in ((3, 1), (2,), (1, 3)):
        wrong = {"w": torch.ones(shape)}
        for prior in (tb.GaussianPrior(mean=wrong), tb.GaussianPrior(precision=wrong)):
            with pytest.raises(ValueError, match=r"but the weight has \(3,\)"):
                prior.log_prob(weights)
            with pytest.raises(ValueError, match=r"but the weight has \(3,\)"):
                prior.grad(weights)
    per_column = tb.GaussianPrior(mean={"w": torch.ones(1, 3)}).log_prob({"w": torch.ones(2, 3)})
    assert float(per_column) == pytest.approx(6 * stats.norm.logpdf(0))


def test_map_with_a_mixture_prior_leaves_norm_layers_without_one() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    prior = tb.ScaleMixturePrior()
    optimizer = tb.MAP(model, lr=1.0, train_size=10, prior=prior, optimizer="sgd", momentum=0.0)
    before = tb.snapshot(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    plain = {name: w for name, w in before.items() if name.startswith("0.")}
    expected = before | {name: plain[name] + g / 10 for name, g in prior.grad(plain).items()}
    for name, value in tb.snapshot(model).items():
        torch.testing.assert_close(value, expected[name])
