"""What posteriors are good for: pruning, continual learning and distillation."""
