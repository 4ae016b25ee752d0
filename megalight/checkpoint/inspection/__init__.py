"""What people ask of a checkpoint: what is in it, whether it is whole, how it differs from another. No torch."""
