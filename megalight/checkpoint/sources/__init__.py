"""Checkpoints as sources of tensors: combined, in full precision, streamed, and rewritten in another format."""
