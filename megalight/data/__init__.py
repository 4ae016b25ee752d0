"""Token files, tokenizers, data sets, samplers and Lightning data modules."""
