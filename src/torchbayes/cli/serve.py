"""`torchbayes serve`: a finished run behind HTTP, with a page to try it."""

from __future__ import annotations

from typing import Annotated

import typer

from torchbayes.cli import options as opt
from torchbayes.cli.output import answer

__all__ = ["serve"]


def serve(
    run: opt.RunFolder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 lets the system choose one.")
    ] = 8000,
    samples: Annotated[
        int, typer.Option(min=1, help="Posterior draws to predict with; made once.")
    ] = 32,
    max_body: Annotated[float, typer.Option(help="Largest body of a request in MB.")] = 10.0,
    data_dir: opt.DataDir = None,
) -> None:
    """Serve a run over HTTP: a page to try it, JSON and image uploads, until Ctrl-C.

    Draws once and answers from several threads; the same input gets the same answer. If the run has been
    calibrated (`torchbayes calibrate`), answers have its temperature, sets and risks.

    Example: `torchbayes serve runs/lenet --port 8000`
    """
    from torchbayes.experiments.trained_run import kept_run
    from torchbayes.serving import app, server

    trained = kept_run(run, data_dir)
    local = server.is_loopback(host)
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if local else None
    name = run.resolve().name
    application = app(trained, samples, name=name, max_body=max_body, hosts=hosts)
    listening = server.bound(host, port)

    def started(_: object) -> None:
        lines = [f"{name} at {server.address_of(listening)} (Ctrl-C stops it)"]
        if not local:
            lines.append("anybody who can reach this address can use it: there is no password")
        answer(None, False, *lines)

    server.serve(application, listening, started)
    answer(None, False, "stopped")
