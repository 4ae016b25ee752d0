"""One-device modules."""
