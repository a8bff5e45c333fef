"""Layers' outputs that are drawn in place of weights have the distribution that the weights give them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.predict import local

DRAWS = 4000


RULE = local.saves_work


@pytest.fixture(autouse=True)
def _every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the outputs of all layers that allow it, however little work that saves."""
    monkeypatch.setattr(local, "saves_work", lambda *_, once: True)


def gaussian(model: nn.Module, std: float = 0.3) -> tb.Gaussian:
    mean = tb.snapshot(model)
    return tb.Gaussian(
        mean, {n: torch.rand_like(t) * std for n, t in mean.items() if t.is_floating_point()}
    )


def outputs(model: nn.Module, q: tb.Gaussian, x: Tensor, *, local: bool, seed: int = 0) -> Tensor:
    p = tb.predictive(
        model, q, x, DRAWS, tb.GaussianNoise(), torch.Generator().manual_seed(seed), local=local,
        recalibrate=False,
    )  # fmt: skip
    assert isinstance(p, tb.RegressionPredictive)
    return p.outputs.double()


def apart(found: Tensor, expected: Tensor, std: Tensor) -> float:
    """How many standard errors the means over draws are off at most."""
    return float(((found.mean(0) - expected) * math.sqrt(len(found)) / std).abs().max())


def spread_apart(found: Tensor, std: Tensor) -> float:
    """The same for the variances of normal numbers."""
    return float(((found.var(0) / std.square() - 1) * math.sqrt(len(found) / 2)).abs().max())


def test_a_linear_layer_in_closed_form() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(6, 5)
    q = gaussian(model)
    found = outputs(model, q, x, local=True)
    m, s = q.mean(), q.std()
    mean = (x @ m["weight"].T + m["bias"]).double()
    std = (x.square() @ s["weight"].square().T + s["bias"].square()).double().sqrt()
    assert apart(found, mean, std) < 4.5
    assert spread_apart(found, std) < 4.5
    # Independent, both the outputs of an example and the examples.
    flat = ((found - mean) / std).flatten(1)
    correlation = flat.T @ flat / DRAWS - torch.eye(18)
    assert float(correlation.fill_diagonal_(0).abs().max()) * math.sqrt(DRAWS) < 4.5


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2), F.conv2d),
        (lambda: nn.ConvTranspose1d(4, 2, 3, stride=2), F.conv_transpose1d),
    ],
    ids=["conv2d", "transposed"],
)
def test_every_output_of_a_convolution_in_closed_form(make: object, function: object) -> None:
    torch.manual_seed(0)
    model: nn.Module = make()  # type: ignore[operator]
    x = torch.randn(2, 4, 7, 7) if function is F.conv2d else torch.randn(2, 4, 7)
    q = gaussian(model)
    found = outputs(model, q, x, local=True)
    m, s = q.mean(), {name: std.square() for name, std in q.std().items()}
    settings = {n: getattr(model, n) for n in ("padding", "stride", "groups")}
    mean = function(x, m["weight"], m["bias"], **settings)  # type: ignore[operator]
    variance = function(x.square(), s["weight"], s["bias"], **settings)  # type: ignore[operator]
    std = variance.double().sqrt()
    assert apart(found, mean.double(), std) < 5
    assert spread_apart(found, std) < 5


def test_an_mlp_predicts_what_weight_draws_predict() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    q, x = gaussian(model, 0.8), torch.randn(10, 4)
    a, b = (outputs(model, q, x, local=local, seed=int(local)) for local in (True, False))
    # Probabilities, the outputs and the products of an example's outputs.
    for of in (lambda t: t.softmax(2), lambda t: t, lambda t: t.unsqueeze(3) * t.unsqueeze(2)):
        one, other = of(a), of(b)
        error = ((one.var(0) + other.var(0)) / DRAWS).sqrt()
        assert float(((one.mean(0) - other.mean(0)) / error).abs().max()) < 4.5
    # Weight draws move examples together, local ones do not.
    together = [float(torch.corrcoef(t[:, :, 0].T)[0, 1:].abs().max()) for t in (a, b)]
    assert together[0] < 5 / math.sqrt(DRAWS) < 0.2 < together[1]


