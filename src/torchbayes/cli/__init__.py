"""The command line: `torchbayes train`, `evaluate`, `compare`, `report`, `predict`, `prune` and lists.

Bad input ends with one sentence and exit code 2, a training failure with one sentence and exit code 1,
Ctrl-C with the resume hint and exit code 130. A traceback means a bug in torchbayes.
"""

from __future__ import annotations

import re
import sys

import typer
from rich.console import Console

from torchbayes._version import __version__
from torchbayes.cli import compare, inspect, recipes, train
from torchbayes.cli.average import average
from torchbayes.cli.calibrate import calibrate
from torchbayes.cli.continual import continual
from torchbayes.cli.diagnose import diagnose
from torchbayes.cli.distill import distill
from torchbayes.cli.export import export
from torchbayes.cli.hub import hub
from torchbayes.cli.laplace import laplace
from torchbayes.cli.options import TrainingCommand
from torchbayes.cli.output import visible, visible_notices
from torchbayes.cli.predict import predict
from torchbayes.cli.prune import prune
from torchbayes.cli.serve import serve
from torchbayes.cli.tune import tune
from torchbayes.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="torchbayes",
    help="Networks that know what they don't know: train, evaluate and compare Bayesian networks.",
    epilog="Start with: torchbayes compare   (every method on the embedded digits, a table and a report)",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchbayes {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


app.command("train", cls=TrainingCommand)(train.train)
app.command("evaluate")(train.evaluate)
app.command("predict")(predict)
app.command("serve")(serve)
app.command("export")(export)
app.command("hub")(hub)
app.command("compare", cls=TrainingCommand)(compare.compare)
app.command("report")(compare.report)
app.command("tune", cls=TrainingCommand)(tune)
app.command("laplace")(laplace)
app.command("prune")(prune)
app.command("diagnose")(diagnose)
app.command("distill")(distill)
app.command("average")(average)
app.command("continual")(continual)
app.command("calibrate")(calibrate)
app.command("verify")(verify)
app.add_typer(recipes.app, name="recipes")
app.command("methods")(inspect.methods)
app.command("models")(inspect.models)
app.command("data")(inspect.data)


def main() -> None:
    """Run the command line and turn errors into one sentence and an exit code."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        with visible_notices():
            app()
    except Exception as error:
        if _out_of_memory(error):
            errors.print("torchbayes: the memory is full: use a smaller model, batch or data set")
            sys.exit(2)
        error = _told(error)
        code = _exit_code(error)
        if code is None:
            raise
        errors.print(visible(f"torchbayes: {_as_typed(str(error))}"))
        sys.exit(code)
    except SystemExit as end:
        stop = _interrupt(end)
        if stop is not None:
            errors.print(visible(f"torchbayes: {_as_typed(str(stop)) or 'stopped'}"))
        raise


def _as_typed(message: str) -> str:
    """Return a message of the library with the command line's spelling of its remedies."""
    message = message.replace("resume=True", "--resume").replace(" data_dir=", " --data-dir ")
    return re.sub(r" drop=\[(.+?)\]", r" --drop \1", message)


def _out_of_memory(error: Exception) -> bool:
    """Whether Python, or torch on a CPU or a GPU, could not get the memory it needed."""
    told = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return told or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _told(error: Exception) -> Exception:
    """Return the sentence that a killed worker process stands for, or the error itself."""
    if not isinstance(error, RuntimeError | OSError | EOFError):
        return error
    from torchbayes.data.stream import lost_worker  # as below

    return lost_worker(error) or error


def _exit_code(error: Exception) -> int | None:
    """Return 1 for a training failure, 2 for bad input and None for a bug."""
    if isinstance(error, RuntimeError | ConnectionError):
        # Imported only here: whatever raised one has imported torch already; a usage error has not.
        from torchbayes.core.distributed import LostProcessError
        from torchbayes.train.failures import TrainingError

        if isinstance(error, TrainingError | LostProcessError):
            return 1
    return 2 if isinstance(error, ValueError | TypeError | OSError | ImportError) else None


def _interrupt(end: SystemExit) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that Typer turned into an exit code; its text is the resume hint."""
    error: BaseException | None = end
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ if error.__cause__ is not None else error.__context__
    return error
