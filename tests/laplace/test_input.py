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
    # Finished: the data are looked at for their shapes only.
    loaded = tb.Laplace(own.net, Stopping(1), folder=tmp_path, **options)
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