def test_layers_for_which_it_is_more_work_have_ordinary_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the predictions are those of weight draws: here the first layer's outputs are drawn."""
    said: dict[int, bool] = {}

    def rule(weight: Tensor, found: Tensor, *, once: bool) -> bool:
        said[weight.shape[1]] = RULE(weight, found, once=once)
        return said[weight.shape[1]]

    monkeypatch.setattr(local, "saves_work", rule)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))
    q, x = gaussian(model, 0.8), torch.randn(20, 64)
    a, b = (outputs(model, q, x, local=local, seed=int(local)) for local in (True, False))
    assert said == {64: True, 8: False, 4: False}
    for of in (lambda t: t.softmax(2), lambda t: t, lambda t: t.unsqueeze(3) * t.unsqueeze(2)):
        one, other = of(a), of(b)
        error = ((one.var(0) + other.var(0)) / DRAWS).sqrt()
        assert float(((one.mean(0) - other.mean(0)) / error).abs().max()) < 4.5
    # Now examples move together, because they share the draws of later layers.
    assert float(torch.corrcoef(a[:, :, 0].T)[0, 1:].abs().max()) > 0.2


class Odd(nn.Module):
    """One layer used twice, a tied weight, and a weight that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.tied = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        both = self.twice(x) + self.twice(x)
        return torch.cat([both, self.tied(x) + x @ self.tied.weight.T, x * self.scale], dim=1)


def test_other_uses_of_a_weight_get_an_ordinary_draw() -> None:
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(4, 3)
    q = gaussian(model)
    found = outputs(model, q, x, local=True)
    s = {name: std.square() for name, std in q.std().items()}
    # Twice the same weights: four times the variance, and not two.
    parts = [4 * x.square() @ s["twice.weight"].T, 4 * x.square() @ s["tied.weight"].T]
    std = torch.cat([*parts, x.square() * s["scale"]], dim=1).double().sqrt()
    assert spread_apart(found, std) < 4.5


@pytest.mark.parametrize("loader", [False, True])
def test_it_repeats_itself_and_leaves_the_network_alone(loader: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 2))
    q, x = gaussian(model), torch.randn(8, 1, 8, 8)
    before = tb.snapshot(model)
    one, other = (
        tb.predictive(
            model, q, [x[:5], x[5:]] if loader else x, 7, generator=torch.Generator().manual_seed(3),
            local=True, recalibrate=False,
        )
        for _ in range(2)
    )  # fmt: skip
    assert isinstance(one, tb.ClassPredictive)
    assert isinstance(other, tb.ClassPredictive)
    assert torch.equal(one.probs, other.probs)
    assert one.probs.shape == (8, 2)
    assert one.draws == 7
    after = tb.snapshot(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_is_refused() -> None:
    model, x = nn.Linear(2, 2), torch.randn(3, 2)
    with pytest.raises(ValueError, match=r"local=True was given with a Samples"):
        tb.predictive(model, tb.Samples.of([model]), x, local=True)
    with pytest.raises(ValueError, match="batch-norm statistics"):
        tb.predictive(model, gaussian(model), x, local=True, recalibrate=[x])
    counted = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    with pytest.warns(UserWarning, match=r"norm '1'.*leave out local=True and pass recalibrate="):
        tb.predictive(counted, gaussian(counted), x, 2, local=True)


def test_draws_that_do_not_differ_before_a_batch_norm_are_not_mentioned() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).eval()
    mean = tb.snapshot(model)
    std = {"0.weight": torch.zeros(2, 2), "2.weight": torch.ones(2, 2)}
    tb.predictive(model, tb.Gaussian(mean, std), torch.randn(3, 2), 2, local=True)  # no warning


class SharedBias(nn.Module):
    """Two layers with one bias, and one whose bias is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.b.bias = self.a.bias
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), F.linear(x, self.c.weight, 2 * self.shift)], 1)


