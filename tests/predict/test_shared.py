"""Work that no draw changes is done once, whatever the network is, and the answers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import torchbayes as tb
from tests.predict.test_threads import numbers
from torchbayes.posterior import Posterior
from torchbayes.posterior.partial import digest_of_rest
from torchbayes.predict import passes

CALLS: Counter[str] = Counter()


class Body(nn.Linear):
    """A layer that counts the examples that pass through it."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS["body"] += len(x)
        return super().forward(x)


def body() -> Body:
    return Body(4, 4)


class InPlace(nn.Module):
    """ReLU in place after the body, and a residual sum in place before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.relu, self.more = body(), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.relu(self.norm(self.body(x)))
        hidden += self.more(hidden)
        return self.head(hidden)


class WritesToShared(InPlace):
    """A draw's own work is added in place to what all draws share."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        hidden += self.head(hidden).sum(1, keepdim=True)
        return self.head(hidden)


class ReadsBefore(InPlace):
    """The draw's own work reads a tensor before it is written to."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        first = self.head(hidden)
        hidden.relu_()
        return first + self.head(hidden)


class Functional(InPlace):
    """Parameters that no module has the use of, views, concatenation, and constants that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Any:
        places = torch.arange(len(x), device=x.device).unsqueeze(1) * 0.1
        x = (x - self.shift) * self.scale + places
        left, right = self.body(x).view(len(x), 2, 2).unbind(1)
        hidden = torch.cat([right, left], dim=1)[:, [1, 0, 3, 2]]
        return self.head(F.gelu(hidden))


class Noisy(InPlace):
    """Random numbers of its own, even in evaluation mode."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x) + torch.randn_like(x))


class OwnNoise(InPlace):
    """The same in a module in which nothing varies, from a generator of its own."""

    class Jitter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape, generator=self.generator)

    def __init__(self) -> None:
        super().__init__()
        self.jitter = self.Jitter()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.jitter(self.body(x)))


class Branches(InPlace):
    """The way through the network depends on the draw."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        logits = self.head(hidden)
        if float(logits.sum()) > 0:
            logits = logits + self.head(self.more(hidden))
        return logits


class Attends(InPlace):
    """A transformer's layer that does not vary, called with a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        tokens = self.body(x).unsqueeze(1).repeat(1, 3, 1)
        mask = torch.zeros(3, 3, dtype=torch.bool)
        return self.head(self.layer(tokens, src_mask=mask).mean(1))


class Returns(InPlace):
    """The body is a module that returns a dictionary with a pair in it."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body()

        def forward(self, x: Tensor, *, scale: float) -> Any:
            return {"pair": (self.body(x) * scale, x), "count": len(x)}

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()
        self.inner.body = self.body

    def forward(self, x: Tensor) -> Any:
        found = self.inner(x, scale=2.0)
        hidden, again = found["pair"]
        return self.head(hidden + again)


@pytest.fixture(params=[True, False], ids=["together", "loop"], autouse=True)
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(passes, "_TOGETHER", -1)
        monkeypatch.setattr(passes, "_VMAP_BYTES", 0)
    return bool(request.param)


class Opaque(Returns):
    """The body returns an object of which nothing is known."""

    class Inner(Returns.Inner):
        def forward(self, x: Tensor, *, scale: float) -> Any:
            return {"pair": super().forward(x, scale=scale)["pair"], "about": object()}


SHARED = [InPlace, Functional, Branches, Attends, Returns, Opaque]
ALONE = [WritesToShared, ReadsBefore]


def head_only(model: nn.Module) -> Posterior:
    """A Gaussian that holds the last layer alone."""
    mean = {n: p for n, p in tb.snapshot(model).items() if n.startswith("head")}
    std = {n: torch.full_like(p, 0.8) for n, p in mean.items()}
    return tb.Gaussian(mean, std, rest=digest_of_rest(model, mean))


def head_of_all(model: nn.Module) -> Posterior:
    """A Gaussian that holds every weight, of which the last layer varies."""
    mean = tb.snapshot(model)
    std = {n: torch.full_like(p, 0.8) for n, p in mean.items() if n.startswith("head")}
    return tb.Gaussian(mean, std)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    CALLS.clear()
    return model.train()


def by_hand(model: nn.Module, posterior: Posterior, x: Tensor) -> Tensor:
    twin = type(model)()
    twin.load_state_dict(model.state_dict())
    draws = posterior.draws(6, torch.Generator().manual_seed(2))
    with torch.no_grad():
        each = [functional_call(twin.eval(), draw, (x,)).softmax(1) for draw in draws]
    return torch.stack(each).mean(0)


def inputs(count: int = 20) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def predict(model: nn.Module, q: Posterior, x: Any, serve: bool) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if serve:
        predictor = tb.Predictor(model, q, 6, generator=generator)
        predictor(x)
        CALLS.clear()
        p = predictor(x)
    else:
        p = tb.predictive(model, q, x, 6, generator=generator)
    assert isinstance(p, tb.ClassPredictive)
    return p.probs


