"""`torchbayes verify`: check a method's settings against a known posterior."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import typer
from rich.text import Text

from torchbayes.cli.options import Json, Seed, Set, method_pairs
from torchbayes.cli.output import answer

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
            help="Passes through the training set.", show_default="10, and enough for 4,000 updates"
        ),
    ] = None,
    told_size: Annotated[
        int | None,
        typer.Option(
            help="Training-set size to give the method instead, to see the effect of a wrong one."
        ),
    ] = None,
    condition: Annotated[
        float,
        typer.Option(
            help="100: a posterior 10 times as wide in one direction as in another, at an angle."
        ),
    ] = 1.0,
    set_: Set = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Check a method's settings against an exact posterior with your training-set size.

    Example: `torchbayes verify sgld --train-size 50000 --batch-size 128 --lr 1e-6`

    The method is trained on a linear regression with as many examples as you have, whose posterior is
    known in closed form. The exit code is 1 if the settings cannot be trusted.
    """
    pairs = [*(set_ or []), *([] if lr is None else [f"lr={lr!r}"])]
    options = method_pairs(pairs, {method: method})[method]
    from torchbayes import checks
    from torchbayes.experiments.options import translated

    found = checks.verify(
        method,
        train_size=train_size,
        batch_size=batch_size,
        epochs=epochs,
        told_size=told_size,
        condition=condition,
        seed=seed,
        **translated(options, steps_per_epoch=math.ceil(train_size / batch_size)),
    )
    exact = found.target == "posterior"
    kind = "exact posterior" if exact else "best Gaussian with independent weights"
    answer(
        dataclasses.asdict(found),
        as_json,
        f"{method} on {found.train_size:,} examples, against the {kind}:",
        f"  mean error  {found.mean_error:.3f} exact standard deviations",
        f"  std ratio   {found.std_ratio:.3f} (1 is exact)",
        f"  directions  {', '.join(f'{d:.2f}' for d in found.directions)} (narrowest first)",
        *([found.limit] if found.limit else []),
        Text(found.verdict, style=f"bold {'green' if found.trusted else 'red'}"),
    )
    if not found.trusted:
        raise typer.Exit(1)
