"""MLflow as a logger of `fit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["MLflow"]


class MLflow:
    """Sends per-epoch metrics, settings and the posterior to MLflow (extra `mlflow`).

    It continues the script's active run if there is one, and otherwise begins its own, which ends with the
    process or with `mlflow.end_run()`. `mlflow.set_tracking_uri` says where runs are kept.

    Args:
        config: Settings to record as parameters; those of a table get names such as `options.lr`.
        **options: Arguments of `mlflow.start_run`, such as `run_name` and `experiment_id`.

    Attributes:
        run_id: Identifier of the run.

    Raises:
        ImportError: If MLflow is not installed.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError(
                "MLflow is not installed: pip install 'torchbayes[mlflow]'"
            ) from error
        self._mlflow: Any = mlflow
        run = mlflow.active_run() or mlflow.start_run(**options)
        self.run_id: str = run.info.run_id
        if config is not None:
            mlflow.log_params(dict(_flat(config)), run_id=self.run_id)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        self._mlflow.log_metrics(dict(values), step=step, run_id=self.run_id)

    def artifact(self, path: Path) -> None:
        """Upload the file."""
        self._mlflow.log_artifact(str(path), run_id=self.run_id)


def _flat(config: Mapping[str, Any], front: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{front}{key}.")
        elif value is not None:
            yield f"{front}{key}", value
