"""A posterior outside of Python and of torchbayes: files that other runtimes execute, and an HTTP server."""

from typing import TYPE_CHECKING, Any

from torchbayes.serving.export import Exported, export

if TYPE_CHECKING:
    from torchbayes.serving.application import app

__all__ = ["Exported", "app", "export"]


def __getattr__(name: str) -> Any:
    if name == "app":  # which needs packages that export does not
        from torchbayes.serving.application import app

        return app
    raise AttributeError(f"module 'torchbayes.serving' has no attribute {name!r}")
