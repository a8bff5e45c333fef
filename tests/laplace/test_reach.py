"""A posterior that is too wide for its approximation is narrowed, and no other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

import torchbayes as tb
from tests.processes import processes
from torchbayes.core import distributed


def cost(net: nn.Linear, la: tb.Laplace, x: Tensor, y: Tensor, draws: int = 4000) -> float:
    """NLL of the average over draws less that of the network, by hand, in float64 with float32's floor."""
    posterior, generator = la.posterior(), torch.Generator().manual_seed(7)
    drawn = [posterior.sample(generator) for _ in range(draws)]
    weight = torch.stack([w["weight"] for w in drawn]).double()
    bias = torch.stack([w["bias"] for w in drawn]).double()
    logits = torch.einsum("ni,sci->snc", x.double(), weight) + bias.unsqueeze(1)
    averaged = logits.log_softmax(2).logsumexp(0) - math.log(draws)
    alone = net(x).detach().double().log_softmax(1)
    floor = math.log(torch.finfo(torch.float32).tiny)
    both = (each.gather(1, y.unsqueeze(1)).clamp_min(floor).mean() for each in (alone, averaged))
    return float(next(both) - next(both))


@pytest.fixture
def separable() -> tuple[nn.Linear, Tensor, Tensor]:
    """Two classes far apart, and a network that is certain of all of them."""
    torch.manual_seed(0)
    y = torch.arange(200) % 2
    x = torch.randn(200, 2) + 10 * y.unsqueeze(1) - 5
    net = nn.Linear(2, 2)
    net.weight.data = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    net.bias.data.zero_()
    return net.eval(), x, y


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal"])
def test_the_precision_is_the_least_that_is_enough(
    separable: tuple[nn.Linear, Tensor, Tensor], structure: str
) -> None:
    net, x, y = separable
    la = tb.Laplace(net, (x, y), structure=structure, prior=0.01, check=False)
    assert cost(net, la, x, y) > 0.05  # too wide: there is hardly any curvature
    assert la.narrow()
    # What is next to nothing depends on what the network loses: a tenth of it. 32 draws measure the cost: its
    # own error is what the bounds leave room for.
    most = min(0.01, 0.1 * float(cross_entropy(net(x), y).detach()))
    assert most < 0.001  # the network fits the labels perfectly
    assert cost(net, la, x, y) < 1.5 * most
    assert math.log2(la.prior.scalar / 0.01) == pytest.approx(
        round(math.log2(la.prior.scalar / 0.01))
    )
    la.prior = la.prior.scalar / 4
    assert cost(net, la, x, y) > most
    assert not tb.Laplace(net, (x, y), prior=1e4, check=False).narrow()


def test_where_the_approximation_is_exact_nothing_changes() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(200, 1)
    net = nn.Linear(3, 1)
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(200, 1)], 1), y).solution
    net.weight.data, net.bias.data = solution[:3].T.contiguous(), solution[3]
    la = tb.Laplace(net.eval(), (x, y), tb.GaussianNoise(0.3), prior=1e-3)
    assert not la.narrow()
    assert la.prior.scalar == pytest.approx(1e-3)


def test_too_few_examples_and_other_priors_are_left_alone(
    separable: tuple[nn.Linear, Tensor, Tensor],
) -> None:
    net, x, y = separable
    assert not tb.Laplace(net, (x[:8], y[:8]), prior=0.01, check=False).narrow()
    each = {"weight": torch.full((2, 2), 0.01), "bias": torch.full((2,), 0.01)}
    prior = tb.GaussianPrior(precision=each)
    assert not tb.Laplace(net, (x, y), prior=prior, check=False).narrow()


def narrowed(
    net: nn.Module, data: Any, likelihood: tb.Likelihood, structure: str = "full"
) -> float:
    la = tb.Laplace(net, data, likelihood, structure=structure, prior=1e-4, check=False)
    assert la.narrow()
    assert la.prior.scalar is not None
    return la.prior.scalar


def test_examples_count_as_in_the_curvature(separable: tuple[nn.Linear, Tensor, Tensor]) -> None:
    """One of weight 2 as two, one without a label as none: the same posterior and the same draws."""
    net, x, y = separable
    x, y = x[:100].clone(), y[:100]
    x[:60:2] *= 0.1  # some of class 0 are not certain
    plain = tb.Categorical()
    every = narrowed(net, (x, y), plain)
    times = 1 + torch.arange(100) % 2 * 2
    times[:60:2] = 0
    again = torch.repeat_interleave(torch.arange(100), times)
    repeated = narrowed(net, (x[again], y[again]), plain)
    assert narrowed(net, (x, y, times.float()), plain) == repeated
    known = times > 0
    alone = narrowed(net, (x[known], y[known]), plain)
    partly = tb.Categorical(ignore_index=-100)
    assert narrowed(net, (x, y.masked_fill(~known, -100)), partly) == alone
    often = torch.tensor([0, 2])
    again = torch.repeat_interleave(torch.arange(100), often[y])
    of_one = narrowed(net, (x[again], y[again]), plain)
    assert narrowed(net, (x, y), tb.Categorical(class_weight=often)) == of_one
    assert every not in (repeated, alone, of_one)


