"""`torchbayes verify`: whether a method's settings give the right posterior where it is known."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Annotated

import typer
from rich.console import Console

from torchbayes.cli.options import Json, Seed, Set, method_pairs

__all__ = ["verify"]


def verify(
    method: Annotated[str, typer.Argument(help="Method, such as sgld or vogn.")],
    train_size: Annotated[int, typer.Option(help="Number of training examples.")],
    batch_size: Annotated[int, typer.Option(help="Examples per update.")] = 128,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", show_default="the method's")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Passes through the training set.", show_default="enough for 4,000 updates"
        ),
    ] = None,
    told_size: Annotated[
        int | None,
        typer.Option(
            help="Tell the method this training-set size instead, to see what a wrong one does."
        ),
    ] = None,
    set_: Set = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Check a method with your settings against an exact posterior of your scale.

    Example: `torchbayes verify sgld --train-size 50000 --batch-size 128 --lr 1e-6`

    The method is trained on a linear regression with as many examples as you have, whose posterior is
    known in closed form. The exit code is 1 if the settings cannot be trusted.
    """
    pairs = list(set_ if set_ else [])
    if lr is not None:
        pairs.append(f"lr={lr!r}")
    options = method_pairs(pairs, {method: method})[method]
    from torchbayes import checks
    from torchbayes.experiments.options import translated

    found = checks.verify(
        method,
        train_size=train_size,
        batch_size=batch_size,
        epochs=epochs,
        told_size=told_size,
        seed=seed,
        **translated(options, steps_per_epoch=math.ceil(train_size / batch_size)),
    )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        kind = (
            "exact posterior"
            if found.target == "posterior"
            else "best Gaussian of independent weights"
        )
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{method} on {found.train_size:,} examples, against the {kind}:")
        console.print(f"  mean error  {found.mean_error:.3f} exact standard deviations")
        console.print(f"  std ratio   {found.std_ratio:.3f} (1 is exact)")
        console.print(f"[bold {'green' if found.trusted else 'red'}]{found.verdict}[/]")
    if not found.trusted:
        raise typer.Exit(1)
