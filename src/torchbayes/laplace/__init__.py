"""A posterior for a network that is already trained: Laplace's Gaussian around its weights."""

from torchbayes.laplace.laplace import Laplace

__all__ = ["Laplace"]
