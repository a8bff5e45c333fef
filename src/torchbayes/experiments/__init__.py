"""Experiments: settings, trained runs, comparisons of methods, and their cost."""
