"""Threads predict with one network at the same time, as in tests/predict/test_threads.py, for ever."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import torchbayes as tb
from torchbayes.predict.results import Predictive

from ..predict.test_threads import POSTERIORS, assert_threads_agree, network

__all__ = ["rounds"]


def rounds() -> Iterator[tuple[str, str]]:
    """Yield the kind of posterior and a verdict, for ever."""
    while True:
        for make in POSTERIORS:
            model = network()
            posterior = make(model)
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
            model.train()

            def answer(seed: int, model=model, posterior=posterior, x=x) -> Predictive:  # type: ignore[no-untyped-def]
                generator = torch.Generator().manual_seed(seed)
                return tb.predictive(model, posterior, x, 6, generator=generator)

            try:
                assert_threads_agree(answer, model)
            except AssertionError:
                yield make.__name__, "wrong answers"
            else:
                yield make.__name__, "all answers right"
