"""MeanField on any module: with σ → 0 it is the network bit for bit; the network stays the user's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.variational import (
    MeanField,
    flipout,
    local_reparameterisation,
    shared_draw,
)
from torchbayes.variational.estimators import Estimator

ESTIMATORS = [shared_draw, flipout, local_reparameterisation]


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = self.again = nn.Linear(6, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.again(torch.tanh(self.hidden(self.embedding(tokens)))))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True, proj_size=3)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.LayerNorm(32),
        nn.Linear(32, 4),
    )


def images() -> Tensor:
    return torch.randn(5, 3, 6, 6)


def convolution(layer: type[nn.Module], dims: int, **options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        layer(4, 6, 3, **options), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )


def of_shape(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(9, 300), nn.ReLU(), nn.Linear(300, 250)),
        of_shape(8, 9),
    ),
    "tied": (Tied, lambda: torch.randint(7, (5, 3))),
    "lstm": (Lstm, of_shape(5, 7, 5)),
    "gru cell": (lambda: nn.GRUCell(4, 3), of_shape(5, 4)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        of_shape(5, 4, 8),
    ),
    "norms": (norm_net, images),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        of_shape(5, 4),
    ),
}
for mode in ("zeros", "reflect", "replicate", "circular"):
    MODULES[f"conv1d {mode}"] = (
        convolution(nn.Conv1d, 1, groups=2, padding="same", dilation=2, padding_mode=mode),
        of_shape(5, 4, 9),
    )
    MODULES[f"conv2d {mode}"] = (
        convolution(nn.Conv2d, 2, groups=2, padding=2, stride=2, dilation=2, padding_mode=mode),
        of_shape(5, 4, 9, 9),
    )
    MODULES[f"conv3d {mode}"] = (
        convolution(nn.Conv3d, 3, padding=1, padding_mode=mode),
        of_shape(5, 4, 4, 4, 4),
    )
for dims, layer in enumerate((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1):
    MODULES[f"transposed {dims}d"] = (
        convolution(layer, dims, groups=2, stride=2, output_padding=1, dilation=2),
        of_shape(5, 4, *[4] * dims),
    )


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = MODULES[name][0](), MODULES[name][1]()
    with torch.no_grad():
        model(x)  # lazy layers get their shapes
    return model, x


def to_zero(net: MeanField) -> MeanField:
    with torch.no_grad():
        for rho in net.rho.parameters():
            rho.fill_(-1e6)
    return net


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("grad", [True, False])
def test_without_spread_it_is_the_network(
    name: str, estimator: Estimator, grad: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model, x = make(name)
    original = copy.deepcopy(model)
    net = to_zero(MeanField(model, estimator=estimator))
    with torch.set_grad_enabled(grad):
        for _ in range(2):  # twice, because batch norm moves
            assert torch.equal(net(x), original(x))
        net.eval()
        original.eval()
        assert torch.equal(net(x), original(x))
        with net.draw_mode():
            assert torch.equal(net(x), original(x))
    for key, value in original.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    recwarn.clear()  # an LSTM alone gives flipout nothing to do, which it says


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_without_spread_are_the_networks(name: str, estimator: Estimator) -> None:
    model, x = make(name)
    model, x = model.double(), x.double() if x.is_floating_point() else x
    original = copy.deepcopy(model)
    net = to_zero(MeanField(model, estimator=estimator))
    net._noticed = True
    net(x).square().mean().backward()
    original(x).square().mean().backward()
    grads = dict(original.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[key].grad, msg=key)


def test_channels_last_weights() -> None:
    model, x = make("norms")
    model = model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    net = to_zero(MeanField(copy.deepcopy(model)))
    assert torch.equal(net(x), model(x))
    net(x).sum().backward()
    assert all(p.grad.stride() == p.stride() for p in net.parameters() if p.grad is not None)


def test_norm_layers_and_frozen_weights_have_no_distribution() -> None:
    model, x = make("norms")
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.clone()
    net = MeanField(model, init_std=0.5)
    random = {"0.weight", "3.weight", "3.bias", "7.weight", "7.bias"}
    assert net.std().keys() == random
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (net(x).square().mean() + net.kl() / 100).backward()
        optimizer.step()
    assert torch.equal(model[0].bias, frozen)
    assert model[1].weight.grad.abs().sum() > 0  # deterministic, but trained
    q = net.posterior()
    assert torch.equal(q.mean()["1.running_mean"], model[1].running_mean)
    assert q.std().keys() == random
    draw = q.sample()
    assert torch.equal(draw["1.weight"], model[1].weight)
    assert not torch.equal(draw["0.weight"], model[0].weight)


def test_tied_weights_have_one_distribution() -> None:
    model, tokens = make("tied")
    net = MeanField(model, init_std=0.3)
    assert set(net.std()) == {"embedding.weight", "hidden.weight", "hidden.bias"}
    seen = {}
    for name in ("embedding", "out"):
        getattr(model, name).register_forward_pre_hook(
            lambda module, _inputs, name=name: seen.update({name: module.weight})
        )
    net(tokens)
    assert seen["embedding"] is seen["out"]
    assert not torch.equal(seen["out"], model.out.weight)


def test_a_subset_can_be_named() -> None:
    model, x = make("norms")
    assert MeanField(model, params=["7"]).std().keys() == {"7.weight", "7.bias"}
    assert MeanField(model, params="7").std().keys() == {"7.weight", "7.bias"}
    assert MeanField(model, params=["0", "3.bias"]).std().keys() == {"0.weight", "0.bias", "3.bias"}
    assert MeanField(model, params=["1.weight"]).std().keys() == {
        "1.weight"
    }  # a norm layer's, if named
    net = MeanField(model, params=["7"], init_std=0.5)
    (net(x).square().mean() + net.kl() / 10).backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(
        ValueError, match="has 'eight', but no weight or module of Sequential is called so"
    ):
        MeanField(model, params=["eight"])


def test_starts() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.bias.zero_()
    before = tb.snapshot(model)
    q = MeanField(model, init_std=0.02).posterior()
    torch.testing.assert_close(q.std()["weight"], torch.full((3, 4), 0.02))
    q = MeanField(model, moped=0.1).posterior()
    torch.testing.assert_close(q.std()["weight"], 0.1 * model.weight.detach().abs().clamp_min(1e-3))
    torch.testing.assert_close(q.std()["bias"], torch.full((3,), 1e-4))
    for name, value in q.mean().items():
        assert torch.equal(value, before[name])
    tiny = MeanField(model.double(), init_std=1e-12).posterior()
    torch.testing.assert_close(tiny.std()["weight"], torch.full((3, 4), 1e-12, dtype=torch.float64))


def test_modes() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    net, x = MeanField(model, init_std=0.5), torch.ones(2, 3)
    with net.mean_mode(), net.draw_mode():
        assert not torch.equal(net(x), net(x))
    with net.mean_mode():
        torch.manual_seed(1)
        one = net(x)
        torch.manual_seed(1)
        assert torch.equal(one, model(x))  # still training: dropout is on
    net.eval()
    assert torch.equal(net(x), model(x))
    with net.draw_mode():
        assert not torch.equal(net(x), net(x))
    assert torch.equal(net(x), model(x))
    with pytest.raises(RuntimeError), net.draw_mode():
        net(torch.ones(2, 4))
    assert torch.equal(net(x), model(x))


def test_evaluation_draws_are_one_function_of_the_input() -> None:
    net = MeanField(nn.Linear(3, 2), estimator=flipout, init_std=0.5).eval()
    with net.draw_mode():
        out = net(torch.ones(6, 3))
    assert torch.equal(out, out[:1].expand(6, 2))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_state_and_copies(estimator: Estimator) -> None:
    model, x = make("mlp")
    net = MeanField(model, estimator=estimator, generator=torch.Generator().manual_seed(3))
    loss = net(x).square().mean() + net.kl()
    twin = copy.deepcopy(net)  # also with a graph under way
    other = MeanField(
        make("mlp")[0], estimator=estimator, init_std=0.5, generator=torch.Generator()
    )
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    whole = io.BytesIO()
    torch.save(net, whole)
    whole.seek(0)
    pickled = torch.load(whole, weights_only=False)
    loss.backward()
    expected = net(x)
    for copied in (twin, other, pickled):
        assert torch.equal(copied(x), expected)
    assert {k for k in net.state_dict() if k.startswith("model.")} == {
        f"model.{k}" for k in model.state_dict()
    }
    assert {k for k in net.state_dict() if k.startswith("rho.")} == {f"rho.{k}" for k in net.std()}


def test_the_network_stays_usable() -> None:
    model, x = make("mlp")
    keys, kind, plain = list(model.state_dict()), type(model), model(x)
    net = MeanField(model, init_std=0.5)
    net(x)
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    assert torch.equal(model(x), plain)
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 1))
    assert torch.equal(model(x), plain)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_predictions_from_its_posterior() -> None:
    model, x = make("norms")
    net = MeanField(model)
    q = net.posterior()
    assert isinstance(q, tb.Gaussian)
    assert q.model_name == "Sequential"
    p = tb.predictive(net, q, x, samples=3, recalibrate=False)
    assert p.probs.shape == (5, 4)


def test_weights_that_share_a_gradient_do_not_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.ones(70_000)), nn.Parameter(torch.ones(70_000))

        def forward(self, x: Tensor) -> Tensor:
            return (self.one + self.two) @ x

    net = MeanField(Sum())
    net(torch.ones(70_000)).backward()
    assert net.model.one.grad.data_ptr() != net.model.two.grad.data_ptr()


def test_unused_and_partly_frozen_weights() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)
    net = MeanField(model)
    net(torch.ones(1, 3)).sum().backward()
    assert net.model["unused"].weight.grad is None
    (net(torch.ones(1, 3)).sum() + net.kl()).backward()
    torch.testing.assert_close(model["unused"].weight.grad, model["unused"].weight.detach())
    model["used"].weight.requires_grad_(False)  # a mean that is held, with a spread that is not
    net.zero_grad()
    (net(torch.ones(1, 3)).sum() + net.kl()).backward()
    assert model["used"].weight.grad is None
    assert net.rho.get_submodule("used").weight.grad is not None


def test_buffers_are_used_again() -> None:
    torch.manual_seed(0)
    net = MeanField(nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)))
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    kept = net._scratch.space._taken
    sizes = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 300)).square().mean() + net.kl() / 100
        loss.backward()
        optimizer.step()
        sizes.append(sum(len(tensors) for tensors in kept.values()))
    assert sizes[1] == sizes[2] == sizes[3]
    outputs = [net(torch.ones(2, 300)) for _ in range(3)]  # graphs in use: none may be overwritten
    assert len({out.sum().item() for out in outputs}) == 3
    for out in outputs:
        out.sum().backward()


def test_no_gradients_and_inference_mode() -> None:
    net = MeanField(nn.Linear(300, 300), init_std=0.5)
    with torch.inference_mode():
        kept = net(torch.ones(1, 300))
    with torch.no_grad():
        weight = MeanField(Exposed(), init_std=0.5)
        first = weight(torch.ones(1))
        copied = first.clone()
        weight(torch.ones(1))
        assert torch.equal(first, copied)  # an output that is the weight itself is not overwritten
    (net(torch.ones(1, 300)).sum() + net.kl()).backward()
    assert kept.shape == (1, 300)


class Exposed(nn.Module):
    """Returns its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(70_000))

    def forward(self, _x: Tensor) -> Tensor:
        return self.weight


