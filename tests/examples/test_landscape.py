"""The PCA plane against NumPy's SVD, and the landscape against losses computed directly."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from examples.figures.landscape import Plane, landscape, landscape_figure, pca_plane
from torchbayes.posterior import Weights, snapshot


def path(count: int = 9) -> list[Weights]:
    generator = torch.Generator().manual_seed(0)
    steps = [
        {
            "a": torch.randn(3, 2, generator=generator, dtype=torch.float64),
            "b": torch.randn(4, generator=generator, dtype=torch.float64),
        }
        for _ in range(count)
    ]
    return [
        {name: sum(s[name] for s in steps[: i + 1]) for name in ("a", "b")} for i in range(count)
    ]


def flat(weights: Weights) -> np.ndarray:
    return np.concatenate([weights["a"].numpy().ravel(), weights["b"].numpy().ravel()])


def test_plane_is_numpys_svd() -> None:
    plane = pca_plane(path())
    matrix = np.stack([flat(weights) for weights in path()])
    centred = matrix - matrix.mean(0)
    _, singular, rows = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(flat(plane.origin), matrix.mean(0), rtol=1e-12)
    for axis, row in zip(plane.axes, rows, strict=False):
        sign = np.sign(flat(axis) @ row)
        np.testing.assert_allclose(sign * flat(axis), row, atol=1e-12)
    shares = singular**2 / (singular**2).sum()
    np.testing.assert_allclose(plane.explained, shares[:2], rtol=1e-12)
    for weights, row in zip(path(), centred, strict=True):
        expected = [row @ flat(axis) for axis in plane.axes]
        np.testing.assert_allclose(plane.project(weights), expected, atol=1e-12)


def test_points_of_the_plane_project_onto_themselves() -> None:
    plane = pca_plane(path())
    assert plane.project(plane.at(1.5, -0.25)) == pytest.approx((1.5, -0.25))


def test_only_the_named_weights_span_the_plane() -> None:
    steps = [
        {**weights, "running": torch.full((2,), float(i) ** 3)} for i, weights in enumerate(path())
    ]
    plane = pca_plane(steps, names={"a", "b"})
    assert plane.axes[0].keys() == {"a", "b"}
    assert torch.equal(plane.at(3.0, 1.0)["running"], steps[-1]["running"])
    assert plane.explained == pytest.approx(pca_plane(path()).explained)


def test_refuses_paths_without_a_plane() -> None:
    with pytest.raises(ValueError, match="2 sets of weights: a plane needs at least 3"):
        pca_plane(path(2))
    line = [{"w": torch.tensor([t, 2 * t])} for t in (0.0, 1.0, 2.0, 4.0)]
    for flat_path in ([path()[0]] * 4, line):
        with pytest.raises(ValueError, match="fewer than two directions"):
            pca_plane(flat_path)


def problem() -> tuple[nn.Module, list[Weights], list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 2), []
    for _ in range(5):
        model.reset_parameters()
        weights.append(snapshot(model))
    inputs = torch.randn(40, 3)
    return (
        model,
        weights,
        [(inputs[:25], torch.arange(25) % 2), (inputs[25:], torch.arange(15) % 2)],
    )


def test_landscape_is_the_loss_at_every_place() -> None:
    model, weights, batches = problem()
    plane = pca_plane(weights)
    before = snapshot(model)
    surface = landscape(model, plane, weights, batches, batches[:1], points=5)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for row, column in ((0, 0), (4, 1), (2, 3)):
        there = plane.at(surface.x[column], surface.y[row])
        logits = F.linear(inputs, there["weight"], there["bias"])
        assert surface.loss[row, column] == pytest.approx(
            F.cross_entropy(logits, targets).item(), rel=1e-5
        )
        wrong = (logits[:25].argmax(1) != targets[:25]).float().mean().item()
        assert surface.error[row, column] == pytest.approx(wrong)
    for point in map(plane.project, weights):
        assert surface.x[0] < point[0] < surface.x[-1]
        assert surface.y[0] < point[1] < surface.y[-1]
    assert all(torch.equal(before[name], tensor) for name, tensor in snapshot(model).items())


def test_regression_gives_the_root_mean_square_error() -> None:
    model, weights, _ = problem()
    inputs, targets = torch.randn(20, 3), torch.randn(20, 2)
    plane = pca_plane(weights)
    surface = landscape(
        model, plane, weights, [(inputs, targets)], [(inputs, targets)], points=3,
        likelihood=tb.GaussianNoise(0.5),
    )  # fmt: skip
    there = plane.at(surface.x[2], surface.y[1])
    residual = F.linear(inputs, there["weight"], there["bias"]) - targets
    assert not surface.classes
    assert surface.error[1, 2] == pytest.approx(residual.square().mean().sqrt().item(), rel=1e-5)


def test_batch_norm_is_calibrated_at_every_place() -> None:
    """With statistics of each place's own, scaling the weights before batch norm changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    base = snapshot(model)
    axes = [{"0.weight": torch.zeros(4, 3)}, {"0.weight": torch.zeros(4, 3)}]
    axes[0]["0.weight"][:2] = base["0.weight"][:2] / base["0.weight"][:2].norm()
    axes[1]["0.weight"][2:] = base["0.weight"][2:] / base["0.weight"][2:].norm()
    origin = base | {"0.weight": torch.zeros(4, 3)}
    plane = Plane(origin, (axes[0], axes[1]), (0.5, 0.5))
    show = [plane.at(2.0, 2.0), plane.at(4.0, 5.0)]
    batches = [(torch.randn(64, 3), torch.arange(64) % 2)]
    raw = landscape(model, plane, show, batches, batches, points=3)
    calibrated = landscape(model, plane, show, batches, batches, points=3, calibrate=batches)
    assert np.ptp(raw.loss) > 0.05
    assert np.ptp(calibrated.loss) < 1e-4


def test_figure_shows_the_path_the_ends_and_the_average() -> None:
    model, weights, batches = problem()
    plane = pca_plane(weights)
    surface = landscape(model, plane, weights, batches, batches, points=5)
    figure = landscape_figure(surface, weights, [2, 4], {"SWA": plane.at(0.0, 0.0)})
    panels = figure.axes[:2]
    assert [axes.get_title() for axes in panels] == ["train loss in nats", "test error in %"]
    for axes in panels:
        lines = {line.get_label(): line.get_xydata() for line in axes.lines}
        np.testing.assert_allclose(lines["iterates"], [plane.project(w) for w in weights])
        np.testing.assert_allclose(lines["cycle ends"], [plane.project(weights[i]) for i in (2, 4)])
        np.testing.assert_allclose(lines["SWA"], [[0, 0]], atol=1e-9)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue()[:4] == b"\x89PNG"


def test_refuses_what_it_cannot_evaluate() -> None:
    model, weights, batches = problem()
    plane = pca_plane(weights)
    with pytest.raises(ValueError, match="no batches"):
        landscape(model, plane, weights, [], batches, points=2)
    with pytest.raises(ValueError, match="no targets"):
        landscape(model, plane, weights, [batches[0][0]], batches, points=2)
    with pytest.raises(ValueError, match="on one point"):
        landscape(model, plane, weights[:1], batches, batches, points=2)
