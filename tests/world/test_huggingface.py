"""Hugging Face's and timm's networks, with random weights: outputs, batches and predictions as they are."""

from __future__ import annotations

import importlib.util
import re
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchbayes as tb

from ..stopping import StopAfter, Stopped
from .torchvision_stub import import_timm

transformers = pytest.importorskip("transformers")

CLASSES, WORDS = 3, 30


def sentences(count: int = 48) -> list[dict[str, Any]]:
    """Sequences of different lengths, whose even words give the class away."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        length = int(torch.randint(4, 10, (), generator=generator))
        words = torch.randint(8, WORDS, (length,), generator=generator)
        words[::2] = 4 + index % CLASSES
        rows.append({"input_ids": words.tolist(), "label": index % CLASSES})
    return rows


ROWS = sentences()


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, WORDS)}
    whole = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="[PAD]", unk_token="[UNK]"
    )


def loader(batch_size: int = 16, *, shuffle: bool = True) -> DataLoader[Any]:
    """What a Trainer's user has: rows of a data set and a collator that pads them."""
    collate = transformers.DataCollatorWithPadding(tokenizer())
    return DataLoader(ROWS, batch_size, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def batch() -> Any:
    return next(iter(loader(6, shuffle=False)))


class Logits(nn.Module):
    """The wrapper that people had to write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        assert "labels" not in inputs
        logits: Tensor = self.model(**inputs).logits
        return logits


@pytest.mark.parametrize("method", list(tb.METHODS))
def test_every_method_takes_a_hugging_face_model(method: str, tmp_path: Path) -> None:
    options = {"members": 2} if method == "ensemble" else {}
    data = loader()
    run = tb.fit(
        bert, data, method, epochs=2, validation=data, folder=tmp_path, progress=False, **options
    )
    assert 0 < run.history[-1]["validation_nll"] < 5
    inputs = batch()
    p = run.predict(inputs, samples=3, generator=torch.Generator().manual_seed(0))
    again = tb.predictive(
        bert(), tb.load(tmp_path / "posterior.safetensors"), inputs, samples=3,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert p.probs.shape == (6, CLASSES)
    torch.testing.assert_close(p.probs, again.probs)
    assert run.predict(loader(shuffle=False), samples=2).probs.shape == (len(ROWS), CLASSES)


@pytest.mark.parametrize("method", ["map", "vogn", "bbb"])
def test_it_is_the_training_of_the_logits_alone(method: str) -> None:
    """Bit for bit that of a wrapper which never sees the labels."""
    run = tb.fit(bert, loader(), method, epochs=2, progress=False)
    wrapped = tb.fit(lambda: Logits(bert()), loader(), method, epochs=2, progress=False)
    mean = wrapped.posterior.mean()
    for name, tensor in run.posterior.mean().items():
        assert torch.equal(tensor, mean[f"model.{name}"])


def test_predictions_average_the_softmax_of_the_logits() -> None:
    """Against a loop over the draws with load_state_dict, Hugging Face's own way to set weights."""
    torch.manual_seed(0)
    model, inputs = bert().eval(), batch()
    bank = tb.Samples(model)
    for _ in range(3):
        bank.append({name: t + 0.3 * torch.randn_like(t) if t.is_floating_point() else t
                     for name, t in tb.snapshot(model).items()})  # fmt: skip
    twin, probs = bert().eval(), []
    for draw in bank:
        twin.load_state_dict(draw, strict=False)  # tied and derived entries
        with torch.no_grad():
            out = twin(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        probs.append(out.logits.softmax(1))
    p = tb.predictive(model, bank, inputs)
    torch.testing.assert_close(p.probs, torch.stack(probs).mean(0), rtol=1e-4, atol=1e-6)


def test_a_posterior_of_a_loop_of_ones_own_can_be_used() -> None:
    model = bert()
    optimizer = tb.VOGN(model, train_size=len(ROWS))
    for inputs in loader():
        with optimizer.sampled():
            optimizer.zero_grad()
            model(**inputs).loss.backward()
        optimizer.step()
    p = tb.predictive(model, optimizer.posterior(), loader(shuffle=False), samples=4)
    assert p.probs.shape == (len(ROWS), CLASSES)


def test_a_run_over_a_padding_loader_resumes_bit_equal(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 2, "progress": False}
    whole = tb.fit(bert, loader(), "ivon", **settings)
    with pytest.raises(Stopped):
        tb.fit(
            bert, loader(), "ivon", epochs=2, folder=tmp_path, checkpoint_seconds=0,
            progress=StopAfter(4),
        )  # fmt: skip
    resumed = tb.fit(bert, loader(), "ivon", folder=tmp_path, resume=True, **settings)
    mean = resumed.posterior.mean()
    assert all(torch.equal(t, mean[name]) for name, t in whole.posterior.mean().items())


def test_a_whole_encoding_is_a_training_set() -> None:
    encoding = tokenizer().pad({"input_ids": [r["input_ids"] for r in ROWS]}, return_tensors="pt")
    labels = torch.tensor([row["label"] for row in ROWS])
    one = tb.fit(bert, encoding, labels, epochs=1, progress=False)
    two = tb.fit(bert, UserDict({**encoding, "labels": labels}), epochs=1, progress=False)
    mean = two.posterior.mean()
    assert all(torch.equal(t, mean[name]) for name, t in one.posterior.mean().items())
    torch.testing.assert_close(one.predict(encoding).probs, two.predict(encoding).probs)


def test_outputs_that_are_not_called_logits() -> None:
    """Token classes, whose logits torch wants with the classes in dimension 1."""
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=8, n_layers=2, n_heads=2, hidden_dim=16,
        max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip

    def tagger() -> nn.Module:
        return transformers.DistilBertForTokenClassification(config)  # type: ignore[no-any-return]

    ids = torch.randint(2, WORDS, (24, 7), generator=torch.Generator().manual_seed(0))
    run = tb.fit(
        tagger, {"input_ids": ids, "labels": ids % CLASSES}, "ivon", epochs=1, progress=False,
        output=lambda out: out.logits.transpose(1, 2),
    )  # fmt: skip
    assert run.predict({"input_ids": ids}, samples=2).probs.shape == (24, CLASSES, 7)


class Small(nn.Module):
    """A small network of the user's own with Hugging Face's kind of output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        features = self.body(x).relu()
        return transformers.modeling_outputs.SequenceClassifierOutput(
            logits=self.head(features), hidden_states=(features,)
        )


def test_wrappers_return_what_the_model_returns() -> None:
    for wrapper in (tb.MeanField, tb.Hypernet, tb.MCDropout):
        outputs = wrapper(Small())(torch.zeros(5, 4))
        assert isinstance(outputs, transformers.utils.ModelOutput)
        assert outputs.logits.shape == (5, 2)


def test_estimators_take_a_model_output() -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).numpy()
    y = x[:, 0] > 0
    net = tb.BayesianClassifier(Small(), "map", lr=0.01, epochs=60, random_state=0)
    assert net.fit(x, y).score(x, y) > 0.9


def test_the_hugging_face_example_of_the_documentation_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "own-data.md"
    blocks = re.findall(r"```py\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    assert names["p"].probs.shape == (4, 2)


@pytest.mark.parametrize("method", ["map", "ivon"])
def test_timm_networks_and_a_loader(method: str) -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    timm = import_timm()
    images = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = DataLoader([(image, i % 3) for i, image in enumerate(images)], 8, shuffle=True)  # type: ignore[arg-type]
    run = tb.fit(
        lambda: timm.create_model("test_vit", num_classes=3, img_size=32), data, method,
        epochs=1, progress=False,
    )  # fmt: skip
    assert run.predict(images, samples=2).probs.shape == (24, 3)
