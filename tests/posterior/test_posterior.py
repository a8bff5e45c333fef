"""Posteriors against closed forms and NumPy; files against every kind of misuse."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core import storage
from torchbayes.posterior import DropoutPosterior, Posterior, RowGaussian


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Tied(nn.Module):
    """Two layers with one weight, a batch norm, a buffer of its own and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("offset", torch.tensor([1.0, 2.0, 3.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu() * self.frozen
        result: Tensor = self.second(x) + self.offset
        return result


def same(a: tb.Weights, b: tb.Weights) -> bool:
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n].detach()) for n in a
    )


# -- Snapshots ----------------------------------------------------------------------------------------


def test_a_snapshot_is_a_copy_that_names_tied_weights_once() -> None:
    model = Tied()
    copy = tb.snapshot(model)
    assert "first.weight" in copy
    assert "second.weight" not in copy
    assert {"norm.running_mean", "norm.num_batches_tracked", "offset", "frozen"} <= copy.keys()
    with torch.no_grad():
        model.first.weight.add_(1)
    assert torch.equal(copy["first.weight"] + 1, model.first.weight)
    assert not any(tensor.requires_grad for tensor in copy.values())


def test_a_draw_under_functional_call_moves_both_uses_of_a_tied_weight() -> None:
    model, other = Tied().eval(), Tied().eval()
    x = torch.randn(4, 3, generator=seeded())
    draw = tb.Point(tb.snapshot(other)).sample()
    assert torch.equal(tb.Point(draw).call(model, draw, x), other(x))


# -- Point --------------------------------------------------------------------------------------------


def test_a_point_is_its_own_only_draw() -> None:
    weights = tb.snapshot(Tied())
    point = tb.Point(weights)
    assert same(point.mean(), weights)
    assert same(point.sample(seeded()), weights)
    assert len(list(point.draws(10))) == 1
    assert list(point.draws(0)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda w: tb.Point(w),
        lambda w: tb.Gaussian(w, {"weight": torch.zeros_like(w["weight"])}),
        lambda w: tb.LowRankGaussian(w, {}, {"weight": torch.zeros(1, *w["weight"].shape)}),
    ],
)
def test_a_posterior_is_a_copy_both_ways(make: Callable[[tb.Weights], Posterior]) -> None:
    model = nn.Linear(2, 2)
    before = tb.snapshot(model)
    posterior = make(dict(model.named_parameters()))
    for tensor in [*posterior.mean().values(), *posterior.sample().values()]:
        tensor.detach().add_(1)  # what is given out is the caller's
    with torch.no_grad():
        model.weight.add_(1)  # and training goes on
    assert same(posterior.mean(), before)


# -- Gaussian -----------------------------------------------------------------------------------------


def test_moments_of_a_gaussian() -> None:
    count, size = 400, 500
    mean = {"w": torch.linspace(-2, 2, size), "b": torch.tensor(3.0)}
    std = {"w": torch.linspace(0, 2, size)}
    q = tb.Gaussian(mean, std)
    generator = seeded(1)
    draws = torch.stack([q.sample(generator)["w"] for _ in range(count)]).double()
    z = (draws - mean["w"]) / std["w"].clamp_min(1e-12)
    assert torch.equal(draws[:, 0], mean["w"][:1].double().expand(count))  # std 0
    z = z[:, 1:]
    # The average of (size · count) standard normals, and of their squares with variance 2.
    total = z.numel() ** 0.5
    assert abs(z.mean()) < 4 / total
    assert abs(z.square().mean() - 1) < 4 * 2**0.5 / total
    # Every weight for itself: 499 z-scores below 4.5 (one chance in 300 for all of them).
    assert (z.mean(0).abs() * count**0.5).max() < 4.5
    assert ((z.square().mean(0) - 1).abs() * (count / 2) ** 0.5).max() < 6
    # Independent: correlations of neighbours are standard normal over the square root of the count.
    neighbours = (z[:, 1:] * z[:, :-1]).mean() * (z[:, 1:].numel() ** 0.5)
    assert abs(neighbours) < 4


