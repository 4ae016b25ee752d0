"""Folders of ``transformers``: reading, conversion of tensors, export."""
