"""Posteriors in other people's training loops: one module a framework, which is imported when it is needed.

`lightning`, `huggingface`, `accelerate` and `skorch` train, `wandb` and `mlflow` keep records, and `hub`
writes a folder to upload. Nothing but the command line imports them, and `torchbayes.integrations` itself
imports none of the frameworks.
"""

from torchbayes.integrations.collector import Collector

__all__ = ["Collector"]