def test_weights_without_a_std_are_deterministic_and_buffers_are_carried() -> None:
    model = Tied()
    mean = tb.snapshot(model)
    q = tb.Gaussian(mean, {"first.weight": torch.ones(3, 3)})
    draw = q.sample(seeded())
    assert list(draw) == list(mean)
    assert not torch.equal(draw["first.weight"], mean["first.weight"])
    for name in mean.keys() - {"first.weight"}:
        assert torch.equal(draw[name], mean[name])
        assert draw[name].dtype == mean[name].dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_draws_keep_the_type_and_follow_the_generator(dtype: torch.dtype) -> None:
    mean = {"a": torch.zeros(5, dtype=dtype), "b": torch.ones((), dtype=dtype)}
    std = {name: torch.ones_like(tensor) for name, tensor in mean.items()}
    for q in (
        tb.Gaussian(mean, std),
        tb.LowRankGaussian(mean, std, {"a": torch.ones(2, 5, dtype=dtype)}),
    ):
        state = torch.get_rng_state()
        generator = seeded(3)
        one, two = q.sample(generator), q.sample(generator)
        assert torch.equal(torch.get_rng_state(), state)  # the global generator is not touched
        assert same(one, q.sample(seeded(3)))
        assert not same(one, two)
        assert {tensor.dtype for tensor in one.values()} == {dtype}
        torch.manual_seed(7)
        free = q.sample()
        torch.manual_seed(7)
        assert same(free, q.sample())


@pytest.mark.parametrize(
    ("std", "message"),
    [
        ({"other": torch.ones(2)}, "'other' that mean does not have"),
        ({"w": torch.ones(3)}, r"shape \(3,\) but its mean has \(2,\)"),
        ({"w": torch.tensor([1.0, -0.5])}, "entry -0.5"),
        ({"w": torch.tensor([float("nan"), 1.0])}, "entry nan"),
        ({"w": torch.tensor([float("inf"), 1.0])}, "entry inf"),
        ({"steps": torch.ones(())}, "torch.int64"),
    ],
)
def test_standard_deviations_that_cannot_be(std: tb.Weights, message: str) -> None:
    mean = {"w": torch.zeros(2), "steps": torch.tensor(4)}
    with pytest.raises(ValueError, match=message):
        tb.Gaussian(mean, std)
    with pytest.raises(ValueError, match=message):
        tb.LowRankGaussian(mean, std, {})


# -- Low-rank Gaussian --------------------------------------------------------------------------------


def test_covariance_of_a_low_rank_gaussian() -> None:
    """The sample covariance of all weights together, against diag(std²) + D Dᵀ."""
    count, rank = 6_000, 2
    generator = seeded(5)
    mean = {"a": torch.randn(2, 2, generator=generator), "b": torch.randn(3, generator=generator)}
    std = {"a": torch.rand(2, 2, generator=generator)}  # b moves along D only
    factors = {
        "a": torch.randn(rank, 2, 2, generator=generator),
        "b": torch.randn(rank, 3, generator=generator),
    }
    q = tb.LowRankGaussian(mean, std, factors)
    assert q.rank == rank
    flat = np.stack(
        [
            np.concatenate([draw["a"].numpy().ravel(), draw["b"].numpy()])
            for draw in (q.sample(generator) for _ in range(count))
        ]
    )
    columns = np.concatenate([factors["a"].reshape(rank, -1), factors["b"]], axis=1).T
    diagonal = np.concatenate([std["a"].numpy().ravel() ** 2, np.zeros(3)])
    covariance = np.diag(diagonal) + columns @ columns.T
    truth = np.concatenate([mean["a"].numpy().ravel(), mean["b"].numpy()])
    variances = np.diag(covariance)
    assert np.all(np.abs(flat.mean(0) - truth) < 4.5 * np.sqrt(variances / count))
    # The variance of a sample covariance of normals is (c_ii c_jj + c_ij²) / n.
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / count)
    assert np.all(np.abs(np.cov(flat.T) - covariance) < 4.5 * error)
    marginal = q.std()
    assert list(marginal) == ["a", "b"]
    ours = np.concatenate([marginal["a"].numpy().ravel(), marginal["b"].numpy()])
    np.testing.assert_allclose(ours, np.sqrt(variances), rtol=1e-6)


