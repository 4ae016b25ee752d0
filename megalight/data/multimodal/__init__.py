"""Conversations with images."""
