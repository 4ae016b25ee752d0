"""The data-parallel engine: buckets, reductions, gathers."""
