"""Normal numbers and signs: right in distribution, and a function of the generator's state alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from torchbayes.core.noise import gaussians_, normal_, normals_, random_signs

LARGE = 1_000_003  # several chunks, the last of them odd


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        tensors = [torch.empty(LARGE), torch.empty(10), torch.empty(600, 500)]
        normals_(tensors, seeded())
        results.append(tensors)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
def test_means_and_stds_are_put_on_the_same_numbers(count: int, ordered: bool) -> None:
    torch.set_num_threads(count)
    shapes = [(LARGE,), (10,), (600, 500), (3, 40_000)]
    epsilon, drawn = ([torch.empty(shape) for shape in shapes] for _ in range(2))
    means = [torch.randn(shape) for shape in shapes]
    stds = [torch.rand(shape) for shape in shapes]
    if not ordered:
        stds[2] = torch.rand(500, 600).t()  # another order of entries in memory
    normals_(epsilon, seeded())
    gaussians_(drawn, means, stds, seeded())
    for x, e, mean, std in zip(drawn, epsilon, means, stds, strict=True):
        # A product and a sum may be rounded together.
        np.testing.assert_allclose(x, e.numpy() * std.numpy() + mean.numpy(), rtol=1e-5, atol=1e-6)


def test_the_masters_state_is_all_there_is() -> None:
    generator = seeded()
    normal_(torch.empty(LARGE), generator)
    state = generator.get_state()
    first = [normal_(torch.empty(size), generator) for size in (LARGE, 7, LARGE)]
    generator.set_state(state)
    again = [normal_(torch.empty(size), generator) for size in (LARGE, 7, LARGE)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[2])


def test_small_tensors_are_torchs_own() -> None:
    assert torch.equal(normal_(torch.empty(1000), seeded()), torch.randn(1000, generator=seeded()))
    torch.manual_seed(3)
    ours = normal_(torch.empty(LARGE))
    torch.manual_seed(3)
    assert torch.equal(ours, normal_(torch.empty(LARGE)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tensors_are_normal(dtype: torch.dtype) -> None:
    x = normal_(torch.empty(LARGE, dtype=dtype), seeded(1)).double().numpy()
    # With a fixed seed these are not chances; the limits are what a right generator passes 999 times in 1000.
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert abs(x.mean()) < 3.3 / math.sqrt(LARGE)
    assert abs(x.var() - 1) < 3.3 * math.sqrt(2 / LARGE)
    assert abs((x**4).mean() - 3) < 3.3 * math.sqrt(96 / LARGE)
    chunks = x[: 3 * (1 << 18)].reshape(3, -1)
    assert np.abs(np.corrcoef(chunks) - np.eye(3)).max() < 4 / math.sqrt(1 << 18)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / math.sqrt(LARGE)


def test_in_place_whatever_the_tensor() -> None:
    columns = torch.zeros(700, 600).t()
    assert normal_(columns, seeded()) is columns
    assert columns.std() > 0.9
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    normal_(parameter, seeded())
    with torch.inference_mode():
        inside = normal_(torch.empty(LARGE), seeded())
    assert torch.equal(parameter, inside)


@pytest.mark.parametrize("shape", [(), (3,), (1001, 999)])
def test_signs(shape: tuple[int, ...]) -> None:
    signs = random_signs(shape, seeded())
    assert signs.shape == shape
    assert signs.dtype == torch.float32
    assert torch.equal(signs.abs(), torch.ones(shape))
    assert torch.equal(signs, random_signs(shape, seeded()))


def test_signs_are_fair_and_independent() -> None:
    signs = random_signs((100_000, 16), seeded(), dtype=torch.float64)
    # Sixteen columns: the eight bytes of two successive random words.
    correlation = signs.T @ signs / 100_000
    assert (correlation - torch.eye(16)).abs().max() < 4.5 / math.sqrt(100_000)
    assert signs.mean(0).abs().max() < 4 / math.sqrt(100_000)
