"""Memory formats, bfloat16 and torch.compile under every method: the same training, only faster."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.cli import main
from torchbayes.core.reading import read_toml
from torchbayes.experiments.trained_run import TrainedRun
from torchbayes.train import fit as fit_module
from torchbayes.train import throughput
from torchbayes.train.run_folder import RunFolder
from torchbayes.train.throughput import arranged, choose_format

from ..stopping import StopAfter, Stopped

# torch's compiler looks at the gradients of tensors that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 2, 8, 8, generator=GENERATOR)
Y = torch.randint(3, (48,), generator=GENERATOR)


class Net(nn.Module):
    """A network whose strides a test can look at."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(64, 3)
        self.seen: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.one(x)).relu()
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.seen.add(h.stride())
        return self.head(self.two(h).relu().flatten(1))  # type: ignore[no-any-return]


class Viewing(Net):
    """A network that cannot take any other format."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), -1).view(x.shape))


def network(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def trained(method: str, model: nn.Module | None = None, **how: Any) -> tb.Run:
    model = network() if model is None else model
    return tb.fit(model, (X, Y), method, epochs=2, batch_size=24, progress=False, **how)


def distance(one: tb.Run, other: tb.Run) -> float:
    """The largest difference of the posteriors' means, relative to the largest weight of its tensor."""
    a, b = one.posterior.mean(), other.posterior.mean()
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp_min(1e-6)) for n in a)


@pytest.mark.parametrize("method", tb.METHODS)
def test_every_method_in_every_way(method: str) -> None:
    sampler = tb.METHODS[method].posterior_kind == "Samples" and method != "ensemble"
    alone = {"chains": 1} if sampler else {}
    plain = trained(method, **alone)
    last = trained(method, memory_format="channels_last", **alone)
    fast = trained(method, memory_format="channels_last", amp="bfloat16", **alone)
    compiled = trained(method, compile="eager", **alone)
    assert isinstance(last.model, Net)
    assert isinstance(plain.model, Net)
    assert all(stride[1] == 1 for stride in last.model.seen)
    assert not any(stride[1] == 1 for stride in plain.model.seen)
    if method == "dropout":  # torch draws masks in the order of memory
        assert last.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], abs=0.2)
    else:
        assert distance(plain, last) < (1e-2 if method in ("psgld", "mle") else 1e-4)
        near = (
            0.2 if method == "psgld" else 0.05
        )  # it divides by the root mean square of a gradient
        assert fast.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=near)
    assert distance(plain, compiled) < 1e-4
    for run in (last, fast, compiled):
        assert type(run.model) is Net  # the same names, and nothing compiled about it
        assert run.model._compiled_call_impl is None
        assert all(weight.is_contiguous() for weight in run.posterior.mean().values())


def resumes_bit_equal(
    method: str, folder: Path, make: Callable[[], nn.Module] = network, **how: Any
) -> tb.Run:
    """Stop a run after three of four updates and go on; return one that was never stopped."""
    whole = trained(method, make(), **how)
    kept: dict[str, Any] = {"folder": folder, "checkpoint_seconds": 0.0}
    with pytest.raises(Stopped):
        tb.fit(
            make(), (X, Y), method, epochs=2, batch_size=24, progress=StopAfter(3), **kept, **how
        )
    resumed = trained(method, make(), **kept, **how, resume=True)
    one, other = whole.posterior.mean(), resumed.posterior.mean()
    assert all(torch.equal(one[name], other[name]) for name in one)
    return whole


@pytest.mark.parametrize("method", ["map", "ivon", "vogn", "sgld"])
@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_resumed_in_half_precision(method: str, amp: str, tmp_path: Path) -> None:
    resumes_bit_equal(method, tmp_path, amp=amp)


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="there is no C++ compiler"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_compiled_by_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's usual back end: the same training, and bit-equal if it is resumed."""
    from torch._inductor import config

    monkeypatch.setattr(config, "compile_threads", 1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))

    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(128, 4), nn.Tanh(), nn.Linear(4, 3))

    for method in ("map", "ivon"):
        run = resumes_bit_equal(method, tmp_path / method, small, compile=True)
        assert distance(trained(method, small()), run) < 1e-4