@pytest.mark.parametrize("targets", ["binary", "maps", "numbers"])
def test_weights_of_other_targets(targets: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 2, 3, 3) if targets == "maps" else torch.randn(60, 2)
    x[:40] *= 0.05
    net: nn.Module
    kind: tb.Likelihood
    if targets == "numbers":
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        kind, y = tb.GaussianNoise(0.05), net(x).detach()
    else:
        net = nn.Conv2d(2, 2, 1) if targets == "maps" else nn.Linear(2, 1)
        net.weight.data.zero_()[-1] = 2.0
        assert net.bias is not None
        net.bias.data.zero_()
        y = (x.sum(1, keepdim=targets == "binary") > 0).long()
        kind = tb.Bernoulli(positive_weight=2.0)
        if targets == "maps":
            kind = tb.Categorical(ignore_index=-100)
            y[:, 0, 0] = -100
    times = torch.full((60,), 2)
    times[:40] = 0
    again = torch.repeat_interleave(torch.arange(60), times)
    found = narrowed(net, (x, y, times.float()), kind, "diagonal")
    assert found == narrowed(net, (x[again], y[again]), kind, "diagonal")
    assert found != narrowed(net, (x, y), kind, "diagonal")
    if targets == "binary":
        again = torch.repeat_interleave(torch.arange(60), 1 + y[:, 0])
        copies = narrowed(net, (x[again], y[again]), tb.Bernoulli(), "diagonal")
        assert narrowed(net, (x, y), kind, "diagonal") == copies


def test_a_run_with_ignored_labels_ends() -> None:
    torch.manual_seed(0)
    y = torch.arange(120) % 2
    x = torch.randn(120, 2) + 6 * y.unsqueeze(1) - 3
    partly = y.clone()
    partly[::4] = -100
    run = tb.fit(
        nn.Linear(2, 2), (x, partly), "laplace", likelihood=tb.Categorical(ignore_index=-100),
        epochs=30, lr=0.1, progress=False,
    )  # fmt: skip
    assert isinstance(run.posterior, tb.KroneckerGaussian)
    assert float((run.predict(x).prediction == y).float().mean()) > 0.98


def test_a_label_of_probability_0_hides_nothing(
    separable: tuple[nn.Linear, Tensor, Tensor],
) -> None:
    net, x, y = separable
    net.weight.data *= 20  # the margin is 400: float32 has no probability for the other class
    y = y.clone()
    y[3] = 1 - y[3]
    assert not bool(net(x[3]).softmax(0)[y[3]])
    assert not tb.Laplace(net, (x, y), structure="full", prior=1e4, check=False).narrow()
    la = tb.Laplace(net, (x, y), structure="full", prior=1e-6, check=False)
    assert cost(net, la, x, y) > 0.01
    assert la.narrow()
    assert cost(net, la, x, y) < 1.5 * 0.01  # a tenth of the network's own loss is more
    la.prior = la.prior.scalar / 4
    assert cost(net, la, x, y) > 0.01


@pytest.mark.parametrize("prior", [1e-24, 1e-90], ids=["too wide", "not a number"])
def test_a_precision_that_never_suffices_is_left_and_said(
    separable: tuple[nn.Linear, Tensor, Tensor], prior: float
) -> None:
    net, x, y = separable
    la = tb.Laplace(net, (x, y), prior=prior, check=False)
    with pytest.warns(UserWarning, match=r"draws cost more than .* the precision stays as it was"):
        assert not la.narrow()
    assert la.prior.scalar == prior


def test_a_network_without_a_finite_loss_is_left_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = torch.zeros(40, 1)
    la = tb.Laplace(nn.Linear(2, 1), (x, y), tb.GaussianNoise(0.5), prior=0.1, check=False)
    la.model.bias.data.fill_(math.nan)
    assert not la.narrow()
    assert la.prior.scalar == pytest.approx(0.1)


def test_what_is_kept_keeps_no_batch_alive() -> None:
    x, y = torch.randn(600, 50), torch.arange(600) % 2
    data = [(x[i : i + 300], y[i : i + 300], torch.ones(300)) for i in (0, 300)]
    la = tb.Laplace(nn.Linear(50, 2), data, check=False)
    kept = [leaf for leaf in tree_leaves(la._some._parts) if isinstance(leaf, Tensor)]
    assert len(kept) == 6
    for tensor in kept:
        assert len(tensor) == 128
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _in_processes(folder: str) -> None:
    net, x, y = torch.load(Path(folder) / "task.pt", weights_only=False)
    with distributed.process_group():
        found = []
        for sizes in ((184, 16), (192, 8), (8, 8)):  # of processes 0 and 1
            ends = sum(sizes)
            data = [(x[: sizes[0]], y[: sizes[0]]), (x[sizes[0] : ends], y[sizes[0] : ends])]
            la = tb.Laplace(net, data, structure="full", prior=0.01, check=False)
            found.append((la.narrow(), la.prior.scalar))
        torch.save(found, Path(folder) / f"{distributed.rank()}.pt")


def test_processes_narrow_together_whatever_each_has_kept(
    separable: tuple[nn.Linear, Tensor, Tensor], tmp_path: Path
) -> None:
    net, x, y = separable
    torch.save((net, x, y), tmp_path / "task.pt")
    ended = processes(2, _in_processes, str(tmp_path), timeout=100)
    assert ended.returncode == 0, ended.stderr
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert found[0] == found[1]
    both, one, none = found[0]
    assert none == (False, pytest.approx(0.01))
    most = 0.1 * float(cross_entropy(net(x), y).detach())
    for raised, precision in (both, one):
        assert raised
        la = tb.Laplace(net, (x, y), structure="full", prior=precision, check=False)
        assert cost(net, la, x, y) < 1.5 * most
        la.prior = precision / 4
        assert cost(net, la, x, y) > most
