"""A second model on the same ranks that is not trained, with its own layout: a teacher, for example.

The frozen model runs forward over all micro-batches of a step, before the step's schedule. They are redistributed over
*its* data-parallel replicas, and its results go back, in order, to the ranks that hold the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp

from megalight.parallel.apply import check_split
from megalight.parallel.collectives import as_bytes
from megalight.parallel.graphs.static import tensors_of, with_tensors
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh, new_group
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.executor import Executor
from megalight.parallel.pipeline.p2p_communication import Carry, CarryEntry, Form, form_of, signature
from megalight.parallel.pipeline.timeline import Timetable
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.random import RandomStreams
from megalight.parallel.source import RenamedSource, Source


@dataclass(frozen=True)
class TensorRoute:
    """The holders and receivers of one list of tensors. All ranks know all routes.

    Attributes:
        holders: global ranks that have equal copies of the tensors.
        needers: global ranks that need the tensors.
        form: shapes and dtypes.
    """

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    form: Form

    def source(self, needer: int) -> int:
        """Return the rank that sends to ``needer``; ``needer`` itself if it has the tensors already."""
        if needer in self.holders:
            return needer
        # Spread over the holders, so that no single rank sends everything.
        return self.holders[self.needers.index(needer) % len(self.holders)]


def exchange(
    routes: Sequence[TensorRoute], held: Sequence[Sequence[Tensor] | None], rank: int, device: torch.device
) -> list[list[Tensor] | None]:
    """Send the tensors of every route to the ranks that need them, each message directly from a holder.

    All ranks that any route names call this together, with the same routes.

    Args:
        held: for each route, its tensors if this rank holds them.
        rank: this rank.
        device: the device from which and to which tensors are sent.

    Returns:
        for each route, its tensors in the order of the form if this rank needs them, else None.
    """
    operations: list[P2POp] = []
    found: list[list[Tensor] | None] = []
    # All ranks walk through the routes in the same order, so the n-th send to a rank meets its n-th receive.
    for route, mine in zip(routes, held, strict=True):
        for needer in route.needers:
            if needer != rank and route.source(needer) == rank:
                assert mine is not None
                sent = [tensor.to(device).contiguous() for tensor in mine]
                operations += [P2POp(dist.isend, as_bytes(tensor), needer) for tensor in sent if tensor.numel()]
        if rank not in route.needers:
            found.append(None)
        elif route.source(rank) == rank:
            assert mine is not None
            found.append(list(mine))
        else:
            room = [entry.buffer(device) for entry in route.form]
            source = route.source(rank)
            operations += [P2POp(dist.irecv, as_bytes(tensor), source) for tensor in room if tensor.numel()]
            found.append(room)
    # Posted together: pairs of ranks that send to each other would block if each waited for its own send first.
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return found


class FrozenTask(Protocol):
    """The interface of a frozen model. A ``MegalightModule`` implements it.

    Attributes:
        token_multiple: set to the requirement of the model's layout: packed token counts must be multiples of it.

    With ``FrozenModel.submodule``, the attribute ``submodule`` is set to that part.
    """

    token_multiple: int

    def build_model(self) -> nn.Module:
        """Return the single-device model, on the meta device."""

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        """Run one chunk on one micro-batch. The last chunk returns the results: whole tensors, equal along ``tp``."""


@dataclass(frozen=True, kw_only=True)
class FrozenSubmodule:
    """A part of a frozen model that the loss of the trained model computes with, such as a teacher's head.

    It is split over ``tp`` like the trained model, and only ranks of its last pipeline stage hold it.

    Attributes:
        build: returns the part, on meta.
        name: canonical name of the part in the frozen model.
        plan: how it is split.
        source: its values, by canonical names that begin with ``<name of the frozen model>.<name>.``.
    """

    build: Callable[[], nn.Module]
    name: str
    plan: ParallelizePlan
    source: Source

    def place(self, name: str, mesh: ParallelMesh, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
        """Build it with its values; None on stages that do not need it. All ranks call this together.

        Args:
            name: name of the frozen model.
            mesh: mesh of the trained model.
        """
        if mesh.rank("pp") < mesh.pp - 1:
            # All ranks read a source together, also those that need nothing of it.
            self.source.fill(())
            return None
        with torch.device("meta"):
            root = self.build()
        # Of the same `tp` groups as the trained model, but not cut into stages, and without sequences to divide.
        layout, name = Layout(tensor_parallel=mesh.tp, plan=self.plan), f"{name}.{self.name}"
        flat = layout.mesh(mesh.world_size, mesh.global_rank)
        return freeze(
            ParallelModel.build(root, flat, layout, name=name, device=device, dtype=dtype, source=self.source)
        ).root


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """Declaration of a frozen model.

    Attributes:
        task: the model and its forward pass.
        layout: its own, over the ranks of the trained model; the plan of a ``MegalightModule`` is its own.
        source: its values; None: initial values drawn with ``seed``.
        saved_as: the prefix of its names in the source.
        seed: seed of initial values, and of random numbers that it draws.
        dtype: dtype of its parameters; None: that of the run.
        submodule: a part of it that is placed on the ranks of the trained model's last stage; ``task.submodule`` is set
            to it, and to None on other stages.
        for_last_stage: only ranks of the trained model's last stage get results. On other stages they are empty.
    """

    task: FrozenTask
    layout: Layout = field(default_factory=Layout)
    source: Source | None = None
    saved_as: str = "model"
    seed: int = 0
    dtype: torch.dtype | None = None
    submodule: FrozenSubmodule | None = None
    for_last_stage: bool = False

    def check(self, mesh: ParallelMesh, dtype: torch.dtype, device: torch.device) -> None:
        """Raise if the layout does not fit, before there are process groups.

        Args:
            mesh: mesh of the trained model.

        Raises:
            LayoutError: a size of the model is not divisible.
        """
        # On meta: a check must not take memory for a second model.
        with torch.device("meta"):
            root = self.task.build_model()
        check_split(root, self.mesh(mesh), self._layout(root), self.dtype or dtype, device)

    def mesh(self, mesh: ParallelMesh) -> ParallelMesh:
        """Return the same ranks in this model's layout.

        Raises:
            LayoutError: the ranks are not divisible.
        """
        return self.layout.mesh(mesh.world_size, mesh.global_rank)

    def build(self, name: str, mesh: ParallelMesh, dtype: torch.dtype, device: torch.device) -> FrozenRun:
        """Build the model with its values on the ranks of the trained model. All of them call this together.

        Args:
            name: prefix of its canonical names.
            mesh: mesh of the trained model.
        """
        with torch.device("meta"):
            root = self.task.build_model()
        source = self.source
        if source is not None and self.saved_as != name:
            source = RenamedSource(source, f"{name}.", f"{self.saved_as}.")
        model = freeze(
            ParallelModel.build(
                root,
                self.mesh(mesh),
                self._layout(root),
                name=name,
                device=device,
                dtype=self.dtype or dtype,
                seed=self.seed,
                source=source,
            )
        )
        self.task.token_multiple = model.token_multiple
        if self.submodule is not None:
            self.task.submodule = self.submodule.place(name, mesh, self.dtype or dtype, device)  # type: ignore[attr-defined]
        return FrozenRun(model, self.task, mesh, self.seed, self.for_last_stage)

    def _layout(self, root: nn.Module) -> Layout:
        plan = getattr(self.task, "plan", None)
        return self.layout if plan is None or self.layout.plan is not None else replace(self.layout, plan=plan(root))


class FrozenRun:
    """Runs a frozen model over the micro-batches of another model's steps.

    Args:
        model: in evaluation mode.
        mesh: mesh of the trained model, over the same ranks.
        seed: seed of the model's random streams. They are its own, so its draws do not affect those of other models.
        for_last_stage: only the last stage of the trained model gets results.

    Attributes:
        model: the frozen model, which is not a submodule of the trained model.
    """

    def __init__(
        self, model: ParallelModel, task: FrozenTask, mesh: ParallelMesh, seed: int, for_last_stage: bool = False
    ) -> None:
        self.model = model
        self.task = task
        self.streams = RandomStreams(model.mesh)
        self.streams.seed_own(seed, model.device)
        messages = model.layout.pipeline.messages
        self._executor = Executor(model.chunks, model.pipeline_layout, model.mesh, model.device, messages=messages)
        self._timetable = Timetable(model.layout.pipeline, model.pipeline_layout, model.mesh)
        self._ours, self._theirs = mesh.replicas(), model.mesh.replicas()
        # Only the last stage has results. Its `tp` ranks all have the same ones, and share the sending.
        self._answering = model.mesh.replicas(model.mesh.pp - 1)
        # Other stages would keep the results of all micro-batches of a step for nothing.
        self._asking = mesh.replicas(mesh.pp - 1 if for_last_stage else None)
        self._replica, self._own = mesh.rank("dp"), model.mesh.rank("dp")
        self._rank = mesh.global_rank
        self._forms: dict[Hashable, Form] = {}
        self._host: dist.ProcessGroup | None = None
        if mesh.world_size > 1:
            gloo = dist.get_backend() == "gloo"
            # NCCL creates a group's communicator in its first collective; messages between some ranks cannot do so.
            dist.all_reduce(torch.zeros(1, device=model.device))
            self._host = mesh.everyone if gloo else new_group(mesh.members, "frozen models", backend="gloo")

    def __call__(self, micro_batches: Sequence[Any]) -> list[Carry]:
        """Return the model's results for each micro-batch, in order. All ranks call this together.

        Args:
            micro_batches: those of this replica of the trained model, of whole sequences; the same on all ranks of the
                replica, also along ``cp``.
        """
        homes, skeletons = self._all(micro_batches)
        wanted = len(skeletons)
        # Replicas that exchange tokens of experts run equally many: the last micro-batch again, for nobody.
        again = -wanted % len(self._theirs) if self.model.coupling is not None else 0
        homes, skeletons = homes + homes[-1:] * again, skeletons + skeletons[-1:] * again
        if homes[-1] == self._replica:
            micro_batches = [*micro_batches, *[micro_batches[-1]] * again]
        # Replica of the frozen model for each micro-batch: equal, consecutive shares.
        share = [index * len(self._theirs) // len(skeletons) for index in range(len(skeletons))]
        inputs = [
            TensorRoute(self._ours[home], self._theirs[replica], _form(tensors_of(skeleton)))
            for home, replica, skeleton in zip(homes, share, skeletons, strict=True)
        ]
        given = iter(micro_batches)
        # Every rank of a replica holds the same micro-batches, so each can serve as a source.
        held = [tensors_of(next(given)) if home == self._replica else None for home in homes]
        arrived = exchange(inputs, held, self._rank, self.model.device)
        mine = [index for index, replica in enumerate(share) if replica == self._own]
        batches = [with_tensors(skeletons[index], iter(arrived[index] or [])) for index in mine]
        answers = dict(zip(mine, self._forward(batches), strict=False))
        forms = self._forms_of(skeletons, share, answers)
        # The way back: from the last stage of each frozen replica to the ranks that need the results.
        outputs = [
            TensorRoute(self._answering[replica], self._asking[home], form)
            for home, replica, form in zip(homes[:wanted], share, forms, strict=False)
        ]
        results = exchange(
            # Ranks on other stages have no answers, and only take part in the exchange.
            outputs,
            [list(answers[index].values()) if index in answers else None for index in range(len(outputs))],
            self._rank,
            self.model.device,
        )
        if self._rank not in self._asking[self._replica]:
            return [{} for _ in micro_batches]
        found = zip(forms, results, strict=False)
        return [
            {entry.name: tensor for entry, tensor in zip(form, tensors, strict=True)}
            for form, tensors in found
            if tensors is not None
        ]

    def _forward(self, batches: Sequence[Any]) -> list[Carry]:
        if not batches:
            return []
        schedule = self._timetable("forward_only", len(batches))
        # In evaluation mode the model may still draw. Its draws must not move those of the trained model.
        with self.streams.own_generators():
            return self._executor.forward(schedule, batches, self.task.forward_step)

    def _all(self, micro_batches: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Return replica and skeleton (tensors on meta) of the micro-batches of all replicas, replica by replica."""
        # Shapes and numbers travel by the host. The tensors follow between devices, directly to
        # where they are needed.
        skeletons = [with_tensors(b, (t.to("meta") for t in tensors_of(b))) for b in micro_batches]
        if len(self._ours) == 1:
            return [0] * len(skeletons), skeletons
        # One rank speaks for its replica.
        speaks = self._rank == self._ours[self._replica][0]
        told = self._tell(skeletons if speaks else [])
        rows = [(home, skeleton) for home, ranks in enumerate(self._ours) for skeleton in told[ranks[0]]]
        return [home for home, _ in rows], [skeleton for _, skeleton in rows]

    def _forms_of(self, skeletons: Sequence[Any], share: Sequence[int], answers: Mapping[int, Carry]) -> list[Form]:
        """Return the forms of all results; forms for micro-batches like earlier ones are cached."""
        keys = [signature(skeleton) for skeleton in skeletons]
        # All ranks keep the same cache, so they agree on what is unknown without a message.
        unknown = [index for index, key in enumerate(keys) if key is None or key not in self._forms]
        here = {index: _form_of(answers[index]) for index in unknown if index in answers}
        told = self._tell(here) if unknown else {}
        fresh = {index: told[self._answering[share[index]][0]][index] for index in unknown}
        self._forms.update({keys[index]: form for index, form in fresh.items() if keys[index] is not None})
        return [fresh[index] if index in fresh else self._forms[key] for index, key in enumerate(keys)]

    def _tell(self, value: Any) -> dict[int, Any]:
        """All-gather a value of every rank, by global rank."""
        if self._host is None:
            return {self._rank: value}
        values: list[Any] = [None] * dist.get_world_size(self._host)
        dist.all_gather_object(values, value, group=self._host)
        return dict(zip(dist.get_process_group_ranks(self._host), values, strict=True))


def freeze(model: ParallelModel) -> ParallelModel:
    """Put a model into evaluation mode, without gradients: engines and autograd leave its parameters alone."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def _form(tensors: Sequence[Tensor]) -> Form:
    return tuple(CarryEntry(str(i), tuple(t.shape), t.dtype, False) for i, t in enumerate(tensors))


def _form_of(carry: Carry) -> Form:
    return tuple(entry._replace(requires_grad=False) for entry in form_of(carry))
