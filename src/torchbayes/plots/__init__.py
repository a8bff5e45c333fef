"""Matplotlib figures."""
