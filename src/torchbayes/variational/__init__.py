"""Modules around the user's network that draw, perturb or generate its weights."""

from torchbayes.variational.dropout import DropoutPosterior, MCDropout

__all__ = ["DropoutPosterior", "MCDropout"]
