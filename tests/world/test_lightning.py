"""Lightning's Trainer: the same posterior as in a loop of one's own, whole after a stop, right in pieces."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchbayes as tb

lightning = pytest.importorskip("lightning")

from torchbayes.integrations.lightning import BayesianModule, PosteriorCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default:::lightning", "default::DeprecationWarning")

N, BATCH = 48, 16
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
DATA = TensorDataset(X, Y)


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Dropout(0.1)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), middle, nn.Linear(8, 2))


def trainer(*callbacks: Any, epochs: int = 4, **options: Any) -> Any:
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return lightning.Trainer(max_epochs=epochs, callbacks=list(callbacks), **(quiet | options))


def loader(batch: int = BATCH, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(DATA, batch, shuffle=shuffle)


def numbers(posterior: tb.Posterior) -> dict[str, Tensor]:
    if isinstance(posterior, tb.Samples):
        return {f"{i} {k}": v for i, draw in enumerate(posterior) for k, v in draw.items()}
    result = {f"mean {k}": v for k, v in posterior.mean().items()}
    if hasattr(posterior, "std"):
        result |= {f"std {k}": v for k, v in posterior.std().items()}
    return result


def assert_equal(one: tb.Posterior, two: tb.Posterior) -> None:
    left, right = numbers(one), numbers(two)
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[key]) for key, value in left.items())


class Mine(lightning.LightningModule):
    """An ordinary module of a user's."""

    def __init__(self, optimizer: Callable[[nn.Module], Any], norm: bool = False) -> None:
        super().__init__()
        self.net, self.make = network(norm), optimizer

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self.net)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sgld(model: nn.Module) -> tb.SGLD:
    return tb.SGLD(model, 1e-3, train_size=N, generator=seeded())


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


# -- The callback -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"thinning": 3}, {"samples": 2}, {"burn_in": 0.0}])
def test_a_samplers_states_are_those_of_a_loop_by_hand(options: dict[str, Any]) -> None:
    callback = PosteriorCallback(**options)
    module = Mine(sgld)
    torch.manual_seed(1)
    trainer(callback).fit(module, loader(shuffle=False))
    twin = network()
    torch.manual_seed(1)
    sampler, kept = sgld(twin), tb.Samples(twin)
    updates = 4 * 3
    wanted = {
        "thinning": {12, 9}, "samples": {12, 9}, "burn_in": set(range(1, 13)),
    }[next(iter(options))]  # fmt: skip
    # Lightning's loop draws for the loader's iterator as this one does, so dropout is the same.
    done = 0
    for _ in range(4):
        for x, y in loader(shuffle=False):
            sampler.zero_grad()
            F.cross_entropy(twin(x), y).backward()
            sampler.step()
            done += 1
            if done in wanted:
                kept.append()
    assert updates == done
    assert_equal(callback.posterior, kept)


def test_an_average_takes_a_snapshot_after_every_late_epoch() -> None:
    module = Mine(sgd)
    swag = tb.SWAG(module.net, rank=2)
    callback = PosteriorCallback(swag, burn_in=0.5)
    trainer(callback, epochs=6).fit(module, loader())
    assert len(swag) == 3
    assert isinstance(callback.posterior, tb.LowRankGaussian)
    often = tb.SWA(module.net)
    trainer(PosteriorCallback(often, thinning=2), epochs=4).fit(module, loader())
    assert len(often) == 3


