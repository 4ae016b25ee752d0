"""Token files, datasets, samplers, tokenizers."""
