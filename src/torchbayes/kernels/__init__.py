"""Updates of all weights in one pass over memory, which also draws the random numbers.

torch computes an update operation by operation, and each of them reads and writes all weights; for wide
layers this, and a normal number per weight, takes longer than the forward and backward pass. Here an update
is one loop, compiled by numba (`torchbayes.kernels.loops`) and shared among torch's threads.

This is for float32 on a CPU. Every loop repeats a pure function of torch operations, which is in the
algorithm's own file and is used for other devices and types and for few weights, where numba is not even
imported. Both take the same random numbers from a generator. `torchbayes.core.workspace.Workspace.apply`
chooses.

Why not `torch.compile`: on 2.4 million weights and one thread, SGLD's pure function compiled by it takes 1.7
and ATMC's 2.2 times as long as the loop with our random numbers, 50 and 25 times with torch's, and the first
call takes 20 s (torch 2.13, gcc).
"""

from torchbayes.kernels.dispatch import run

__all__ = ["run"]
