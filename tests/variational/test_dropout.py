"""MC-dropout: where it drops, what it preserves, and that it leaves no trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core import storage
from torchbayes.models.lenet import lenet5
from torchbayes.posterior import DropoutPosterior, Posterior
from torchbayes.posterior.dropout import OwnDropout


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Identity(),
        nn.Linear(8, 6),
        nn.Linear(6, 4),
    )


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# -- Where --------------------------------------------------------------------------------------------


def test_lenet_drops_after_every_convolution_and_linear_layer_but_the_last() -> None:
    net = tb.MCDropout(lenet5(in_channels=1, image_size=28))
    assert net.layers == ["conv1", "conv2", "fc1", "fc2"]
    assert net.p == 0.03


def test_dropout_comes_before_the_non_linearity() -> None:
    """A dropped activation of a layer with bias 1 is 0 before the sigmoid, so 0.5 after it."""
    model = nn.Sequential(nn.Linear(2, 400), nn.Sigmoid(), nn.Linear(400, 400))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.zero_()
            layer.bias.fill_(1.0)
        model[2].weight.copy_(torch.eye(400))
    torch.manual_seed(0)
    out = tb.MCDropout(model, p=0.25)(torch.zeros(1, 2)).detach() - 1
    dropped = torch.sigmoid(torch.tensor(0.0))
    kept = torch.sigmoid(torch.tensor(1 / 0.75))
    assert torch.isclose(out[..., None], torch.stack([dropped, kept])).any(-1).all()
    assert 0 < torch.isclose(out, dropped).float().mean() < 1  # and no dropout after the last layer


def test_a_model_from_elsewhere_keeps_its_names_and_weights(mlp: nn.Sequential) -> None:
    net = tb.MCDropout(mlp)
    assert net.layers == ["0", "4"]
    assert net.model is mlp
    assert type(net.model) is nn.Sequential
    assert list(net.posterior().mean()) == list(tb.snapshot(mlp))
    assert [p for p in net.parameters()] == [p for p in mlp.parameters()]


def test_recurrent_layers_keep_their_state_form() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.last = nn.LSTM(3, 50, batch_first=True), nn.Linear(50, 4)

        def forward(self, x: Tensor) -> Tensor:
            sequence, (_state, _cell) = self.lstm(x)
            logits: Tensor = self.last(sequence[:, -1])
            return logits

    model = Recurrent()
    net = tb.MCDropout(model, p=0.5)
    assert net.layers == ["lstm"]
    x = normals(1, 5, 3).expand(6, 5, 3)
    own = net.train()(x)
    assert not torch.allclose(own[0], own[1])  # in training a mask for each example
    p = tb.predictive(model, net, x, samples=4)
    torch.testing.assert_close(p.probs[0], p.probs[1])  # in a draw one mask for all
    assert p.epistemic.min() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tb.MCDropout(nn.Linear(2, 2)), "no convolution, linear or recurrent layer"),
        (lambda: tb.MCDropout(nn.Sequential(nn.ReLU())), "name the modules in layers"),
        (lambda: tb.MCDropout(nn.Linear(2, 2), layers=["fc9"]), "has no module 'fc9'"),
        (lambda: tb.MCDropout(nn.Linear(2, 2), p=0.0), "p is 0.0"),
        (lambda: tb.MCDropout(nn.Linear(2, 2), p=1.0), "p is 1.0"),
        (lambda: tb.MCDropout(nn.Linear(2, 2), p=float("nan")), "p is nan"),
        (lambda: DropoutPosterior({}, 1.5, []), "p is 1.5"),
        (lambda: DropoutPosterior({}, None, []), "p is None"),
        (lambda: tb.MCDropout(nn.Linear(2, 2), layers="all"), "layers is 'all'"),
        (
            lambda: tb.MCDropout(
                nn.Sequential(nn.Dropout(0.2), nn.Linear(2, 2)), layers=["0", "1"]
            ),
            r"different probabilities, \[0.03, 0.2\]",
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- A network's own dropout ---------------------------------------------------------------------------


def outputs_of(posterior: Posterior, model: nn.Module, x: Tensor, count: int) -> Tensor:
    generator = seeded(3)
    with torch.no_grad():
        draws = [posterior.call(model, posterior.sample(generator), x) for _ in range(count)]
    return torch.stack(draws)


def test_own_dropout_is_used_and_nothing_is_added() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Dropout(0.0), nn.Linear(6, 2))
    net = tb.MCDropout(model)
    assert (net.layers, net.own, net.p) == (["1"], True, None)
    x = normals(1, 4)
    torch.manual_seed(0)
    with torch.no_grad():
        trained = torch.stack([net.train()(x) for _ in range(4000)])[:, 0]
    ours = outputs_of(net.posterior(), model.eval(), x, 4000)[:, 0]
    # The same distribution: mean and covariance in closed form, h being what is dropped.
    h, w = model[0](x)[0].detach(), model[3].weight.detach()
    mean = model(x)[0].detach()
    covariance = w @ torch.diag(h.square() * 0.4 / 0.6) @ w.t()
    for draws in (trained, ours):
        error = (draws.mean(0) - mean).abs() / (covariance.diagonal() / 4000).sqrt()
        assert error.max() < 4
        torch.testing.assert_close(draws.t().cov(), covariance, rtol=0.15, atol=0.02)
    torch.testing.assert_close(net.eval()(x), model(x))


def test_a_given_p_replaces_the_networks() -> None:
    model = nn.Sequential(nn.Linear(1, 1000), nn.Dropout(0.4), nn.Flatten())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    net = tb.MCDropout(model, p=0.1)
    torch.manual_seed(0)
    for out in (
        net.train()(torch.zeros(20, 1)),
        outputs_of(net.posterior(), model.eval(), torch.zeros(1, 1), 20),
    ):
        assert abs((out == 0).float().mean() - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 20_000)


def test_own_dropout_has_one_mask_per_draw_and_leaves_batch_norm_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(72, 3),
        nn.Dropout(0.2), nn.Linear(3, 3),
    ).eval()  # fmt: skip
    q = tb.MCDropout(model).posterior()
    x = normals(1, 1, 5, 5).expand(4, -1, -1, -1)
    seen: list[Tensor] = []
    handle = model[2].register_forward_hook(lambda _m, _i, out: seen.append(out))
    draw, before = q.sample(seeded(1)), tb.snapshot(model)
    with torch.no_grad():
        out = q.call(model, draw, x)
        torch.testing.assert_close(out, out[:1].expand(4, -1))
        torch.testing.assert_close(out[:1], q.call(model, draw, x[:1]))
    handle.remove()
    gone = (seen[0][0] == 0).flatten(1)
    assert 0 < gone.all(1).sum() < 8  # whole channels or none of a channel
    assert torch.equal(gone.all(1), gone.any(1))
    for name, value in tb.snapshot(model).items():
        assert torch.equal(value, before[name])


def test_alpha_dropout_is_torchs() -> None:
    model = nn.Sequential(nn.AlphaDropout(0.3), nn.Flatten())
    net, x = tb.MCDropout(model), torch.full((1, 500), 0.7)
    torch.manual_seed(0)
    wanted = net.train()(x)
    ours = outputs_of(net, model.eval(), x, 1)[0]
    torch.testing.assert_close(ours.unique(), wanted.unique())


def test_dropout_in_code_without_a_module() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 30), nn.Linear(30, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.dropout(self.first(x), training=self.training)
            logits: Tensor = self.last(hidden)
            return logits

    model = Functional()
    net = tb.MCDropout(model, layers="own")
    assert (net.layers, net.own) == ([], True)
    seen: list[Tensor] = []
    model.last.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    outputs_of(net, model.eval(), torch.ones(1, 2), 100)
    dropped = (torch.stack(seen) == 0).float().mean()
    assert abs(dropped - 0.5) < 4 * np.sqrt(0.25 / 3000)


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_inside_attention(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    layer.self_attn.dropout = 0.4
    layer.eval()
    net = tb.MCDropout(layer)
    assert net.layers == ["self_attn"]
    one = normals(1, 5, 8) if batch_first else normals(5, 1, 8)
    x = one.expand(3, 5, 8) if batch_first else one.expand(5, 3, 8)
    draws = outputs_of(net, layer, x, 300) if batch_first else outputs_of(net, layer, one, 300)
    if batch_first:
        torch.testing.assert_close(draws[:, 0], draws[:, 1])  # one mask for all examples
        draws = draws[:, :1]
    assert draws.std(0).min() > 0
    layer.train()
    with torch.no_grad():
        wanted = torch.stack([layer(one) for _ in range(300)])
    error = (draws.mean(0) - wanted.mean(0)).abs() / ((draws.var(0) + wanted.var(0)) / 300).sqrt()
    assert error.max() < 4.5


@pytest.mark.parametrize("case", ["plain", "causal", "boolean", "additive", "grouped"])
def test_attention_without_dropped_weights_is_torchs(case: str) -> None:
    """With a probability too small to drop anything, our attention is that of torch."""
    keys = 2 if case == "grouped" else 4
    q, k, v = normals(3, 4, 5, 6), normals(3, keys, 5, 6, seed=1), normals(3, keys, 5, 6, seed=2)
    options: dict[str, Any] = {
        "plain": {"scale": 0.3}, "causal": {"is_causal": True}, "grouped": {"enable_gqa": True},
        "boolean": {"attn_mask": normals(5, 5, seed=3) < 1},
        "additive": {"attn_mask": normals(5, 5, seed=3)},
    }[case]  # fmt: skip
    with OwnDropout(None, seed=0, examples=3):
        ours = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, **options)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, **options))


def test_a_named_dropout_layer_is_not_doubled_in_training() -> None:
    model = nn.Sequential(nn.Linear(1, 1000), nn.Dropout(0.4), nn.Flatten())
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    net = tb.MCDropout(model, layers=["1"])
    assert (net.p, net.own) == (0.4, False)
    torch.manual_seed(0)
    for out in (
        net.train()(torch.zeros(20, 1)),
        outputs_of(net, model.eval(), torch.zeros(1, 1), 20),
    ):
        assert abs((out == 0).float().mean() - 0.4) < 4 * np.sqrt(0.4 * 0.6 / 20_000)


def test_files_keep_that_dropout_is_the_networks_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Linear(6, 2))
    net = tb.MCDropout(model)
    net.save(tmp_path / "x")
    back = tb.load(tmp_path / "x", model)
    assert isinstance(back, DropoutPosterior)
    assert (back.p, back.layers, back.own) == (None, ["1"], True)
    x = normals(5, 4)
    ours, theirs = (tb.predictive(model, q, x, 5, generator=seeded()) for q in (net, back))
    assert torch.equal(ours.probs, theirs.probs)
    other = nn.Sequential(OrderedDict([("0", nn.Linear(4, 6)), ("2", nn.Linear(6, 2))]))
    with pytest.raises(ValueError, match="has no module '1'"):
        back.check(other)


# -- Training and evaluation --------------------------------------------------------------------------


def test_evaluation_is_the_plain_network_bit_for_bit(mlp: nn.Sequential) -> None:
    x = normals(16, 3)
    net = tb.MCDropout(mlp, p=0.5).eval()
    assert not mlp.training
    before = torch.get_rng_state()
    assert torch.equal(net(x), mlp(x))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(net(x), net(x))


def test_training_keeps_the_mean_activation_and_drops_each_example_alone() -> None:
    """The share dropped and the mean of one layer's outputs, 1 each, over 200,000 activations."""
    p, model = 0.3, nn.Sequential(nn.Linear(1, 1000), nn.Identity(), nn.Linear(1000, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda _m, args, _o: seen.append(args[0].detach()))
    torch.manual_seed(0)
    tb.MCDropout(model, p).train()(torch.zeros(200, 1))
    (out,) = seen
    count = out.numel()
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - p))}
    assert abs((out == 0).double().mean() - p) < 4 * np.sqrt(p * (1 - p) / count)
    # The variance of a mask scaled by 1/(1−p) is p/(1−p).
    assert abs(out.double().mean() - 1) < 4 * np.sqrt(p / (1 - p) / count)
    assert not torch.equal(out[0], out[1])


