"""Checkpoints in remote storage (``s3://``, ``gs://``, ``memory://``, ...), through fsspec. No torch in here.

An address imports this package, also when another process unpickles it, and so registers all that differs for it.
"""

from megalight.checkpoint.disk.remote import saves  # noqa: F401 (registers what checkpoints need)
from megalight.checkpoint.disk.remote.address import Address

__all__ = ["Address"]
