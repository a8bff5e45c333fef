"""`torchbayes hub`: a finished run as a folder for the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer

__all__ = ["hub"]


def hub(
    run: opt.RunFolder,
    out: Annotated[Path, typer.Option(help="Folder to write; must be new or empty.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name on the Hub, such as you/digits.", show_default="that of --out"),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(help="Licence, such as apache-2.0.", show_default="none stated"),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Write a run and a model card to a folder that can be uploaded to the Hugging Face Hub.

    The folder has what `tb.load_run` needs, but no checkpoint, and a README.md with the Hub's metadata, the
    scores and how to load it. Nothing is uploaded: `hf upload NAME FOLDER` does that.

    Example: `torchbayes hub runs/lenet --out hub/lenet --name you/lenet --license apache-2.0`
    """
    from torchbayes.integrations.hub import export

    card = export(run, out, name=name, license=license)
    files = sorted(file.name for file in out.iterdir())
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    answer(
        {"folder": str(out), "card": str(card), "files": files, "bytes": size},
        as_json,
        f"{out}: {size / 1e6:.2f} MB in {', '.join(files)}",
        f"upload it with: hf upload {name or 'you/' + out.name} {out}",
    )
