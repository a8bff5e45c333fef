"""What every part of the library uses: batches, parameters, noise, memory, files and processes."""