@pytest.mark.parametrize("serve", [False, True])
@pytest.mark.parametrize("make", [head_only, head_of_all], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", [*SHARED, *ALONE], ids=lambda kind: kind.__name__)
def test_the_answers_are_those_of_every_draw_by_itself(
    kind: type[nn.Module], make: Callable[[nn.Module], Posterior], serve: bool, together: bool
) -> None:
    model, x = made(kind), inputs()
    posterior = make(model)
    found = predict(model, posterior, x, serve)
    seen = CALLS["body"]
    torch.testing.assert_close(found, by_hand(model, posterior, x))
    if kind in SHARED:
        # Once for all draws, and a few examples to measure and to compare.
        assert seen <= 20 + (0 if serve else 3 + 4 * 2)
    elif not together:
        assert seen >= 6 * 20


@pytest.mark.parametrize("kind", SHARED, ids=lambda kind: kind.__name__)
def test_batches_and_pieces(kind: type[nn.Module]) -> None:
    model, x = made(kind), inputs(60)
    posterior = head_only(model)
    loader = [x[:20], x[20:40], x[40:]]
    found = predict(model, posterior, loader, False)
    assert CALLS["body"] <= 60 + 3 + 8
    expected = [by_hand(model, posterior, part) for part in loader]
    torch.testing.assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("kind", [Noisy, OwnNoise])
def test_random_numbers_of_the_network_are_drawn_anew(kind: type[nn.Module]) -> None:
    model = made(kind)
    model.get_submodule("head").requires_grad_(True)
    posterior = head_only(model)
    torch.manual_seed(0)
    p = tb.predictive(model, posterior, inputs().zero_(), 64)
    one = tb.predictive(model, tb.Samples.of([model]), inputs().zero_(), 64)
    assert p.draws == 64  # type: ignore[attr-defined]
    # With the same noise in every draw, rows of equal inputs would differ by more than draws explain.
    spread = float(p.probs.std(0).mean())  # type: ignore[attr-defined]
    assert spread < 0.5 * float(one.probs.std(0).mean())  # type: ignore[attr-defined]


def test_a_frozen_buffer_of_the_body_and_statistics_of_each_draw() -> None:
    """Statistics before the head are the same for all draws, and may still be asked for."""
    model, x = made(InPlace), inputs(40)
    posterior = head_only(model)
    p = tb.predictive(
        model, posterior, x, 4, generator=torch.Generator().manual_seed(2), recalibrate=[x]
    )
    new = tb.recalibrate_batchnorm(model, tb.snapshot(model), [x])
    model.load_state_dict(new)
    q = tb.predictive(model, head_only(model), x, 4, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(numbers(p), numbers(q))


def test_in_inference_mode() -> None:
    model, x = made(InPlace), inputs()
    posterior = head_only(model)
    serve = tb.Predictor(model, posterior, 6, generator=torch.Generator().manual_seed(2))
    expected = by_hand(model, posterior, x)
    with torch.inference_mode():
        serve(x + 0)
        CALLS.clear()
        inside = serve(x + 0)
    assert CALLS["body"] == 20
    assert isinstance(inside, tb.ClassPredictive)
    torch.testing.assert_close(inside.probs.clone(), expected)


def test_what_is_kept_for_all_draws_fits_into_memory() -> None:
    sizes: list[int] = []
    model = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 3))
    model[1].register_forward_hook(lambda _m, _i, outputs: sizes.append(len(outputs)))
    mean = tb.snapshot(model)
    q = tb.Gaussian(mean, {"3.weight": torch.ones(3, 512)})
    x = inputs(400)
    p = tb.predictive(model, q, x, 4, generator=torch.Generator().manual_seed(0))
    sizes.clear()
    small = tb.predictive(
        model, q, x, 4, generator=torch.Generator().manual_seed(0), max_memory=1 << 20
    )
    # Three tensors of 512 numbers for every example, for which a quarter is set aside.
    assert max(sizes) * 3 * 512 * 4 <= 1 << 18
    torch.testing.assert_close(numbers(small), numbers(p))


@pytest.mark.parametrize("own", [False, True], ids=["added", "own"])
@pytest.mark.parametrize("serve", [False, True])
def test_masks_of_dropout_share_what_comes_before_the_first(own: bool, serve: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(body(), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3))
    wrapper = tb.MCDropout(model) if own else tb.MCDropout(model, p=0.5, layers=["1"])
    q, x = wrapper.posterior(), inputs()
    draws = list(q.draws(6, torch.Generator().manual_seed(2)))
    with torch.no_grad():
        expected = torch.stack([q.call(model.eval(), draw, x).softmax(1) for draw in draws])
    CALLS.clear()
    found = predict(model, q, x, serve)
    torch.testing.assert_close(found, expected.mean(0))
    assert CALLS["body"] <= 20 + (0 if serve else 3 + 4 * 2)
    assert float((expected - expected.mean(0)).abs().max()) > 0.01  # the draws do differ