def test_gradients_reach_every_weight(mlp: nn.Sequential) -> None:
    net = tb.MCDropout(mlp, p=0.2).train()
    F.cross_entropy(net(normals(32, 3)), torch.arange(32) % 4).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mlp[4].parameters())
    assert hooks(mlp) == 0


# -- Draws --------------------------------------------------------------------------------------------


def test_one_mask_per_draw_for_all_examples() -> None:
    model = lenet5(in_channels=1, image_size=28).eval()
    q = tb.MCDropout(model, p=0.5).posterior()
    x = normals(1, 1, 28, 28).expand(4, -1, -1, -1)
    one, two = q.sample(seeded(1)), q.sample(seeded(2))
    with torch.no_grad():
        out = q.call(model, one, x)
        torch.testing.assert_close(out, out[:1].expand(4, -1))
        assert torch.equal(out, q.call(model, one, x))  # a draw is one function
        torch.testing.assert_close(out[:1], q.call(model, one, x[:1]))  # whatever the batch
        assert not torch.allclose(out, q.call(model, two, x))
        last = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(q.call(model, one, last), out)  # and its layout in memory


def test_a_draw_for_one_example_is_distributed_as_dropout() -> None:
    """Mean and covariance of two activations over draws, against Bernoulli masks in NumPy."""
    p, count = 0.4, 3000
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [2.0]]))
        model[0].bias.zero_()
        model[1].weight.copy_(torch.eye(2))
        model[1].bias.zero_()
    q = tb.MCDropout(model, p).posterior()
    generator = seeded(3)
    with torch.no_grad():
        outs = [q.call(model, q.sample(generator), torch.ones(1, 1))[0] for _ in range(count)]
    ours = torch.stack(outs).double().numpy()
    torch.manual_seed(0)
    plain = F.dropout(torch.tensor([1.0, 2.0]).expand(count, 2), p).double().numpy()
    for values in (ours, plain):
        variance = np.array([1.0, 4.0]) * p / (1 - p)
        assert np.all(np.abs(values.mean(0) - [1, 2]) < 4 * np.sqrt(variance / count))
        dropped = (values == 0).mean(0)
        assert np.all(np.abs(dropped - p) < 4 * np.sqrt(p * (1 - p) / count))
        both = (values == 0).all(1).mean()
        assert abs(both - p**2) < 4 * np.sqrt(p**2 * (1 - p**2) / count)
    assert set(np.unique(ours)) == set(np.unique(plain))


