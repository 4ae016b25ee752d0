"""Files of others: torch's Distributed Checkpoint, pickles, and the single files of Lightning."""
