"""Running compiled modules as plain ones."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["uncompiled"]


def uncompiled() -> AbstractContextManager[Any]:
    """Run what `torch.compile` has compiled without its compiled code inside the block.

    The compiler can neither see who watches the layers of a network nor keep up with weights that are
    replaced at every call: it would compile the network again for each of them.
    """
    # Without Dynamo nothing can have been compiled, and importing it takes long.
    if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
