"""Documents end to end, cut into samples of equal length, for GPT."""
