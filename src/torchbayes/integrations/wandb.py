"""Weights & Biases as a logger of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["WandB"]


class WandB:
    """Sends per-epoch metrics, settings and the posterior to Weights & Biases (extra `wandb`).

    It continues the script's active run if there is one, and otherwise begins its own, which ends with the
    process or with `logger.run.finish()`.

    Args:
        config: Settings to record.
        **options: Arguments of `wandb.init`, such as `project`, `name` and `mode="offline"`.

    Attributes:
        run: The run of `wandb`.

    Raises:
        ImportError: If wandb is not installed.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("wandb is not installed: pip install 'torchbayes[wandb]'") from error
        self._wandb = wandb
        self.run: Any = wandb.init(**options) if wandb.run is None else wandb.run
        if config is not None:
            self.run.config.update(dict(config), allow_val_change=True)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        self.run.log(dict(values), step=step)

    def artifact(self, path: Path) -> None:
        """Upload the file as an artifact of type `posterior`."""
        artifact = self._wandb.Artifact(f"posterior-{self.run.id}", type="posterior")
        artifact.add_file(str(path))
        self.run.log_artifact(artifact)
