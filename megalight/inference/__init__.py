"""Sampling and generation."""