# Networks as they are found elsewhere. Every one counts the examples that pass through its body.


class Residual(nn.Module):
    """Residual blocks with batch norm, of which the last one's second branch and the head vary."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.more = body(), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.late_head, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.norm(self.body(x)))
        x = x + self.more(F.relu(x)) + self.late_head(x)
        return self.head(x)


class Tokens(nn.Module):
    """As in Hugging Face's: arguments by name, an embedding, a mask, and an object of its own back."""

    class Output(dict[str, Any]):
        @property
        def last_hidden_state(self) -> Tensor:
            return self["last_hidden_state"]

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body = nn.Embedding(7, 4), body()
            self.register_buffer("position_ids", torch.arange(5), persistent=False)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            places = self.position_ids[: input_ids.shape[1]]
            hidden = self.body(self.words(input_ids) + 0.1 * places[None, :, None])
            away = None if attention_mask is None else attention_mask == 0
            mixed, _ = self.attention(hidden, hidden, hidden, key_padding_mask=away)
            return Tokens.Output(last_hidden_state=hidden + mixed)

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = self.Encoder(), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return Tokens.Output(logits=self.head(found.last_hidden_state[:, 0]))


class Adapted(nn.Module):
    """LoRA: beside a frozen layer a product of two small ones, the second of which starts at nought."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.head_a, self.head_b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.head_b(self.head_a(x))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.adapted = nn.Linear(4, 4), self.Adapter(body())
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.adapted(torch.tanh(self.first(x)))))


class Recurrent(nn.Module):
    """A frozen LSTM between the body and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lstm = body(), nn.LSTM(4, 4, batch_first=True)
        self.head = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.body(x).unsqueeze(1).expand(-1, 3, -1))
        out, _ = self.head(hidden)
        return out[:, -1]  # type: ignore[no-any-return]


def varying(model: nn.Module) -> Posterior:
    """A Gaussian that holds what has "head" in its name."""
    mean = {n: p for n, p in tb.snapshot(model).items() if "head" in n}
    std = {n: torch.full_like(p, 0.8) for n, p in mean.items()}
    return tb.Gaussian(mean, std, rest=digest_of_rest(model, mean))


@pytest.mark.parametrize("serve", [False, True])
@pytest.mark.parametrize("kind", [Residual, Adapted, Recurrent, Tokens], ids=lambda k: k.__name__)
def test_networks_as_they_are_found_elsewhere(kind: type[nn.Module], serve: bool) -> None:
    model = made(kind)
    x: Any = inputs()
    if kind is Tokens:
        ids = torch.randint(7, (20, 5), generator=torch.Generator().manual_seed(1))
        x = {
            "input_ids": ids,
            "attention_mask": (ids > 1).long().index_fill_(1, torch.tensor([0]), 1),
        }
    posterior = varying(model)
    found = predict(model, posterior, x, serve)
    seen = CALLS["body"]
    twin = type(model)()
    twin.load_state_dict(model.state_dict())
    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
    each = []
    for draw in posterior.draws(6, torch.Generator().manual_seed(2)):
        with torch.no_grad():
            out = functional_call(twin.eval(), draw, args, kwargs)
        each.append((out["logits"] if isinstance(out, dict) else out).softmax(1))
    torch.testing.assert_close(found, torch.stack(each).mean(0))
    assert float((torch.stack(each) - each[0]).abs().max()) > 0.01
    assert seen <= 20 + (0 if serve else 3 + 4 * 2)


@pytest.mark.parametrize("serve", [False, True])
def test_what_comes_before_a_batch_norm_with_statistics_of_each_draw_is_shared(
    serve: bool,
) -> None:
    """Statistics that depend on the draw vary as weights do."""

    class Late(InPlace):
        def forward(self, x: Tensor) -> Any:
            return self.more(self.norm(self.head(self.body(x)).repeat(1, 2)[:, :4]))

    model, x = made(Late), inputs()
    posterior = head_only(model)
    given = {"generator": torch.Generator().manual_seed(2), "recalibrate": [x]}
    if serve:
        predictor = tb.Predictor(model, posterior, 6, **given)  # type: ignore[arg-type]
        predictor(x)
        CALLS.clear()
        found = numbers(predictor(x))
        assert CALLS["body"] <= 20
    else:
        found = numbers(tb.predictive(model, posterior, x, 6, **given))  # type: ignore[arg-type]
    each = []
    whole = tb.snapshot(model)
    for draw in posterior.draws(6, torch.Generator().manual_seed(2)):
        new = tb.recalibrate_batchnorm(model, whole | draw, [x])
        twin = Late()
        twin.load_state_dict(new)
        with torch.no_grad():
            each.append(twin.eval()(x).softmax(1))
    torch.testing.assert_close(found[:, :4], torch.stack(each).mean(0))
