"""Checkpoints as sources of values: combined, widened, streamed tensor by tensor, and rewritten in another format."""
