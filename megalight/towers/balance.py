"""Which replica of a tower reads which images, if both models have the same ranks."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(homes: Sequence[Sequence[int]], replicas: int) -> list[list[list[int]]]:
    """Divide images among replicas so that each has about as many rows.

    The longest image goes first, each to the replica with the fewest rows so far (LPT, Graham 1969): the largest share
    is at most 4/3 of the best division's.

    Args:
        homes: rows of each image, for each replica of the language model.
        replicas: number of replicas of the tower.

    Returns:
        for each replica of the tower and each home the indices of its images, ascending.
    """
    found: list[list[list[int]]] = [[[] for _ in homes] for _ in range(replicas)]
    loads = [0] * replicas
    images = [(-length, home, index) for home, lengths in enumerate(homes) for index, length in enumerate(lengths)]
    for length, home, index in sorted(images):
        least = loads.index(min(loads))
        loads[least] -= length
        found[least][home].append(index)
    return [[sorted(own) for own in each] for each in found]