def test_a_bias_that_is_not_the_layer_s_own_is_drawn_every_time() -> None:
    torch.manual_seed(0)
    model, x = SharedBias(), torch.randn(4, 2)
    std = {f"{n}.weight": torch.zeros(2, 2) for n in "abc"}
    std |= {"a.bias": torch.ones(2), "shift": torch.ones(2)}
    found = outputs(model, tb.Gaussian(tb.snapshot(model), std), x, local=True)
    assert spread_apart(found, torch.tensor([1.0, 1, 1, 1, 2, 2]).double().expand(4, 6)) < 4.5
    assert torch.allclose(found[:, :, 0].std(1), (x @ model.a.weight[0]).std().double())  # one bias


@pytest.mark.parametrize(("size", "std"), [(1.0, 1e-5), (1000.0, 0.01), (1e-5, 300.0)])
@pytest.mark.parametrize("first", [True, False])
def test_half_precision_neither_underflows_nor_overflows(
    size: float, std: float, first: bool
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), size * (1 + torch.rand(5, 4))
    layer.weight.data.zero_()
    layer.bias.data.zero_()
    model = (layer if first else nn.Sequential(nn.Hardtanh(-1e4, 1e4), layer)).half()
    prefix = "" if first else "1."
    stds = {f"{prefix}weight": torch.full((3, 4), std), f"{prefix}bias": torch.zeros(3)}
    q = tb.Gaussian(tb.snapshot(model), {name: t.half() for name, t in stds.items()})
    p = tb.predictive(
        model, q, x.half(), DRAWS, tb.GaussianNoise(), torch.Generator().manual_seed(0), local=True
    )
    assert isinstance(p, tb.RegressionPredictive)
    assert p.outputs.dtype is torch.float16
    wanted = (x.half().double().square().sum(1, keepdim=True)).sqrt() * torch.tensor(std).half()
    ratio = p.outputs.double().std(0) / wanted
    assert float((ratio - 1).abs().max()) < 4.5 / math.sqrt(2 * DRAWS) + 0.02  # numbers of few bits


def test_autocast_does_not_square_in_half_precision() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), 1000 * torch.rand(5, 4)
    q = tb.Gaussian(tb.snapshot(model), {"weight": torch.full((3, 4), 0.01)})
    with torch.autocast("cpu", torch.float16):
        found = outputs(model, q, x, local=True)
    std = 0.01 * x.double().square().sum(1, keepdim=True).sqrt().expand(5, 3)
    assert float((found.std(0) / std - 1).abs().max()) < 4.5 / math.sqrt(2 * DRAWS) + 0.02


class Cell(nn.Module):
    """A cell that runs once for each step of its inputs, as long as `goes_on` says."""

    def __init__(self, goes_on: bool = False) -> None:
        super().__init__()
        self.cell, self.goes_on = nn.Linear(2, 2), goes_on

    def forward(self, x: Tensor) -> Tensor:
        total = sum((self.cell(step) for step in x.unbind(1)), torch.zeros(len(x), 2))
        if self.goes_on and bool((total > 0).all()):
            total = total + self.cell(x[:, 0])
        return total


@pytest.mark.parametrize("steps", [(1, 3), (3, 1)])
def test_a_cell_that_runs_more_often_for_later_inputs(steps: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Cell()
    q = gaussian(model)
    batches = [torch.randn(4, count, 2) for count in steps]
    p = tb.predictive(
        model, q, batches, DRAWS, tb.GaussianNoise(), torch.Generator().manual_seed(0), local=True
    )
    assert isinstance(p, tb.RegressionPredictive)
    # The same weights at every step: the sum of the steps, and the bias as often as there are steps.
    s = {name: std.square() for name, std in q.std().items()}
    variance = torch.cat([
        x.sum(1).square() @ s["cell.weight"].T + x.shape[1] ** 2 * s["cell.bias"] for x in batches
    ])  # fmt: skip
    assert spread_apart(p.outputs.double(), variance.double().sqrt()) < 4.5


def test_a_cell_that_runs_more_often_for_some_draws_is_refused() -> None:
    model = Cell(goes_on=True)
    nn.init.zeros_(model.cell.weight)
    nn.init.zeros_(model.cell.bias)
    with pytest.raises(ValueError, match=r"uses its weight 'cell.weight' once with the means"):
        tb.predictive(model, gaussian(model), torch.ones(1, 1, 2), 200, local=True)
