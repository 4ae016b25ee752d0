"""Training steps as CUDA graphs: the callback, and what speaks against recording."""
