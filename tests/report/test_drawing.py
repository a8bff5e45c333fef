"""The plotting kit: positions, ticks, colours and text."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import binomtest

from torchbayes.report import load_results, markdown_table
from torchbayes.report.fragment import read_asset
from torchbayes.report.pictures import data_uri, value_range
from torchbayes.report.svg import Axis, Panel, log_ticks, thin
from torchbayes.report.wording import wilson

from .folders import write_folder


def colours(scheme: str) -> dict[str, np.ndarray]:
    """Return the style sheet's colours as sRGB in [0, 1]."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", read_asset("style.css"))
    column = {"light": 1, "dark": 2}[scheme]
    return {
        row[0]: np.array([int(row[column][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        for row in found
    }


def linear(colour: np.ndarray) -> np.ndarray:
    return np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)


def contrast(one: np.ndarray, two: np.ndarray) -> float:
    """Return the contrast ratio of WCAG 2."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, two))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(scheme: str) -> None:
    palette = colours(scheme)
    texts = ["ink", "soft", "accent", "alarm", *(f"m{i}" for i in range(7))]
    for name in texts:
        for paper in ("paper", "wash", "alarm-wash"):
            assert contrast(palette[name], palette[paper]) >= 4.5, (name, paper)


# Machado, Oliveira and Fernandes (2009): what complete loss of one cone type makes of linear RGB.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def lab(rgb: np.ndarray) -> np.ndarray:
    """Convert linear RGB to CIE L*a*b* under D65."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
              [0.0193339, 0.1191920, 0.9503041]]  # fmt: skip
    xyz = np.asarray(to_xyz) @ rgb / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", list(BLINDNESS))
def test_colours_differ_for_colour_blind_eyes(scheme: str, kind: str) -> None:
    palette, matrix = colours(scheme), np.asarray(BLINDNESS[kind])
    seen = [lab(np.clip(matrix @ linear(palette[f"m{i}"]), 0, 1)) for i in range(7)]
    for one, two in combinations(range(7), 2):
        # Differences above 10 are seen at a glance; 2.3 is the least that is seen at all.
        assert np.linalg.norm(seen[one] - seen[two]) > 10, (one, two)


def test_values_land_where_the_axes_say() -> None:
    x = Axis(1.0, 100.0, "x", (1.0, 10.0), transform=np.log10)
    panel = Panel(x, Axis(0.0, 2.0, "y", ()), width=220, height=100, left=20, right=0)
    panel.top, panel.bottom = 0, 0
    assert panel.at_x(10.0) == pytest.approx(120)
    assert (panel.at_y(0.0), panel.at_y(2.0)) == (100, 0)
    points = panel.points(np.array([1.0, 100.0]), np.array([1.0, 0.5]))
    assert points.tolist() == [[20, 50], [220, 75]]


def test_a_drawing_is_well_formed_and_named() -> None:
    panel = Panel(Axis(0, 1, '<"&', (0.0,)), Axis(0, 1, "y", ()))
    panel.bar(0, 1, 0, 0.5, "bar", "a <hint>")
    root = ElementTree.fromstring(panel.draw("what <it> shows & why"))
    assert root.get("role") == "img"
    assert root.get("aria-label") == "what <it> shows & why"
    assert [node.text for node in root.iter("title")] == ["a <hint>"]


@pytest.mark.parametrize(("low", "high"), [(0.01, 3.0), (0.9, 1.7), (1e-6, 1e3), (20.0, 30.0)])
def test_logarithmic_ticks_are_inside_and_few(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 10
    assert all(low <= tick <= high for tick in ticks)


def test_thinning_moves_a_line_by_less_than_a_pixel() -> None:
    x = np.linspace(0, 400, 50_000)
    dense = np.stack([x, 100 + 80 * np.sin(x / 30)], axis=1)
    kept = thin(dense)
    assert len(kept) < 2000
    assert np.array_equal(kept[[0, -1]], dense[[0, -1]])
    assert np.abs(np.interp(x, kept[:, 0], kept[:, 1]) - dense[:, 1]).max() < 1


@pytest.mark.parametrize(("right", "examples"), [(0, 5), (5, 5), (440, 450), (1, 3)])
def test_the_interval_is_wilson_s(right: int, examples: int) -> None:
    interval = binomtest(right, examples).proportion_ci(0.95, "wilson")
    assert wilson(right / examples, examples) == pytest.approx((interval.low, interval.high))


def test_pictures_keep_their_pixels() -> None:
    import base64
    import io

    from PIL import Image

    grey = np.arange(12, dtype=np.uint8).reshape(1, 3, 4)
    colour = np.random.default_rng(0).integers(0, 256, (3, 5, 6)) / 255

    def back(uri: str) -> np.ndarray:
        start, content = uri.split(",")
        assert start == "data:image/png;base64"
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))

    assert np.array_equal(back(data_uri(grey, value_range(grey[None]))), grey[0])
    shown = back(data_uri(colour, value_range(colour[None])))
    assert np.array_equal(shown, np.round(255 * np.moveaxis(colour, 0, -1)))


def test_the_markdown_table(tmp_path: Path) -> None:
    write_folder(tmp_path, {"map": {}, "a|b<i>": {"skill": 3.0}}, seeds=(0, 1))
    results = load_results(tmp_path)
    lines = markdown_table(results).splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert {len(row) for row in cells} == {len(cells[0])}
    assert [row[0].strip() for row in cells] == ["method", "---", r"a\|b&lt;i>", "map"]
    column = [cell.strip() for cell in cells[0]].index("NLL ↓")
    for row, method in zip(cells[2:], results.methods, strict=True):
        value, spread = method.scores["nll"], method.spread["nll"]
        assert row[column].strip().strip("*") == f"{value:.4f} ± {spread:.4f}"
    best = min(results.scored("nll")).method
    assert [row[column].strip().startswith("**") for row in cells[2:]] == [
        method is best for method in results.methods
    ]
