"""Runs by name: settings, trained runs, comparisons of methods, and what they cost."""
