"""Updates of every weight in one pass over memory, with the random numbers drawn on the way.

torch computes an update operation by operation, and each of them reads and writes all weights; for wide
layers that, and a normal number per weight, takes longer than the forward and backward pass. Here an update
is one loop, compiled by numba (`torchbayes.kernels.loops`) and shared by torch's threads.

This is for float32 on a CPU. Everything that uses it has the same update in torch's operations, for other
devices and types and for few weights, where numba is not even imported. Both ways take the same random
numbers from a generator.
"""

from torchbayes.kernels.names import Loop
from torchbayes.kernels.tensors import fits, run

__all__ = ["Loop", "fits", "run"]
