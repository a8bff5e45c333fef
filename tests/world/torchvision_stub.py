"""A stand-in for torchvision, which has no CPU build on the build machines but which timm imports.

timm's networks use nothing of it: only its transforms and data sets do, and no test here needs those.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

from torch import nn


class _Meta(type):
    """Of a class in which every public name exists, such as the members of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    """A module in which every public name is an empty class."""

    __version__ = "0"
    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Meta(name, (nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_timm() -> types.ModuleType:
    """Import timm, with the stand-in while it imports if there is no torchvision."""
    if importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
