"""Bad input is refused or warned of in one sentence; a pass resumes and is shared over processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from tests.laplace.networks import task
from tests.processes import processes
from torchbayes.laplace.outputs import best_constant, factors_of
from torchbayes.models import lenet5, resnet20


def test_dropout_in_training_mode_is_switched_off_with_a_warning() -> None:
    own = task("conv")
    net = nn.Sequential(own.net, nn.Dropout(0.5)).train()
    with pytest.warns(
        UserWarning, match=r"training mode, in which '1' \(Dropout\).*model.eval\(\)"
    ):
        first = tb.Laplace(net, (own.x, own.y), structure="diagonal")
    assert net.training
    net.eval()
    second = tb.Laplace(net, (own.x, own.y), structure="diagonal")
    probs = [la.predictive(own.x, "probit").prediction for la in (first, second)]
    assert torch.equal(*probs)
    assert float(first.log_marginal_likelihood()) == float(second.log_marginal_likelihood())


class Sequence(nn.Module):
    """A network around a layer that takes and gives sequences."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        given = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.out(self.layer(*given)[0][:, -1])


@pytest.mark.filterwarnings("ignore:the network is not at a maximum")
@pytest.mark.parametrize("kind", ["LSTM", "MultiheadAttention"])
def test_dropout_inside_a_layer_in_training_mode(kind: str) -> None:
    lstm = nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True)
    attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
    net = Sequence(lstm if kind == "LSTM" else attention).train()
    data = torch.randn(20, 3, 4), torch.arange(20) % 2
    with pytest.warns(UserWarning, match=rf"training mode, in which 'layer' \({kind}\)"):
        tb.Laplace(net, data, structure="diagonal", check=True)


def _images(name: str, size: int, count: int = 500) -> tuple[Tensor, Tensor]:
    """Return images of a data set if it is there, and otherwise random ones with something in common."""
    try:
        data = tb.load_data(name).train
    except Exception:
        y = torch.arange(count) % 10
        return torch.rand(count, size, 28, 28) + 0.1 * y.view(-1, 1, 1, 1), y
    return data.inputs[:count].float() / 255, data.targets[:count]


