"""Checkpoints of a strategy: one sharded folder with Lightning's entries and canonical tensors.

:mod:`saving` writes a checkpoint, :mod:`resuming` reads it into a run or into a module of one
process. :mod:`hooks` has the methods of a strategy that Lightning calls for checkpoints.
"""
