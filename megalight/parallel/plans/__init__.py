"""Plans: how each family of modules splits."""
