"""What the Lightning modules of all model families share."""