@pytest.mark.filterwarnings("error:.*batch norm")
def test_an_average_with_batch_norm_gets_statistics_of_its_own() -> None:
    module = Mine(sgd, norm=True)
    swa = tb.SWA(module.net)
    callback = PosteriorCallback(swa, burn_in=0.0)
    trainer(callback).fit(module, loader())
    mean = callback.posterior.mean()
    hidden = F.relu(F.linear(X, mean["0.weight"], mean["0.bias"]))
    torch.testing.assert_close(mean["2.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)


CASES: dict[str, Callable[[], tuple[Any, PosteriorCallback]]] = {
    "sgld": lambda: (Mine(sgld), PosteriorCallback(burn_in=0.3)),
    "ivon": lambda: (
        Mine(lambda m: tb.IVON(m, 0.1, train_size=N, generator=seeded())), PosteriorCallback(),
    ),
    "module": lambda: (BayesianModule(network(), tb.VOGN, generator=seeded()), PosteriorCallback()),
}  # fmt: skip


def swag_case() -> tuple[Any, PosteriorCallback]:
    module = Mine(sgd)
    return module, PosteriorCallback(tb.SWAG(module.net, rank=2), burn_in=0.2)


def noise_case() -> tuple[Any, PosteriorCallback]:
    noise = tb.GaussianNoise(learned=True)
    module = BayesianModule(
        network(), tb.SGHMC, likelihood=noise, generator=seeded(), schedule="cosine"
    )
    return module, PosteriorCallback()


CASES |= {"swag": swag_case, "noise": noise_case}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("validated", [False, True])
def test_a_resumed_trainer_is_bit_equal(name: str, validated: bool, tmp_path: Path) -> None:
    """With shuffled data and dropout; the checkpoint is saved after an epoch, before or after validation."""
    data = DataLoader(TensorDataset(X, X[:, :2]) if name == "noise" else DATA, BATCH, shuffle=True)
    check = [data] if validated and isinstance(CASES[name]()[0], BayesianModule) else []

    def run(*extra: Any, path: Path | None = None, seed: int = 1) -> Any:
        module, callback = CASES[name]()
        torch.manual_seed(seed)
        made = trainer(callback, *extra, enable_checkpointing=bool(extra))
        made.fit(module, data, *check, ckpt_path=path, weights_only=path is not None or None)
        return module, callback

    saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    module, whole = run(saver)
    path = tmp_path / "epoch=1.ckpt"
    resumed_module, resumed = run(path=path, seed=77)
    assert_equal(resumed.posterior, whole.posterior)
    if name == "noise":
        assert torch.equal(resumed_module.likelihood.std, module.likelihood.std)
        assert not torch.equal(module.likelihood.std, torch.ones(()))


def test_samples_can_be_in_a_folder_and_resume(tmp_path: Path) -> None:
    folder = tmp_path / "bank"
    saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    first = PosteriorCallback(folder=folder, burn_in=0.2)
    torch.manual_seed(1)
    trainer(first, saver, enable_checkpointing=True).fit(Mine(sgld), loader())
    wanted = [dict(draw) for draw in first.posterior]
    # The checkpoint names the samples and does not hold them.
    state = torch.load(tmp_path / "epoch=2.ckpt", weights_only=True)["callbacks"]
    assert state["PosteriorCallback"]["collector"]["samples"]["next"] == 7
    again = PosteriorCallback(folder=folder, burn_in=0.2)
    trainer(again).fit(Mine(sgld), loader(), ckpt_path=tmp_path / "epoch=2.ckpt")
    assert len(again.posterior) == len(wanted) == 10
    for one, two in zip(wanted, again.posterior, strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    with pytest.raises(ValueError, match="already holds 10 samples and nothing is resumed"):
        trainer(PosteriorCallback(folder=folder)).fit(Mine(sgld), loader())


def test_a_checkpoint_without_the_callback_is_refused(tmp_path: Path) -> None:
    saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer(saver, enable_checkpointing=True).fit(Mine(sgld), loader())
    with pytest.raises(ValueError, match="saved without a PosteriorCallback"):
        trainer(PosteriorCallback()).fit(Mine(sgld), loader(), ckpt_path=tmp_path / "epoch=1.ckpt")


def test_what_cannot_be_collected_says_why() -> None:
    with pytest.raises(ValueError, match="has 0 optimisers of torchbayes"):
        trainer(PosteriorCallback()).fit(Mine(sgd), loader())
    with pytest.raises(TypeError, match="Linear has no posterior"):
        trainer(PosteriorCallback(nn.Linear(1, 1))).fit(Mine(sgd), loader())
    with pytest.raises(ValueError, match="no posterior before"):
        _ = PosteriorCallback().posterior
    with pytest.raises(ValueError, match="number of updates is inf"):
        trainer(PosteriorCallback(), epochs=-1).fit(Mine(sgld), loader())
    early = PosteriorCallback()
    made = trainer(early, limit_train_batches=2)
    stop = lightning.pytorch.callbacks.LambdaCallback(
        on_train_epoch_end=lambda trainer, _: setattr(trainer, "should_stop", True)
    )
    made.callbacks.insert(0, stop)
    made.fit(Mine(sgld), loader())
    with pytest.raises(ValueError, match="no sample after 2 updates"):
        _ = early.posterior


# -- The module ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [2, 3, 4])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_pieces_of_a_batch_end_in_the_same_posterior(pieces: int, clip: float | None) -> None:
    """Without noise. In the last case an epoch's last update has two pieces instead of four."""
    results = []
    for size, k in ((12 // pieces * pieces, 1), (12 // pieces, pieces)):
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        torch.manual_seed(0)
        for p in net.parameters():
            nn.init.normal_(p, std=0.3)
        count = 42 if pieces == 4 else 48
        data = DataLoader(TensorDataset(X[:count].double(), Y[:count]), size)
        module = BayesianModule(net.double(), tb.OGN, lr=0.01)
        trainer(accumulate_grad_batches=k, gradient_clip_val=clip).fit(module, data)
        assert module.train_size == count
        results.append(numbers(module.posterior))
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("error:.*sampled")
@pytest.mark.parametrize("optimizer", [tb.IVON, tb.VOGN, tb.NoisyKFAC])
def test_every_piece_has_a_draw(optimizer: Any) -> None:
    """No gradient is taken at the mean: the weights of each forward pass differ from it."""
    module = BayesianModule(network(), optimizer)
    seen: list[Tensor] = []
    module.model[0].register_forward_hook(
        lambda m, *_: seen.append(m.weight.detach().clone()) if m.training else None
    )
    trainer(accumulate_grad_batches=4, epochs=1).fit(module, loader(4))
    assert len(seen) == 12
    if optimizer is not tb.IVON:
        seen = seen[4:]  # they know no curvature, and so no spread, before the first update
    assert all(not torch.equal(one, two) for one, two in pairwise(seen))
    assert not any(torch.equal(w, module.posterior.mean()["0.weight"]) for w in seen)


def test_several_draws_do_not_go_with_pieces() -> None:
    module = BayesianModule(network(), tb.IVON, mc_samples=2)
    trainer(epochs=1).fit(module, loader())
    with pytest.raises(RuntimeError, match="use mc_samples=1"):
        trainer(accumulate_grad_batches=3, epochs=1).fit(module, loader())


@pytest.mark.filterwarnings("error")
def test_predictions_average_over_the_posterior() -> None:
    module = BayesianModule(network(), tb.SGLD, lr=1e-3, samples=3)
    made = trainer(PosteriorCallback(samples=3))
    made.fit(module, loader(), loader())
    assert {"train_loss", "validation_nll", "validation_accuracy"} <= made.callback_metrics.keys()
    predictions = made.predict(module, loader(shuffle=False))
    probs = torch.cat([p.probs for p in predictions])
    net, wanted = network().eval(), []
    for draw in module.posterior:
        net.load_state_dict(draw)
        wanted.append(net(X).softmax(1))
    torch.testing.assert_close(probs, torch.stack(wanted).mean(0))
    fresh = BayesianModule(network(), tb.SGLD)
    with pytest.raises(ValueError, match="no posterior yet"):
        _ = fresh.posterior
    fresh.posterior = module.posterior
    assert fresh.predict_step((X, Y)).probs.shape == (N, 2)


def test_a_mean_field_pays_for_its_kl() -> None:
    net = tb.MeanField(network())
    module = BayesianModule(net, torch.optim.Adam, lr=0.01)
    made = trainer(epochs=1)
    made.fit(module, loader())
    torch.manual_seed(3)
    loss = module.loss((X, Y))
    torch.manual_seed(3)
    wanted = F.cross_entropy(net(X), Y) + net.kl() / N
    torch.testing.assert_close(loss, wanted)
    assert isinstance(module.posterior, tb.Gaussian)
    assert made.predict(module, loader())[0].probs.shape == (BATCH, 2)


def test_hwa_averages_a_mean_field() -> None:
    net = tb.MeanField(network())
    callback = PosteriorCallback(tb.HWA(net), burn_in=0.5)
    module = BayesianModule(net, torch.optim.Adam, lr=0.01)
    made = trainer(callback)
    made.fit(module, loader())
    assert module.posterior.std().keys() == net.posterior().std().keys()
    assert made.predict(module, loader(shuffle=False))[0].probs.shape == (BATCH, 2)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped(precision: str, algorithm: str) -> None:
    """To almost nothing: what is left of SGD's step is its bound."""
    module = BayesianModule(network(), torch.optim.SGD, lr=1.0)
    before = tb.snapshot(module.model)
    swa = PosteriorCallback(tb.SWA(module.model))
    trainer(
        swa, max_steps=1, gradient_clip_val=1e-4, gradient_clip_algorithm=algorithm,
        precision=precision,
    ).fit(module, loader())  # fmt: skip
    moved = torch.cat([(v - before[k]).flatten() for k, v in tb.snapshot(module.model).items()])
    size = moved.norm() if algorithm == "norm" else moved.abs().max()
    assert 0.9e-4 < size < 1.1e-4


@pytest.mark.filterwarnings("default")
def test_clipping_a_sampler_warns() -> None:
    with pytest.warns(UserWarning, match="belong to another distribution"):
        trainer(PosteriorCallback(), gradient_clip_val=1.0).fit(Mine(sgld), loader())


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


def test_a_stream_needs_its_size() -> None:
    stream = DataLoader(Endless(), BATCH)
    with pytest.raises(ValueError, match="pass train_size="):
        trainer(max_steps=4).fit(BayesianModule(network(), tb.IVON), stream)
    module = BayesianModule(network(), tb.IVON, train_size=N)
    trainer(max_steps=4).fit(module, stream)
    assert module.posterior.mean()
