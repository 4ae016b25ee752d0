"""Pairs of text segments with masked words, for BERT."""
