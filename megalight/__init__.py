"""Megalight: write the model for one device, declare how its tensors split, train it under Lightning on any layout."""

__version__ = "0.1.0"
