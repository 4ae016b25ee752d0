"""Rules for parallel degrees, whatever the model. This file imports no torch, so that commands can check them early."""

from __future__ import annotations

from collections.abc import Iterable

from megalight.errors import ConfigurationError, LayoutError, nearest

BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi", "fake")
"""Backends of collectives that torch knows by itself."""


def check_degrees(
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_pipeline: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int = 1,
) -> None:
    """Refuse parallel degrees that cannot work with any number of ranks.

    Raises:
        LayoutError: a degree is below 1, or sequence parallelism would have no effect.
    """
    check_at_least_one("tensor_parallel", tensor_parallel)
    check_at_least_one("context_parallel", context_parallel)
    check_at_least_one("pipeline_parallel", pipeline_parallel)
    check_at_least_one("virtual_pipeline", virtual_pipeline)
    check_at_least_one("expert_parallel", expert_parallel)
    check_at_least_one("expert_tensor_parallel", expert_tensor_parallel)
    check_sequence_parallel(sequence_parallel, tensor_parallel)


def check_world_size(
    world_size: int,
    *,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int = 1,
) -> None:
    """Refuse a number of ranks that the degrees do not divide.

    Raises:
        LayoutError: it is no multiple of the product of the degrees.
    """
    for names, product in (
        ("tp x cp x pp", tensor_parallel * context_parallel * pipeline_parallel),
        ("etp x ep x pp", expert_tensor_parallel * expert_parallel * pipeline_parallel),
    ):
        if world_size % product:
            raise LayoutError(
                f"world size {world_size} is not a multiple of {names} = {product}. "
                f"Use {product} x n processes, or lower a degree."
            )


def check_at_least_one(name: str, value: int) -> None:
    """Refuse counts below one."""
    if value < 1:
        raise LayoutError(f"{name}={value}; it must be at least 1.")


def check_sequence_parallel(sequence_parallel: bool, tensor_parallel: int) -> None:
    """Raise if sequence parallelism would have no effect.

    Raises:
        LayoutError: there is no tensor parallelism.
    """
    if sequence_parallel and tensor_parallel == 1:
        raise LayoutError(
            "sequence_parallel=True needs tensor_parallel > 1: it splits the activations between tensor-parallel "
            "layers. Set tensor_parallel, or leave sequence_parallel off."
        )


def check_timeout(seconds: float) -> None:
    """Refuse timeouts that no collective can meet."""
    if not seconds > 0:
        raise ConfigurationError(f"timeout_seconds={seconds:g}; it must be above 0. The default is 1800.")


def check_backend(name: str, others: Iterable[str] = ()) -> None:
    """Refuse backends of collectives that torch does not have.

    Args:
        name: the backend, or one for each type of device: ``cpu:gloo,cuda:nccl``.
        others: backends beside :data:`BACKENDS`, as somebody registered them.

    Raises:
        ConfigurationError: it is unknown.
    """
    known = [*dict.fromkeys((*BACKENDS, *others))]
    for part in name.lower().split(","):
        backend = part.rpartition(":")[2].strip()
        if backend not in known:
            raise ConfigurationError(
                f"process_group_backend={name!r}: there is no backend {backend!r}.{nearest(backend, known)} Choose "
                f"from {', '.join(known)}, or leave it out: nccl is taken on GPUs, gloo on CPUs."
            )


def check_measured(device: str) -> None:
    """Refuse to measure which micro-batch fits where memory has no limit.

    Args:
        device: its type: ``cpu``, ``cuda`` ...

    Raises:
        ConfigurationError: it is no GPU.
    """
    if device != "cuda":
        raise ConfigurationError(
            f"micro_batch_size='auto' measures the memory of a GPU, and this run is on {device}, whose memory has no "
            "stated limit. Give a number, or leave it out to run the whole batch at once."
        )


def replicas_of(units: int, tp: int, name: str, *, may_share: bool = True) -> int:
    """Return how many ``tp`` ranks hold the same unit: 1, or ``tp / units`` if there are fewer units than ranks.

    Raises:
        LayoutError: the units cannot be distributed evenly.
    """
    if units % tp == 0:
        return 1
    if may_share and tp % units == 0:
        return tp // units
    rule = "tp must divide this number, or be a multiple of it" if may_share else "tp must divide this number"
    degrees = [d for d in range(1, max(units, tp) + 1) if units % d == 0 or (may_share and d % units == 0)]
    below = [d for d in degrees if d <= tp][-4:]
    raise LayoutError(
        f"{name} consists of {units} units (heads, groups, or features), and tp={tp}: {rule}. "
        f"Choose tp from {', '.join(map(str, below))}, or change the model."
    )
