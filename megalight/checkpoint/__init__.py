"""Canonical views, storage, and the inspector of checkpoints."""