@pytest.mark.parametrize("kind", ["lenet5", "resnet20", "classes"])
def test_a_network_that_is_as_good_as_a_constant(kind: str) -> None:
    """Random layers with small outputs, whose loss hardly depends on the inputs."""
    torch.manual_seed(0)
    net: nn.Module
    if kind == "classes":
        x, y = torch.randn(1000, 16), torch.randint(1000, (1000,))
        net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1000))
    else:
        x, y = _images("fashion-mnist", 1)
        net = lenet5(in_channels=1, image_size=28)
    if kind == "resnet20":
        x, y = F.pad(x.repeat(1, 3, 1, 1), (2, 2, 2, 2))[:64], y[:64]
        net = resnet20(batch_norm=False)
    with pytest.warns(UserWarning, match=r"gradient step|no lower than the .* \(norm of the grad"):
        tb.Laplace(net.eval(), (x, y), subset="last_layer", curvature="empirical")
    if kind == "resnet20":
        return
    fitted = tb.fit(net, (x, y), epochs=10 if kind == "lenet5" else 40, lr=3e-3, progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tb.Laplace(fitted.model.eval(), (x, y), subset="last_layer", curvature="empirical")
    assert not any("best constant" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("likelihood", "y", "weights"),
    [
        (tb.Categorical(class_weight=torch.tensor([1.0, 3.0, 0.5])), "labels", None),
        (tb.Categorical(ignore_index=2), "labels", None),
        (tb.Categorical(), "labels", "weights"),
        (tb.Bernoulli(positive_weight=3.0), "bits", "weights"),
        (tb.Poisson(), "counts", "weights"),
        (tb.GaussianNoise(0.3), "reals", "weights"),
        (tb.GaussianNoise(predicted=True), "pairs", "weights"),
    ],
)
def test_the_best_constant_has_the_lowest_loss(
    likelihood: tb.Likelihood, y: str, weights: str | None
) -> None:
    """The minimum over all constants, by autograd and L-BFGS."""
    torch.manual_seed(0)
    count = 4000
    targets = {
        "labels": torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), count, True),
        "bits": torch.bernoulli(torch.full((count, 3), 0.2)),
        "counts": torch.poisson(torch.full((count, 3), 2.0)),
        "reals": 3 + 2 * torch.randn(count, 3),
        "pairs": 3 + 2 * torch.randn(count, 2),
    }[y]
    own = torch.rand(count) if weights else None
    outputs = torch.randn(count, 4 if y == "pairs" else 3)
    given = () if own is None else (own,)
    factors = factors_of(likelihood, outputs, targets, own)
    found = best_constant(likelihood, outputs, targets, factors)
    assert found is not None
    free = torch.zeros(outputs.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = likelihood.loss(free.expand_as(outputs), targets, *given)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert likelihood.loss(found, targets, *given).item() == pytest.approx(
        closure().item(), rel=1e-3
    )


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_an_untrained_network_is_told_by_its_gradient(name: str) -> None:
    own = task(name)
    net = copy.deepcopy(own.net)
    torch.manual_seed(1)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with pytest.warns(UserWarning, match=r"gradient step \(norm .*\) lowers its loss from .* to"):
        tb.Laplace(net, (own.x, own.y), own.likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.Laplace(own.net, (own.x, own.y), own.likelihood)
        # Nor if it was trained with another, weaker prior than is given here.
        tb.Laplace(own.net, (own.x, own.y), own.likelihood, prior=50.0)


@pytest.mark.parametrize(
    ("likelihood", "match"),
    [
        (nn.MSELoss(), "MSELoss is not a likelihood because"),
        (F.cross_entropy, "a loss is no likelihood"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "is not a likelihood of the data"),
        (nn.L1Loss(), "cannot use L1Loss as a likelihood"),
    ],
)
def test_a_loss_that_is_no_likelihood(likelihood: Any, match: str) -> None:
    own = task("conv")
    with pytest.raises((TypeError, ValueError), match=match):
        tb.Laplace(own.net, (own.x, own.y), likelihood)


def test_real_targets_are_no_classes_and_have_noise_by_default() -> None:
    own = task("linear")
    with pytest.raises(ValueError, match="not class labels"):
        tb.Laplace(own.net, (own.x, own.y), tb.Categorical())
    la = tb.Laplace(own.net, (own.x, own.y))
    with torch.no_grad():
        errors = (own.net(own.x) - own.y).square().mean().sqrt()
    assert la.noise is not None
    assert float(la.noise) == pytest.approx(float(errors), rel=1e-5)


def test_the_number_of_examples_is_checked() -> None:
    own = task("conv")
    data = TensorDataset(own.x, own.y)
    with pytest.raises(ValueError, match="train_size is 50 but the data have 48 examples"):
        tb.Laplace(own.net, DataLoader(data, 16), train_size=50)
    with pytest.raises(ValueError, match="the loader gave 40 of its 48 examples"):
        tb.Laplace(own.net, DataLoader(data, 20, drop_last=True))
    with pytest.raises(ValueError, match="48 inputs but 47 targets"):
        tb.Laplace(own.net, (own.x, own.y[1:]))
    with pytest.raises(ValueError, match="no batches"):
        tb.Laplace(own.net, [])
    with pytest.raises(ValueError, match="no targets"):
        tb.Laplace(own.net, [own.x])
    with pytest.raises(TypeError, match="cannot take a Tensor as training data"):
        tb.Laplace(own.net, own.x)
    assert tb.Laplace(own.net, data, train_size=48).train_size == 48


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"structure": "kroneker"}, "structure is 'kroneker'.*did you mean 'kronecker'"),
        ({"curvature": "hessian"}, "curvature is 'hessian': expected ggn, sampled, empirical"),
        ({"subset": "lastlayer"}, "subset has 'lastlayer', but no weight"),
        ({"subset": "8.wieght"}, "did you mean '8.weight'"),
        ({"subset": "1"}, "no weight or module of Sequential is called so"),
        ({"subset": []}, "subset is empty"),
        ({"subset": nn.Linear(1, 1)}, "none to take"),
        ({"prior": 0.0}, "above 0, because data alone"),
        ({"prior": -1.0}, "expected a precision"),
        ({"prior": tb.ScaleMixturePrior()}, "takes a Gaussian prior"),
        ({"prior": {"0.weight": 1.0}}, "no precision for weight '0.bias'"),
        ({"prior": torch.ones(3)}, "expected one number, or 8"),
        ({"rank": 0, "structure": "low_rank"}, "rank is 0"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        task("conv").laplace(**options)


@pytest.mark.parametrize(
    ("layer", "side"), [(nn.Linear(3, 30_000), "outputs"), (nn.Linear(30_000, 2), "inputs")]
)
def test_a_layer_that_is_too_large_for_factors(layer: nn.Linear, side: str) -> None:
    data = torch.randn(4, layer.in_features), torch.arange(4) % 2
    with pytest.raises(ValueError, match=rf"30,000 × 30,000 for the {side} of 'weight', 3 GB"):
        tb.Laplace(layer, data, curvature="sampled", check=False)
    assert tb.Laplace(layer, data, curvature="sampled", structure="diagonal", check=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused(dtype: torch.dtype) -> None:
    own = task("conv")
    net = copy.deepcopy(own.net).to(dtype)
    with pytest.raises(ValueError, match=rf"weight '0.weight' is {dtype}.*model.float\(\)"):
        tb.Laplace(net, (own.x.to(dtype), own.y))


def test_kronecker_takes_one_precision_per_tensor() -> None:
    own = task("logistic")
    each = {name: torch.rand_like(p) + 1 for name, p in own.net.named_parameters()}
    prior = tb.GaussianPrior(precision=each)
    with pytest.raises(ValueError, match="takes one for a weight tensor"):
        own.laplace(prior=prior).posterior()
    q = own.laplace(prior=prior, structure="diagonal").posterior()
    h = own.laplace(structure="diagonal")._structure.sums
    for name, std in q.std().items():  # type: ignore[attr-defined]
        torch.testing.assert_close(std**-2, h[f"squares/{name}"] + each[name], rtol=1e-4, atol=0.0)


def test_outputs_that_no_uncertain_weight_reaches() -> None:
    torch.manual_seed(0)
    la = tb.Laplace(
        nn.Linear(3, 2, bias=False), (torch.randn(60, 3), torch.arange(60) % 2), check=False
    )
    p = la.predictive(torch.zeros(2, 3), "mc")
    assert isinstance(p, tb.ClassPredictive)
    torch.testing.assert_close(p.probs, torch.full((2, 2), 0.5))


def test_bad_questions() -> None:
    la, regression = task("conv").laplace(), task("linear").laplace()
    with pytest.raises(ValueError, match=r"link is 'probits'.*did you mean 'probit'"):
        la.predictive(task("conv").x, "probits")
    with pytest.raises(ValueError, match="is for classes"):
        regression.predictive(task("linear").x, "probit")
    with pytest.raises(ValueError, match="nothing to predict"):
        la.predictive(task("conv").x[:0])
    with pytest.raises(ValueError, match="a Categorical likelihood has none"):
        la.log_marginal_likelihood(1.0, 0.1)
    for noise in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"noise is {noise:g}: expected a standard deviation"):
            regression.log_marginal_likelihood(1.0, noise)
    with pytest.raises(ValueError, match="needs held-out data"):
        la.optimize_prior("validation")
    with pytest.raises(ValueError, match="leave validation out"):
        la.optimize_prior(validation=(task("conv").x, task("conv").y))


# Streams.


def test_every_kind_of_data_gives_the_same() -> None:
    own = task("conv")
    data = TensorDataset(own.x, own.y)
    batches = [(own.x[i : i + 20], own.y[i : i + 20]) for i in (0, 20, 40)]
    evidence = [
        float(tb.Laplace(own.net, each, batch_size=20).log_marginal_likelihood())
        for each in ((own.x, own.y), data, DataLoader(data, 48, shuffle=True), batches)
    ]
    assert evidence == pytest.approx([evidence[0]] * 4, rel=1e-5)


class Stopping:
    """Batches of a task that end with an exception."""

    def __init__(self, stop: int) -> None:
        self.stop, self.given = stop, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        own = task("norm")
        for index, start in enumerate(range(0, 48, 8)):
            if index == self.stop:
                raise KeyboardInterrupt
            self.given += 1
            yield own.x[start : start + 8], own.y[start : start + 8]


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full", "low_rank"])
def test_a_stopped_pass_resumes_bit_equal(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = task("norm")
    options: dict[str, Any] = {"structure": structure, "curvature": "sampled", "samples": 3}
    whole = tb.Laplace(own.net, Stopping(99), **options)
    monkeypatch.setattr("torchbayes.laplace.gather.CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        tb.Laplace(own.net, Stopping(4), folder=tmp_path, **options)
    resumed = tb.Laplace(own.net, Stopping(99), folder=tmp_path, **options)
    assert resumed.train_size == 48
    for group, tensors in whole.posterior()._file_tensors().items():
        again = resumed.posterior()._file_tensors()[group]
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    # Finished: of the data some are read, for checks and `narrow`, and none is computed with.
    loaded = tb.Laplace(own.net, Stopping(99), folder=tmp_path, **options)
    for now, then in zip(loaded._some.joined() or (), whole._some.joined() or (), strict=True):
        assert now is then is None or torch.equal(now, then)
    assert resumed._some.joined() is not None
    assert float(loaded.log_marginal_likelihood()) == float(whole.log_marginal_likelihood())
    with pytest.raises(ValueError, match="statistics of another Laplace posterior"):
        tb.Laplace(own.net, Stopping(99), folder=tmp_path, structure=structure, subset="last_layer")


def test_a_shuffled_loader_cannot_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = task("norm")
    monkeypatch.setattr("torchbayes.laplace.gather.CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        tb.Laplace(own.net, Stopping(4), folder=tmp_path)
    loader = DataLoader(TensorDataset(own.x, own.y), 8, shuffle=True)
    with pytest.raises(ValueError, match="another order at every pass"):
        tb.Laplace(own.net, loader, folder=tmp_path)
    # A finished pass needs no order.
    first, second = (tb.Laplace(own.net, loader, folder=tmp_path / "new") for _ in range(2))
    assert float(first.log_marginal_likelihood()) == float(second.log_marginal_likelihood())


def test_a_finished_pass_is_checked_and_narrowed_too(tmp_path: Path) -> None:
    y = torch.arange(60) % 2
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) + 10 * y.unsqueeze(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(2, 2)
    for _ in range(2):
        with pytest.warns(UserWarning, match="the network is not at a maximum"):
            tb.Laplace(net, (x, y), folder=tmp_path / "fresh")
    net = tb.fit(net, (x, y), epochs=200, lr=0.1, prior=1e-3, progress=False).model.eval()
    for _ in range(2):
        assert tb.Laplace(net, (x, y), prior=1e-3, folder=tmp_path / "fitted").narrow()


# Processes.


def _shared(folder: str) -> None:
    """One process of a group: fit and, in the first, write the evidence of every structure."""
    from torchbayes.core import distributed

    net, x, y = torch.load(Path(folder) / "task.pt", weights_only=False)
    with distributed.process_group():
        loader = DataLoader(TensorDataset(x, y), 8)
        found = [
            tb.Laplace(net, each, structure=structure, batch_size=8).log_marginal_likelihood()
            for structure in ("diagonal", "kronecker", "full", "low_rank")
            for each in ((x, y), loader)
        ]
        if distributed.rank() == 0:
            torch.save(torch.stack(found), Path(folder) / "evidence.pt")


def test_two_processes_share_the_data(tmp_path: Path) -> None:
    own = task("norm")
    torch.save((own.net, own.x, own.y), tmp_path / "task.pt")
    ended = processes(2, _shared, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = torch.load(tmp_path / "evidence.pt")
    expected = [
        own.laplace(structure=structure, batch_size=8).log_marginal_likelihood()
        for structure in ("diagonal", "kronecker", "full", "low_rank")
        for _ in range(2)
    ]
    # The low-rank directions are found in another order.
    torch.testing.assert_close(found[:6], torch.stack(expected)[:6], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[6:], torch.stack(expected)[6:], rtol=2e-2, atol=0.0)
