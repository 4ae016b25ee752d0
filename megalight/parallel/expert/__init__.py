"""Experts divided over the ``ep`` axis."""
