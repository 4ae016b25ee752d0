"""Training steps of vision-language models: their shapes, ours, that of `transformers`, and its check by a twin."""
