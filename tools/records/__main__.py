"""Rewrite README.md's tables, docs/results*, docs/benchmarks.md, docs/scaling.md and their pictures.

python -m tools.records            `make records`
python -m tools.records --check    part of `make records-check`: write nothing, fail if one is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.records.benchmarks import benchmarks_page, charts, read_benchmarks, speed_table
from tools.records.changes import changes_since
from tools.records.claims import STEPS, judge, read_claims
from tools.records.page import read_reported, results_pages
from tools.records.pictures import Picture, pictures_of
from tools.records.readme import between, filled_in
from tools.records.scaling import read_scaling, scaling_page
from torchbayes.core.storage import write_text
from torchbayes.experiments.record import read_records

ROOT = Path(__file__).resolve().parents[2]


def generated(root: Path) -> tuple[dict[Path, str], list[tuple[Path, Picture]]]:
    """Derive everything that follows from the records below `root`: texts by file, pictures by folder."""
    records, measured = read_records(root / "results"), read_benchmarks(root / "results")
    steps = {
        **measured.get(STEPS, {}).get("networks", {}),
        **measured.get("batch-norm", {}).get("networks", {}),
    }
    judged = [judge(one, records, steps) for one in read_claims(root / "recipes/claims.toml")]
    readme, images = root / "README.md", root / "docs/images"
    pages = results_pages(
        judged, records, read_reported(root / "recipes"), changes_since(root / "recipes", records)
    )
    texts = {root / "docs" / page: text for page, text in pages.items()}
    texts[readme] = filled_in(readme.read_text(encoding="utf-8"), judged, records)
    pictures = [(images / "results", p) for found in pictures_of(records).values() for p in found]
    if STEPS in measured:
        texts[root / "docs/benchmarks.md"] = benchmarks_page(measured)
        texts[readme] = between(texts[readme], "speed", speed_table(measured))
        pictures += [(images, chart) for chart in charts(measured)]
    scaling = read_scaling(root / "results")
    if "scaling" in scaling:
        texts[root / "docs/scaling.md"] = scaling_page(scaling)
    return texts, pictures


def write(root: Path) -> None:
    """Write every file that follows from the records."""
    texts, pictures = generated(root)
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    for folder, picture in pictures:
        picture.save(folder)


def outdated(root: Path) -> list[Path]:
    """List the files that are not what the records give."""
    texts, pictures = generated(root)
    wrong = [
        file
        for file, text in texts.items()
        if not file.is_file() or file.read_text(encoding="utf-8") != text
    ]
    return wrong + [
        folder / picture.name for folder, picture in pictures if not picture.is_in(folder)
    ]


def main(root: Path = ROOT) -> None:
    """Write or check, as the command line says."""
    parser = argparse.ArgumentParser(
        prog="tools.records", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is out of date"
    )
    if not parser.parse_args().check:
        return write(root)
    if wrong := outdated(root):
        names = ", ".join(str(file.relative_to(root)) for file in wrong)
        sys.exit(f"not what the records in results/ give: {names}; run `make records`")


if __name__ == "__main__":
    main()
