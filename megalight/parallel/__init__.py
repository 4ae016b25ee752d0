"""Parallelism applied to one-device models: mesh, plans, sharded layers, the data-parallel engine."""