def test_low_rank_of_rank_nought_and_wrong_factors() -> None:
    mean = {"w": torch.zeros(3), "scalar": torch.tensor(2.0)}
    q = tb.LowRankGaussian(mean, {}, {"w": torch.zeros(0, 3)})
    assert same(q.sample(), mean)
    scalar = tb.LowRankGaussian(mean, {}, {"scalar": torch.tensor([3.0, 4.0])})
    assert scalar.std()["scalar"] == 5
    with pytest.raises(ValueError, match=r"ranks \[1, 2\]"):
        tb.LowRankGaussian(mean, {}, {"w": torch.zeros(1, 3), "scalar": torch.zeros(2)})
    for wrong in ({"w": torch.zeros(3)}, {"v": torch.zeros(1, 3)}, {"w": torch.tensor(1.0)}):
        with pytest.raises(ValueError, match=r"expected \(rank, \*shape"):
            tb.LowRankGaussian(mean, {}, wrong)


# -- Samples ------------------------------------------------------------------------------------------


def bank(count: int, folder: Path | None = None, size: int = 3) -> tuple[tb.Samples, np.ndarray]:
    samples = tb.Samples(folder=folder)
    values = np.random.default_rng(0).normal(size=(count, size))
    for index, row in enumerate(values):
        samples.append({"w": torch.tensor(row), "steps": torch.tensor(index)})
    return samples, values


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "bank" if request.param == "folder" else None


def test_snapshots_are_of_their_time(place: Path | None) -> None:
    model = Tied()
    samples = tb.Samples(model, folder=place)
    kept = []
    for _ in range(3):
        nn.init.normal_(model.first.weight)
        model.norm.running_mean.add_(1)  # type: ignore[operator, union-attr]
        samples.append()
        now = tb.snapshot(model)
        del now["frozen"], now["offset"]  # neither is trained
        kept.append(now)
    with torch.no_grad():
        model.first.weight.zero_()
    assert len(samples) == 3
    assert all(same(ours, theirs) for ours, theirs in zip(samples, kept, strict=True))
    assert same(samples[-1], kept[2])
    samples[0]["first.weight"].zero_()  # what is given out is the caller's
    assert same(samples[0], kept[0])
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=f"snapshot {wrong} of 3"):
            samples[wrong]


def test_the_mean_of_samples_is_numpys(place: Path | None) -> None:
    samples, values = bank(50, place)
    mean = samples.mean()
    np.testing.assert_allclose(mean["w"], values.mean(0), rtol=1e-12)
    assert mean["steps"] == 49  # of whole numbers the last


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_many_half_precision_samples(dtype: torch.dtype) -> None:
    """A running average in half precision would stop moving: here it would stay near 1."""
    values = np.concatenate([np.ones(10), np.full(990, 2.0)])
    samples = tb.Samples()
    for value in values:
        samples.append({"w": torch.tensor([value], dtype=dtype)})
    assert samples.mean()["w"].dtype == dtype
    assert abs(float(samples.mean()["w"]) - values.mean()) <= torch.finfo(dtype).eps * 2


def test_draws_are_all_or_different_ones(place: Path | None) -> None:
    samples, values = bank(10, place)
    everything = np.stack([draw["w"].numpy() for draw in samples.draws(10)])
    np.testing.assert_array_equal(everything, values)
    assert len(list(samples.draws(1000))) == 10
    chosen = [int(draw["steps"]) for draw in samples.draws(4, seeded(1))]
    assert len(set(chosen)) == 4
    assert chosen == [int(draw["steps"]) for draw in samples.draws(4, seeded(1))]
    # Each member is in a draw of 4 of 10 with chance 0.4.
    generator = seeded(2)
    counts = np.zeros(10)
    for _ in range(500):
        counts[[int(draw["steps"]) for draw in samples.draws(4, generator)]] += 1
    assert np.all(np.abs(counts / 500 - 0.4) < 4 * np.sqrt(0.4 * 0.6 / 500))


def test_a_sample_is_each_member_with_equal_chance() -> None:
    samples, _ = bank(4)
    generator = seeded(0)
    counts = np.bincount([int(samples.sample(generator)["steps"]) for _ in range(2000)])
    assert np.all(np.abs(counts / 2000 - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 2000))


