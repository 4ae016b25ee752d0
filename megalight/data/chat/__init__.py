"""Conversations for fine-tuning: rows, chat templates, packing, and the data module."""
