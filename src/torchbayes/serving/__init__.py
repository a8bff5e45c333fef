"""A posterior outside of Python and of torchbayes: files that other runtimes execute, and an HTTP server."""

from torchbayes.serving.export import Exported, export

__all__ = ["Exported", "export"]