def test_empty_samples_say_so(place: Path | None, tmp_path: Path) -> None:
    samples = tb.Samples(folder=place)
    for use in (
        samples.mean,
        samples.sample,
        lambda: list(samples.draws(3)),
        lambda: samples.save(tmp_path / "x"),
        lambda: samples.check(nn.Linear(1, 1)),
    ):
        with pytest.raises(ValueError, match="are empty: append"):
            use()
    with pytest.raises(ValueError, match="no model to take a snapshot of"):
        samples.append()


def test_truncate(place: Path | None) -> None:
    samples, _ = bank(6, place)
    for wrong in (-1, 7):
        with pytest.raises(ValueError, match=f"cannot keep {wrong} of 6"):
            samples.truncate(wrong)
    samples.truncate(4)
    assert len(samples) == 4
    samples.append({"w": torch.zeros(3), "steps": torch.tensor(99)})
    assert [int(draw["steps"]) for draw in samples] == [0, 1, 2, 3, 99]
    samples.truncate(0)
    assert len(samples) == 0
    samples.append({"v": torch.zeros(1)})  # an empty bank may be of another model
    assert list(samples[0]) == ["v"]


def test_a_bank_is_of_one_model(place: Path | None) -> None:
    samples, _ = bank(2, place)
    for wrong in (
        {"w": torch.zeros(4), "steps": torch.tensor(0)},
        {"w": torch.zeros(3)},
        {"w": torch.zeros(3), "steps": torch.tensor(0), "new": torch.zeros(1)},
    ):
        with pytest.raises(ValueError, match="keep one bank"):
            samples.append(wrong)
    assert len(samples) == 2


def test_a_folder_is_continued(tmp_path: Path) -> None:
    bank(3, tmp_path)
    again = tb.Samples(folder=tmp_path)
    assert len(again) == 3
    again.append({"w": torch.zeros(3), "steps": torch.tensor(99)})
    assert [int(draw["steps"]) for draw in tb.Samples(folder=tmp_path)] == [0, 1, 2, 99]
    with pytest.raises(ValueError, match="keep one bank"):
        tb.Samples(nn.Linear(2, 2), folder=tmp_path).append()


def test_a_folder_with_a_gap_is_refused(tmp_path: Path) -> None:
    bank(5, tmp_path)
    (tmp_path / "draw-000002.safetensors").unlink()
    with pytest.raises(
        tb.posterior.PosteriorFileError, match=r"5 draws but has no draw-000002\.safetensors"
    ):
        tb.load(tmp_path)
    (tmp_path / "bank.json").unlink()  # as before there were manifests
    with pytest.raises(
        tb.posterior.PosteriorFileError, match=r"4 draws but no draw-000002\.safetensors"
    ):
        tb.load(tmp_path)


def test_a_thousand_draws_are_read_one_at_a_time(tmp_path: Path) -> None:
    size = 20_000
    whole = tb.Samples(folder=tmp_path)
    whole.append({"w": torch.zeros(size)})
    # 999 more files with numbers of their own would take long to write; copies will do.
    for index in range(1, 1000):
        (tmp_path / f"draw-{index:06d}.safetensors").hardlink_to(
            tmp_path / "draw-000000.safetensors"
        )
    (tmp_path / "bank.json").unlink()
    samples = tb.load(tmp_path)
    assert isinstance(samples, tb.Samples)
    assert len(samples) == 1000
    alive = peak = 0

    class Counted(dict[str, Tensor]):
        def __init__(self, *args: Any) -> None:
            nonlocal alive, peak
            super().__init__(*args)
            alive += 1
            peak = max(peak, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    point_mean = tb.Point.mean
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tb.Point, "mean", lambda self: Counted(point_mean(self)))
        tracemalloc.start()
        mean = samples.mean()
        chosen = sum(1 for _ in samples.draws(500, seeded()))
        _, python_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert chosen == 500
    assert torch.equal(mean["w"], torch.zeros(size))
    assert peak <= 2  # the one in use and the next
    assert python_peak < 1 << 20


# -- Files --------------------------------------------------------------------------------------------