def test_draws_follow_the_generator(mlp: nn.Sequential) -> None:
    q = tb.MCDropout(mlp).posterior()
    state = torch.get_rng_state()
    assert torch.equal(q.sample(seeded(1))["dropout.seed"], q.sample(seeded(1))["dropout.seed"])
    assert not torch.equal(q.sample(seeded(1))["dropout.seed"], q.sample(seeded(2))["dropout.seed"])
    with torch.no_grad():
        q.call(mlp.eval(), q.sample(seeded(1)), normals(2, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_mean_weights_are_used_without_dropout(mlp: nn.Sequential) -> None:
    mlp.eval()
    q = tb.MCDropout(mlp).posterior()
    x = normals(5, 3)
    assert torch.equal(q.call(mlp, q.mean(), x), mlp(x))


# -- Predictions --------------------------------------------------------------------------------------


def test_predictions_by_the_network_the_posterior_or_both(mlp: nn.Sequential) -> None:
    net = tb.MCDropout(mlp, p=0.3)
    x = normals(10, 3)
    results = [
        tb.predictive(model, posterior, x, samples=12, generator=seeded(1))
        for model in (mlp, net)
        for posterior in (net, net.posterior())
    ]
    assert isinstance(net, Posterior)
    assert all(torch.equal(r.probs, results[0].probs) for r in results)
    assert results[0].draws == 12
    assert results[0].epistemic.min() > 0
    # By hand, from the same seeds.
    generator, q = seeded(1), net.posterior()
    mlp.eval()
    with torch.no_grad():
        draws = [q.call(mlp, q.sample(generator), x).softmax(1) for _ in range(12)]
    torch.testing.assert_close(results[0].probs, torch.stack(draws).mean(0))


def test_pieces_of_a_batch_have_the_same_masks() -> None:
    model = lenet5(in_channels=1, image_size=28)
    net, x = tb.MCDropout(model, p=0.3), normals(9, 1, 28, 28)
    whole = tb.predictive(model, net, x, samples=3, generator=seeded())
    cut = tb.predictive(model, net, [x[:4], x[4:]], 3, generator=seeded(), max_memory=1)
    torch.testing.assert_close(whole.probs, cut.probs)


def test_the_posterior_is_a_copy_and_the_network_is_live(mlp: nn.Sequential) -> None:
    net = tb.MCDropout(mlp)
    q = net.posterior()
    before = q.mean()["0.weight"]
    with torch.no_grad():
        mlp[0].weight.add_(1)
    assert torch.equal(q.mean()["0.weight"], before)
    assert torch.equal(net.mean()["0.weight"], before + 1)


# -- No trace -----------------------------------------------------------------------------------------


def test_no_hooks_are_left_even_after_an_error(mlp: nn.Sequential) -> None:
    net = tb.MCDropout(mlp).train()
    net(normals(4, 3))
    tb.predictive(mlp, net, normals(4, 3), samples=2)
    assert hooks(mlp) == 0
    modes = {name: module.training for name, module in net.named_modules()}
    for call in (
        lambda: net(normals(4, 7)),
        lambda: tb.predictive(mlp, net, normals(4, 7), samples=2),
        lambda: tb.predictive(mlp, net.posterior(), normals(4, 7), samples=2),
    ):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            call()
        assert hooks(mlp) == 0
    assert modes == {name: module.training for name, module in net.named_modules()}


# -- Files --------------------------------------------------------------------------------------------


def test_files(mlp: nn.Sequential, tmp_path: Path) -> None:
    net = tb.MCDropout(mlp, p=0.3)
    path = tmp_path / "posterior.safetensors"
    net.save(path)
    back = tb.load(path, mlp)
    assert isinstance(back, DropoutPosterior)
    assert (back.p, back.layers, back.model_name) == (0.3, ["0", "4"], "Sequential")
    x = normals(5, 3)
    ours = tb.predictive(mlp, net, x, samples=5, generator=seeded())
    theirs = tb.predictive(mlp, back, x, samples=5, generator=seeded())
    assert torch.equal(ours.probs, theirs.probs)
    net.posterior().save(tmp_path / "again")
    assert path.read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize(
    "settings", [{}, {"p": 2.0, "layers": []}, {"p": "x", "layers": []}, {"p": 0.1, "layers": None}]
)
def test_files_with_wrong_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    weights = {"mean/w": torch.ones(1)}
    storage.write_tensors(tmp_path / "x", weights, kind="dropout", model_name="", settings=settings)
    with pytest.raises(tb.posterior.PosteriorFileError, match="contents do not fit"):
        tb.load(tmp_path / "x")


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.last = nn.Linear(2, 2)
            setattr(self, name, nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(x)
            return out

    tb.MCDropout(Net("one"), layers=["one"]).save(tmp_path / "x")
    with pytest.raises(tb.posterior.PosteriorFileError, match="has no module 'one'"):
        tb.load(tmp_path / "x", Net("two"))
    with pytest.raises(ValueError, match="has no module 'one'"):
        tb.predictive(Net("two"), tb.load(tmp_path / "x"), torch.zeros(1, 2))
