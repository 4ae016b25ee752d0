"""Checkpoints of a strategy: Lightning's entries and canonical tensors as one sharded folder, and back.

:mod:`contents` says what a rank holds, :mod:`saving` writes it, :mod:`resuming` reads it into a run, :mod:`whole` into
a module of one process; :mod:`hooks` answers what Lightning asks of a strategy.
"""
