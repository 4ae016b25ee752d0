"""CUDA graphs: work on a GPU that is recorded once and replayed, so that the host launches it with one call."""