def test_chains_side_by_side() -> None:
    """They are run by vmap, in torch's own format and as they are written."""
    plain = trained("sgld", chains=2, side_by_side=True)
    ways: list[dict[str, Any]] = [{"memory_format": "channels_last"}, {"compile": "eager"}]
    for how in ways:
        assert distance(plain, trained("sgld", chains=2, side_by_side=True, **how)) < 1e-5


def test_one_channel_is_arranged_too() -> None:
    """By strides that say so: torch takes an image with one channel for either format."""
    x = torch.arange(24.0).view(2, 1, 3, 4)
    last = arranged({"x": x, "n": torch.arange(2)}, "channels_last")
    assert last["x"].stride() == (12, 1, 4, 1)
    assert torch.equal(last["x"], x)
    assert arranged(last["x"], "channels_last") is last["x"]
    assert arranged(x, None) is x
    assert arranged(x.permute(0, 1, 3, 2), "contiguous").stride() == (12, 12, 3, 1)


@pytest.mark.parametrize("faster", ["channels_last", "contiguous"])
def test_auto_takes_the_faster(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]  # one that only the loss moves, so that the machine's work has no say
    monkeypatch.setattr(throughput, "_now", lambda device: clock[0])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        is_last = x.stride(1) == 1
        clock[0] += 0.02 if is_last == (faster == "contiguous") else 0.01
        return model(x).sum()  # type: ignore[no-any-return]

    net = network()
    before = [p.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    assert choose_format(net, loss, X) == faster
    assert all(map(torch.equal, before, net.parameters()))
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_auto_without_images_times_nothing() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        raise AssertionError

    assert choose_format(nn.Linear(2, 2), loss, torch.ones(3, 2)) == "contiguous"


def test_networks_that_need_one_format() -> None:
    run = trained("map", network(Viewing), memory_format="auto")
    assert run.settings["chosen_format"] == "contiguous"
    with pytest.raises(
        ValueError, match="Viewing cannot compute with memory_format='channels_last'"
    ):
        trained("map", network(Viewing), memory_format="channels_last")
    with pytest.raises(ValueError, match="memory_format is 'nhwc': expected auto"):
        trained("map", memory_format="nhwc")
    with pytest.raises(ValueError, match="compile is 'fast', but torch"):
        trained("map", compile="fast")


@pytest.mark.parametrize("chosen", ["channels_last", "contiguous"])
def test_resumed_in_the_chosen_format(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What auto chose is kept: a resumed run does not choose again and is bit-equal."""
    monkeypatch.setattr(fit_module, "choose_format", lambda *_: chosen)
    whole = trained("ivon", memory_format="auto")

    batches = 0
    real = nn.Module.__call__

    def stopping(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal batches
        if isinstance(module, Net) and module.training and torch.is_grad_enabled():
            batches += 1
            if batches > 2:
                raise KeyboardInterrupt
        return real(module, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "__call__", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained("ivon", memory_format="auto", folder=tmp_path, checkpoint_seconds=0)
    state = RunFolder(tmp_path).checkpoint.read()
    assert state is not None
    assert state["memory_format"] == chosen
    assert RunFolder(tmp_path).read_config()["chosen_format"] == chosen

    def refuse(*_: object) -> str:
        raise AssertionError("chosen again")

    monkeypatch.setattr(fit_module, "choose_format", refuse)
    resumed = trained("ivon", memory_format="auto", folder=tmp_path, resume=True)
    a, b = whole.posterior.mean(), resumed.posterior.mean()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", ["vogn", "ivon", "swag", "bbb", "noisy-kfac", "sgld"])
def test_draws_do_not_depend_on_the_format_of_weights(method: str, tmp_path: Path) -> None:
    """A network that the user has put into channels_last has the same draws before and after a file."""
    run = trained(method, network().to(memory_format=torch.channels_last))
    run.posterior.save(tmp_path / "q.safetensors")
    again = tb.load(tmp_path / "q.safetensors")
    one, two = (q.sample(torch.Generator().manual_seed(1)) for q in (run.posterior, again))
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name


@pytest.mark.parametrize(
    "estimator", [tb.shared_draw, tb.local_reparameterisation, tb.flipout], ids=lambda e: e.__name__
)
def test_a_compiled_mean_field(estimator: Any) -> None:
    """It runs as it is written, and what is around it is compiled."""
    losses = []
    for compiles in (False, True):
        net = tb.MeanField(
            network(), estimator=estimator, generator=torch.Generator().manual_seed(0)
        )

        def step(x: Tensor, y: Tensor, net: tb.MeanField = net) -> Tensor:
            return F.cross_entropy(net(x) * 2.0, y) + net.kl() / 48

        torch._dynamo.reset()
        run = torch.compile(step, backend="aot_eager") if compiles else step
        for _ in range(2):
            loss = run(X, Y)
            loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("name", ["VOGN", "IVON", "SGLD", "NoisyKFAC"])
def test_compiled_before_or_after(name: str) -> None:
    """An optimiser made before or after torch.compile trains the same, and compiles at most twice."""
    ends = []
    for order in ("eager", "before", "after"):
        torch._dynamo.reset()
        graphs: list[int] = []

        def backend(module: torch.fx.GraphModule, _inputs: Any, graphs: list[int] = graphs) -> Any:
            graphs.append(1)
            return module.forward

        net = network()
        called = torch.compile(net, backend=backend) if order != "eager" else net
        optimizer = getattr(tb, name)(
            called if order == "before" else net, train_size=48,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

        def closure(optimizer: Any = optimizer, called: Any = called) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(called(X), Y)
            loss.backward()
            return loss

        called(X)  # a trace without anybody who watches
        for _ in range(5):
            end = optimizer.step(closure)
        ends.append(float(end.detach()))
        assert len(graphs) <= 2
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)
    assert ends[2] == pytest.approx(ends[0], rel=1e-5)


@pytest.mark.parametrize(
    ("channels", "stride", "safe"), [(4, 2, False), (8, 2, True), (4, 1, True)]
)
def test_no_format_in_which_a_gradient_is_written_past_its_memory(
    channels: int, stride: int, safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN issue 6035, which on AVX2 ends the process or spoils the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, channels, 3), nn.ReLU(), nn.Conv2d(channels, 4, 1, stride=stride),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    given = {name: weight.clone() for name, weight in net.state_dict().items()}
    monkeypatch.setattr(throughput, "_timed", lambda *_: "channels_last")
    run = trained("map", net, memory_format="auto")
    assert run.settings["chosen_format"] == ("channels_last" if safe else "contiguous")
    torch.testing.assert_close(dict(net.state_dict()), given)
    if safe:
        trained("map", net, memory_format="channels_last")
    else:
        with pytest.raises(
            ValueError, match="a 1×1 convolution with a stride and 4 input channels"
        ):
            trained("map", net, memory_format="channels_last")


@pytest.mark.parametrize("supported", [True, False])
def test_a_type_that_the_processor_emulates_is_said(
    supported: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answer() -> bool:
        return supported

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", answer)
    trained("map", amp="bfloat16")
    assert ("bfloat16 is emulated on this processor" in caplog.text) is not supported
    caplog.clear()
    trained("map")
    assert "emulated" not in caplog.text


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    arguments = [
        "train", "--model", "resnetpp8", "--model-set", "width=8", "--epochs", "1",
        "--setting", "examples=64", "--samples", "2",
        "--setting", "memory_format=channels_last", "--setting", "compile=eager", "--out", str(run),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["torchbayes", *arguments])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())  # type: ignore[func-returns-value]
    assert not ended.value.code
    config = read_toml(run / "config.toml")
    assert config["memory_format"] == "channels_last"
    assert config["compile"] == "eager"
    shown: list[tuple[int, ...]] = []
    done = TrainedRun(run)
    first = next(m for m in done.model.modules() if m is not done.model and hasattr(m, "direction"))
    watching = first.register_forward_pre_hook(lambda _, args: shown.append(args[0].stride()))
    done.predict(torch.zeros(3, 1, 8, 8))
    watching.remove()
    assert shown
    assert all(strides[1] == 1 for strides in shown)  # predictions have the training's format
