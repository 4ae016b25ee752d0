"""Random streams for dropout: equal on all ``tp`` ranks where they compute the same, different where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalight.errors import LayoutError, nearest
from megalight.nn.init import key
from megalight.parallel.mesh import ParallelMesh

STREAMS: dict[str, tuple[str, ...]] = {"tensor": ("tp",)}
"""Stream -> the mesh axes along which it differs."""


class RandomStreams:
    """The default stream is torch's own generators, equal along ``tp``; :meth:`fork` gives others for a moment.

    A fork has no state of its own: its seed is drawn from the host's default generator and mixed with the rank's
    coordinates. Whatever restores the default generators therefore restores all streams: activation recompute
    (``torch.utils.checkpoint`` does), a checkpoint, a user's own ``torch.manual_seed``.

    Attributes:
        data_seed: for generators that draw data: different along ``dp`` alone; all ranks of a replica read the same.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self.data_seed = 0

    def seed(self, seed: int) -> None:
        """Seed the default stream: equal along ``tp``, different along ``dp``, ``cp`` and ``pp``."""
        self.data_seed = key(seed, "data", self.mesh.rank("dp"))
        torch.manual_seed(key(seed, "random", *(self.mesh.rank(axis) for axis in ("dp", "cp", "pp"))))

    @contextmanager
    def fork(self, name: str, device: torch.device | str = "cpu") -> Iterator[None]:
        """Random numbers on ``device`` come from the stream ``name`` inside the context.

        Ranks that differ only along the stream's axes must enter the same forks in the same order.

        Raises:
            LayoutError: no such stream.
        """
        if name not in STREAMS:
            raise LayoutError(f"unknown random stream {name!r}; known: {', '.join(STREAMS)}." + nearest(name, STREAMS))
        coordinates = [self.mesh.rank(axis) for axis in STREAMS[name]]
        drawn = int(torch.randint(2**62, (), device="cpu"))
        generator = _default_generator(torch.device(device))
        state = generator.get_state()
        generator.manual_seed(key(drawn, name, *coordinates))
        try:
            yield
        finally:
            generator.set_state(state)

    def state_dict(self) -> dict[str, Tensor]:
        """Generator states of this rank: device type -> state."""
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; a device type that is not here is passed over."""
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
