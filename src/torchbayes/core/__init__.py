"""Foundations that every part of the library uses: batches, parameters, noise, memory, files, processes."""
