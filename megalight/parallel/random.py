"""Random streams for dropout: equal on all ``tp`` ranks that compute the same, different on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megalight.errors import LayoutError, nearest
from megalight.nn.init import key
from megalight.parallel.mesh import ParallelMesh

STREAMS: dict[str, tuple[str, ...]] = {"tensor": ("tp",)}
"""Stream -> the mesh axes along which it differs. In addition, all streams differ along ``dp``, ``cp`` and ``pp``.

So ``tensor`` differs between any two ranks, and also serves modules that differ along expert axes."""


class RandomStreams:
    """Random streams: the default one is torch's own generators, equal along ``tp``; :meth:`fork` switches to others.

    A fork has no state of its own. Its seed is drawn from the host's default generator and combined with the rank's
    coordinates. So whatever restores the default generators also restores all streams: activation recompute
    (``torch.utils.checkpoint``), a checkpoint, or a user's ``torch.manual_seed``.

    A CUDA graph cannot seed a generator while it runs. So between :meth:`persist` and :meth:`forget` each stream has a
    generator of its own. :meth:`begin` seeds it once a step, and all forks of the step continue it.

    Args:
        mesh: the mesh of ranks.
        replica: ranks with the same number read the same data. None: the place along ``dp``.

    Attributes:
        persistent: these generators, by stream; empty while forks have no state.
        data_seed: for generators that draw data: different only between replicas.
    """

    def __init__(self, mesh: ParallelMesh, replica: int | None = None) -> None:
        self.mesh = mesh
        self._replica = replica
        self.data_seed = 0
        self.persistent: dict[str, torch.Generator] = {}
        self._own: list[torch.Generator] = []

    @property
    def replica(self) -> int:
        """The number of this rank's data: its place along ``dp``, if no other was given."""
        return self.mesh.rank("dp") if self._replica is None else self._replica

    def seed(self, seed: int) -> None:
        """Seed the default stream: equal along ``tp``, different along ``dp``, ``cp`` and ``pp``."""
        # Not by `tp`, `cp` and `pp`: these ranks read the same batch.
        self.data_seed = key(seed, "data", self.replica)
        torch.manual_seed(self._seed_here(seed))

    def seed_own(self, seed: int, device: torch.device) -> None:
        """Seed this model's own generators, by its own mesh, for :meth:`own_generators`."""
        # Two generators on a GPU: host code draws too.
        kinds = {torch.device("cpu"), device}
        self._own = [torch.Generator(kind).manual_seed(self._seed_here(seed)) for kind in kinds]

    @contextmanager
    def own_generators(self) -> Iterator[None]:
        """Draw from this model's own generators inside the context, so that the draws of other models do not change."""
        with ExitStack() as stack:
            for generator in self._own:
                stack.callback(swap_state(_default_generator(generator.device), generator))
            yield

    @property
    def _place(self) -> dict[str, tuple[int, int]]:
        """This rank's place along each axis that a stream differs by, and the axis's size."""
        return {axis: (self.mesh.rank(axis), self.mesh.size(axis)) for axis in ("dp", "cp", "pp", "tp")}

    def _seed_here(self, seed: int) -> int:
        return key(seed, "random", *(self.mesh.rank(axis) for axis in ("dp", "cp", "pp")))

    @contextmanager
    def fork(self, name: str, device: torch.device | str = "cpu") -> Iterator[None]:
        """Draw random numbers on ``device`` from the stream ``name`` inside the context.

        Ranks that differ only along the stream's axes must enter the same forks in the same order.

        Raises:
            LayoutError: there is no such stream.
        """
        if name not in STREAMS:
            raise LayoutError(f"unknown random stream {name!r}; known: {', '.join(STREAMS)}." + nearest(name, STREAMS))
        default = _default_generator(torch.device(device))
        # A persistent stream goes on where its last fork ended. A graph that is replayed continues it as well.
        if name in self.persistent and self.persistent[name].device.type == default.device.type:
            back = swap_state(default, self.persistent[name])
            try:
                yield
            finally:
                back()
            return
        # Drawn from the host's generator on all ranks, also on those that differ in the stream: so the default streams
        # stay equal.
        seed = self._draw_seed(name)
        # The default generator is borrowed: functions such as `dropout` draw from no other one.
        state = default.get_state()
        default.manual_seed(seed)
        try:
            yield
        finally:
            default.set_state(state)

    def persist(self, device: torch.device) -> None:
        """Give every stream a generator of its own on ``device``; from now on call :meth:`begin` before each step."""
        self.persistent = {name: torch.Generator(device) for name in STREAMS}

    def begin(self) -> None:
        """Begin a step: seed the streams that have their own generators."""
        for name, generator in self.persistent.items():
            generator.manual_seed(self._draw_seed(name))

    def forget(self) -> None:
        """Remove the streams' own generators; forks have no state again."""
        self.persistent = {}

    def _draw_seed(self, name: str) -> int:
        coordinates = [self.mesh.rank(axis) for axis in STREAMS[name]]
        # On the CPU: a draw on the GPU would make the host wait for its value.
        return key(int(torch.randint(2**62, (), device="cpu")), name, *coordinates)

    def state_dict(self) -> dict[str, Any]:
        """Return generator states of this rank: device type -> state, and ``place``, the rank they are for."""
        states: dict[str, Any] = {"place": self._place, "cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore the states of :meth:`state_dict`; device types that are not available here are ignored.

        States of another layout are ignored, too: ranks along ``tp`` would draw different numbers from them.
        """
        if states.get("place") != self._place:
            return
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def swap_state(default: torch.Generator, own: torch.Generator) -> Callable[[], object]:
    """Let ``default`` draw from ``own``; return a function that ends this. On a GPU, a graph may capture both."""
    if default.device.type == "cuda":
        # The state object itself changes hands, not its bytes: a captured graph advances the object
        # that it has registered.
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(own)
        return partial(default.graphsafe_set_state, before)
    _exchange(default, own)
    return partial(_exchange, default, own)


def _exchange(one: torch.Generator, other: torch.Generator) -> None:
    state = one.get_state()
    one.set_state(other.get_state())
    other.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
