"""Pictures that other commands save in a run folder for the page.

A picture is `pictures/NAME.png` or `.svg`, described in `pictures/NAME.json` by `title`, `caption` and
`alt`, its text alternative. A few commands write one picture of a fixed name to the run folder itself;
those are described here.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchbayes.core.reading import read_json
from torchbayes.core.storage import atomic_path, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Picture", "read_pictures", "save_picture"]

_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
_LARGEST = 4 << 20
_FIXED = {
    "curve.png": {
        "title": "Regression with predictive intervals",
        "caption": "The predicted mean and intervals over the training data.",
        "alt": "Predicted mean and intervals against the input, with the training data.",
    },
    "traces.png": {
        "title": "Traces of the chains",
        "caption": "Chains that have converged overlap and show no trend.",
        "alt": "Traces of the sampler's chains against the number of updates.",
    },
    "weights.png": {
        "title": "Weights across draws",
        "caption": "How weights vary across posterior draws, and how they depend on each other.",
        "alt": "Scatter plots and histograms of pairs of weights across draws.",
    },
}


@dataclass(frozen=True)
class Picture:
    """A picture of a run.

    Attributes:
        title: Heading.
        caption: What to look for; may be empty.
        alt: Text alternative.
        uri: The picture as a data URI.
    """

    title: str
    caption: str
    alt: str
    uri: str


def save_picture(
    run: str | Path, name: str, figure: Figure, *, title: str, caption: str, alt: str
) -> Path:
    """Save a picture in a run folder, where `torchbayes report` finds it.

    Args:
        run: Run folder.
        name: File name without its extension.
        figure: A matplotlib figure.
        title: Heading.
        caption: What to look for.
        alt: Text alternative.

    Returns:
        The path of the PNG file.
    """
    path = Path(run) / "pictures" / f"{name}.png"
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
    words = {"title": title, "caption": caption, "alt": alt}
    write_json(path.with_suffix(".json"), words)
    return path


def read_pictures(run: Path, problems: list[str]) -> tuple[Picture, ...]:
    """Read the pictures of a run folder, in the order of their names.

    Args:
        run: Run folder.
        problems: List that receives a sentence for each picture that cannot be shown.
    """
    found: list[Picture] = []
    folder = run / "pictures"
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for file in [*(run / name for name in _FIXED if (run / name).is_file()), *files]:
        kind = _KINDS.get(file.suffix.lower())
        if kind is None:
            continue
        if file.stat().st_size > _LARGEST:
            problems.append(f"{file} is not shown: it is larger than 4 MiB.")
            continue
        words = _FIXED[file.name] if file.parent == run else _words(file.with_suffix(".json"))
        title = words.get("title") or file.stem.replace("-", " ").replace("_", " ")
        uri = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode('ascii')}"
        found.append(Picture(title, words.get("caption", ""), words.get("alt") or title, uri))
    return tuple(found)


def _words(file: Path) -> dict[str, str]:
    try:
        words = read_json(file, "the picture has no words")
        return {key: value for key, value in words.items() if isinstance(value, str)}
    except (ValueError, AttributeError):
        return {}
