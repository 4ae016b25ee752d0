"""Tensor and sequence parallel layers."""