def test_draws_have_the_posteriors_moments() -> None:
    net = MeanField(Exposed(), init_std=0.5, generator=torch.Generator().manual_seed(0))
    draw = net(torch.ones(1))
    assert abs(draw.mean()) < 4 * 0.5 / 70_000**0.5
    assert abs(draw.std() - 0.5) < 4 * 0.5 / (2 * 70_000) ** 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_std": 0.0}, "init_std is 0: expected a standard deviation above 0"),
        ({"init_std": float("nan")}, "init_std is nan"),
        ({"moped": 0.0}, "moped is 0: expected a share"),
        (
            {"prior": tb.GaussianPrior(mean={"other": torch.zeros(1)})},
            "the prior has no mean for weight 'weight'",
        ),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeanField(nn.Linear(2, 2), **arguments)


def test_bad_models_priors_and_estimators() -> None:
    with pytest.raises(ValueError, match="no trainable weights"):
        MeanField(nn.ReLU())
    with pytest.raises(ValueError, match="no trainable weights"):
        MeanField(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="besides norm layers"):
        MeanField(nn.LayerNorm(3))
    with pytest.raises(ValueError, match="has no shape yet: run a batch"):
        MeanField(nn.LazyLinear(3))
    with pytest.raises(TypeError, match="expected shared_draw"):
        MeanField(nn.Linear(2, 2), estimator="flipout")
    with pytest.raises(TypeError, match="prior is 'gaussian': expected a prior"):
        MeanField(nn.Linear(2, 2), prior="gaussian")
    with pytest.raises(ValueError, match="prior is 0: without a prior the spread"):
        MeanField(nn.Linear(2, 2), prior=0.0)
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="std1 is"):
            tb.ScaleMixturePrior(std1=bad)


def test_trains_with_a_torch_optimiser() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = (x[:, 0] > 0).long()
    net = MeanField(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)), estimator=flipout)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        (F.cross_entropy(net(x), y) + net.kl() / 200).backward()
        optimizer.step()
    assert (net.eval()(x).argmax(1) == y).float().mean() > 0.95
