"""The folder of a run's logs, ``version_N``: taken by one run alone, also if several start at the same moment."""

from __future__ import annotations

import os


def claim(root: str, version: int) -> int:
    """Make the folder ``version_N`` of a new run.

    Making a folder either succeeds or fails because it exists, also if several processes try at once. So no other run
    has the same one.

    Args:
        root: folder of the runs.
        version: the number to begin with.

    Returns:
        N: ``version``, or the next number whose folder was not there.
    """
    os.makedirs(root, exist_ok=True)
    while True:
        try:
            os.mkdir(os.path.join(root, f"version_{version}"))
        except FileExistsError:
            version += 1
        else:
            return version
