"""Data that a run reads on where it stopped."""
