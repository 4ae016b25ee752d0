"""Cases of :mod:`benchmarks.mixers`: ops and layers that mix tokens, and the ways to do them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalight.errors import MegalightError
from megalight.imports import has
from megalight.nn.init import initialize
from megalight.ops import use_backends
from megalight.registry import BackendRegistry, load_plugins

GROUPS = ("attention", "mla", "mamba")


class Missing(MegalightError):
    """A peer is not here."""


class Way(NamedTuple):
    """One way to do a case.

    Attributes:
        fn: from inputs to the output.
        weights: parameters that get gradients beside the inputs.
        choices: op -> backend, in force while forward and backward run.
    """

    fn: Callable[..., Tensor]
    weights: tuple[Tensor, ...] = ()
    choices: tuple[tuple[str, str], ...] = ()

    def output(self, inputs: Sequence[Tensor]) -> Tensor:
        """Run forward."""
        with chosen(self.choices):
            return self.fn(*inputs)

    def gradients(self, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        """Run forward and backward; return the output and the gradients of the inputs."""
        with chosen(self.choices):
            out = self.fn(*inputs)
            grads = torch.autograd.grad(out, [*inputs, *self.weights], grad)
        return [out.detach(), *grads[: len(inputs)]]


@dataclass
class Case:
    """One op or layer at one shape.

    Attributes:
        name: what it is, with its shape.
        work: operations or bytes of forward, and of forward and backward.
        tokens: number of tokens that are timed.
        inputs: number of tokens -> inputs in bfloat16.
        ways: name -> (number of tokens -> way). A way that cannot serve raises, with the reason.
        peers: the same of other packages.
        exact: number of tokens -> the way to compare with, which gets the inputs in float64.
        unit: of ``work``: ``operations`` or ``bytes``.
        aim: least share of the rate to compare with.
        checked: number of tokens of the check.
        tolerance: largest relative difference from the exact results.
    """

    name: str
    work: tuple[float, float]
    tokens: int
    inputs: Callable[[int], list[Tensor]]
    ways: dict[str, Callable[[int], Way]]
    exact: Callable[[int], Way]
    peers: dict[str, Callable[[int], Way]] = field(default_factory=dict)
    unit: str = "operations"
    aim: float | None = None
    checked: int = 999
    tolerance: float = 2e-2


@contextmanager
def chosen(choices: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Make ``auto`` mean the given backends."""
    if choices:
        use_backends(**dict(choices))
    try:
        yield
    finally:
        if choices:
            use_backends(**{op: "auto" for op, _ in choices})


def backends(
    registry: BackendRegistry[Any, Any], make: Callable[[int, str], Way], skip: Sequence[str] = ()
) -> dict[str, Callable[[int], Way]]:
    """Return the ways of an op: ``auto``, and each backend of our own."""
    load_plugins()
    own = [name for name, backend in registry._backends.items() if backend.plugin is None and name not in skip]
    return {name: partial(_named, make, name) for name in ("auto", *own)}


def packages(registry: BackendRegistry[Any, Any], make: Callable[[int, str], Way]) -> dict[str, Callable[[int], Way]]:
    """Return the ways of an op by backends of plugins."""
    load_plugins()
    found = [name for name, backend in registry._backends.items() if backend.plugin is not None]
    return {name: partial(_named, make, name) for name in found}


def _named(make: Callable[[int, str], Way], name: str, tokens: int) -> Way:
    return make(tokens, name)


def need(*packages: str) -> None:
    """Check that a peer's packages are here.

    Raises:
        Missing: one is not.
    """
    for package in packages:
        if not has(package):
            raise Missing(f"{package} is not installed")


def values(module: nn.Module, device: str) -> Any:
    """Give a module on meta memory and its initial values, and convert it to bfloat16."""
    module = module.to_empty(device=device)
    with torch.no_grad():
        initialize(module, seed=1)
    return module.to(torch.bfloat16)


def random(device: str, *shape: int) -> Tensor:
    """Return normal values in bfloat16."""
    return torch.randn(*shape, device=device).to(torch.bfloat16)
