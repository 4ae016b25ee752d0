"""Parallelism applied to single-device models: mesh, plans, sharded layers, the data-parallel engine."""
