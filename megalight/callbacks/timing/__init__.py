"""Callbacks that time a run, and the clocks they share."""
