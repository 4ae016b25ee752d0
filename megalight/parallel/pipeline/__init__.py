"""Schedules: the order in which chunks of a model work on micro-batches."""