def odd_weights() -> tb.Weights:
    return {
        "float": torch.randn(2, 3, generator=seeded()),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "bf16": torch.ones(4, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "a/b.c": torch.ones(1),
        "strided": torch.arange(6.0).reshape(2, 3).t(),
    }


def posteriors() -> list[Posterior]:
    mean = odd_weights()
    std = {"float": torch.rand(2, 3, generator=seeded()), "double": mean["double"].clone()}
    factors = {
        "float": torch.randn(2, 2, 3, generator=seeded()),
        "bf16": torch.ones(2, 4).bfloat16(),
    }
    samples = tb.Samples()
    for shift in range(12):
        samples.append({name: t + shift for name, t in mean.items() if t.dtype != torch.bool})
    shared = torch.ones(3)
    return [
        tb.Point(mean, model_name="Net"),
        tb.Gaussian(mean, std, model_name="Net"),
        tb.Gaussian(mean, {}, model_name="Net"),
        tb.Gaussian({"a": shared, "b": shared}, {"b": shared}),
        tb.LowRankGaussian(mean, std, factors, model_name="Net"),
        tb.LowRankGaussian(mean, {}, {}),
        samples,
        tb.KroneckerGaussian(
            mean,
            {"float": torch.rand(2, 2)},
            {"float": torch.rand(3, 3)},
            std={"double": std["double"]},
            scales={"float": torch.rand(2, 3)},
        ),
        tb.posterior.FullGaussian(mean, ["float"], torch.rand(6, 6)),
        tb.posterior.ShrunkGaussian(
            mean, {"float": std["float"]}, {"float": torch.zeros(1, 2, 3)}, torch.ones(1)
        ),
        RowGaussian(mean, {"float": torch.rand(2, 3, 3)}, std={"double": std["double"]}),
        DropoutPosterior(mean, 0.2, ["0", "body.fc"], model_name="Net"),
    ]


@pytest.mark.parametrize("index", range(10))
def test_every_kind_comes_back_as_it_was(index: int, tmp_path: Path) -> None:
    posterior = posteriors()[index]
    path = tmp_path / "runs" / "posterior.safetensors"
    posterior.save(path)
    back = tb.load(path)
    assert type(back) is type(posterior)
    assert back.model_name == posterior.model_name
    assert same(back.mean(), posterior.mean())
    assert repr(back) == repr(posterior)
    for seed in range(3):
        assert same(back.sample(seeded(seed)), posterior.sample(seeded(seed)))
    if isinstance(posterior, tb.Samples):
        assert isinstance(back, tb.Samples)
        assert all(same(a, b) for a, b in zip(back, posterior, strict=True))
    back.save(path)  # over the file that it was read from
    assert same(tb.load(path).mean(), posterior.mean())


@pytest.mark.parametrize("package", ["torchbayes", "torchbayes.posterior"])
def test_every_kind_is_known_to_a_fresh_process(package: str, tmp_path: Path) -> None:
    """Reading a file must not depend on what else the process happens to have imported."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    generated = tb.Hypernet(net, "all-in-one").posterior()
    saved = {type(posterior): posterior for posterior in [*posteriors(), generated]}
    assert {kind.kind for kind in saved} == set(Posterior.kinds)
    for kind, posterior in saved.items():
        posterior.save(tmp_path / kind.__name__)
    code = (
        f"import sys, {package} as tb\n"
        "for path in sys.argv[1:]:\n"
        "    assert type(tb.load(path)).__name__ == path.rpartition('/')[2], path\n"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, tmp_path.iterdir())], check=True)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    tb.Point({"w": torch.ones(1000)}).save(path)
    back = tb.load(path)
    with path.open("r+b") as file:
        file.seek(-4000, 2)
        file.write(b"\0" * 4000)
    assert torch.equal(back.mean()["w"], torch.ones(1000))


def test_a_folder_is_saved_and_read(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    samples = tb.Samples(model, folder=tmp_path / "bank")
    for _ in range(3):
        nn.init.normal_(model.weight)
        samples.append()
    samples.save(tmp_path / "bank")  # onto itself: nothing to do
    bank(7, tmp_path / "copy")
    samples.save(tmp_path / "copy")
    back = tb.load(tmp_path / "copy", model)
    assert isinstance(back, tb.Samples)
    assert back.model_name == "Linear"
    assert len(back) == 3
    assert all(same(a, b) for a, b in zip(back, samples, strict=True))


def test_a_folder_that_was_copied_in_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, _ = bank(5, tmp_path / "bank")
    bank(3, tmp_path / "copy")
    copyfile, left = shutil.copyfile, 3

    def full_disk(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("no space left on device")
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", full_disk)
    with pytest.raises(OSError, match="no space"):
        samples.save(tmp_path / "copy")
    with pytest.raises(tb.posterior.PosteriorFileError, match="draw-000000"):
        tb.load(tmp_path / "copy")
    monkeypatch.undo()
    samples.save(tmp_path / "copy")
    assert len(tb.Samples(folder=tmp_path / "copy")) == 5


def test_a_damaged_draw_in_a_folder(tmp_path: Path) -> None:
    bank(3, tmp_path)
    raw = (tmp_path / "draw-000001.safetensors").read_bytes()
    (tmp_path / "draw-000001.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    samples = tb.load(tmp_path)  # read lazily, so the damage shows when the draw is used
    with pytest.raises(
        tb.posterior.PosteriorFileError, match=r"draw-000001\.safetensors is damaged"
    ):
        samples.mean()


def test_a_folder_without_draws(tmp_path: Path) -> None:
    with pytest.raises(tb.posterior.PosteriorFileError, match="not a bank of samples"):
        tb.load(tmp_path)
    with pytest.raises(tb.posterior.PosteriorFileError, match="there is no posterior file"):
        tb.load(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_kind_of_the_future(tmp_path: Path) -> None:
    storage.write_tensors(
        tmp_path / "x", {"mean/w": torch.ones(1)}, kind="flow", model_name="", settings={}
    )
    with pytest.raises(
        tb.posterior.PosteriorFileError, match=r"kind 'flow'.*low-rank-gaussian.*upgrade"
    ):
        tb.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        ("point", {"std/w": torch.ones(1)}),
        ("point", {"w": torch.ones(1)}),
        ("gaussian", {"mean/w": torch.ones(2), "std/w": torch.ones(3)}),
        ("gaussian", {"mean/w": torch.ones(2), "std/w": -torch.ones(2)}),
        ("gaussian", {"mean/w": torch.ones(2), "std/v": torch.ones(2)}),
        ("low-rank-gaussian", {"mean/w": torch.ones(2), "factors/w": torch.tensor(1.0)}),
        ("low-rank-gaussian", {"mean/w": torch.ones(2), "factors/w": torch.ones(2)}),
        ("samples", {"000000/w": torch.ones(1), "000001/w": torch.ones(2)}),
        ("dropout", {"mean/w": torch.ones(1)}),
    ],
)
def test_contents_that_are_not_of_their_kind(
    kind: str, tensors: tb.Weights, tmp_path: Path
) -> None:
    storage.write_tensors(tmp_path / "x", tensors, kind=kind, model_name="", settings={})
    with pytest.raises(
        tb.posterior.PosteriorFileError, match=f"{kind!r} posterior but its contents"
    ) as error:
        tb.load(tmp_path / "x")
    assert "\n" not in str(error.value)


def test_a_posterior_of_another_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    samples = tb.Samples(model)
    samples.append()
    for index, posterior in enumerate([tb.Point(tb.snapshot(model), model_name="Mlp"), samples]):
        posterior.save(tmp_path / str(index))
        assert tb.load(tmp_path / str(index), model)
        for other, message in (
            (nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), r"'0.weight' has shape \(3, 2\)"),
            (nn.Sequential(nn.Linear(2, 3)), "'1.weight' that Sequential does not have"),
            (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.PReLU()), "no weight '2.weight'"),
        ):
            with pytest.raises(tb.posterior.PosteriorFileError, match=message) as error:
                tb.load(tmp_path / str(index), other)
            assert "\n" not in str(error.value)
            with pytest.raises(ValueError, match=message):
                posterior.check(other)


def test_frozen_weights_may_be_left_out_and_tied_ones_are_named_once() -> None:
    model = Tied()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tb.Point(weights).check(model)
    with pytest.raises(ValueError, match=r"'second\.weight' of Tied is tied to another one"):
        tb.Point(model.state_dict()).check(model)
