"""A bridge between two models on disjoint meshes: it sends activations forward and their gradients back."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError, MegalightError
from megalight.parallel.collectives import Message, as_bytes, receive_text, send_text, start
from megalight.parallel.mesh import ParallelMesh, new_group

__all__ = ["BridgeCommunicator"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a message.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        dim: the batch dim, along which tensors are concatenated and split.
        gradient: whether the sender needs its gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    gradient: bool

    @property
    def rows(self) -> int:
        """Size along the batch dim."""
        return self.shape[self.dim]

    def with_rows(self, rows: int) -> TensorSpec:
        """Return the same spec with another number of rows."""
        return replace(self, shape=(*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))

    def __str__(self) -> str:
        return f"{list(self.shape)} {_name(self.dtype)}{' that wants a gradient' * self.gradient}"


Header = dict[str, TensorSpec]
"""Specs by name, in the order in which all ranks send and receive the tensors."""


def encode(header: Header) -> bytes:
    """Encode a header as bytes."""
    table = {name: (spec.shape, _name(spec.dtype), spec.dim, spec.gradient) for name, spec in header.items()}
    return json.dumps(table).encode()


def decode(text: bytes) -> Header:
    """Decode a header written by :func:`encode`."""
    return {
        name: TensorSpec(tuple(shape), getattr(torch, dtype), dim, gradient)
        for name, (shape, dtype, dim, gradient) in json.loads(text).items()
    }


def joined(headers: Mapping[int, Header]) -> Header:
    """Return the header of the concatenated rows of all senders.

    Args:
        headers: global rank of the sender -> its header.

    Raises:
        LayoutError: the headers differ in more than their rows.
    """
    (first, reference), *others = headers.items()
    for rank, header in others:
        # Rows may differ, as replicas read different batches. Nothing else may: it would be
        # joined without an error.
        if _without_rows(header) != _without_rows(reference):
            raise LayoutError(
                f"ranks {first} and {rank} sent messages that cannot be joined: {_shown(reference)}; {_shown(header)}. "
                "Names, dtypes, required gradients and all sizes except the batch dim must be equal. Check that no "
                "replica skipped or repeated a message."
            )
    return {
        name: spec.with_rows(sum(header[name].rows for header in headers.values())) for name, spec in reference.items()
    }


def _without_rows(header: Header) -> Header:
    return {name: spec.with_rows(0) for name, spec in header.items()}


def _shown(header: Header) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in header.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Rows = Mapping[str, Sequence[int]]
"""Name of a tensor -> number of its rows for each peer."""

Parts = Sequence[tuple[int, Tensor]]
"""Tensors, each with the global rank that it goes to or comes from."""


@dataclass(frozen=True)
class Receiving(Message):
    """Receives in flight, with the rows that are not contiguous in their tensor, and their buffers."""

    strided: Sequence[tuple[Tensor, Tensor]]

    def wait(self) -> list[Tensor]:
        """Wait for all, and copy the buffers to their rows. On a GPU the current stream waits, not the host."""
        super().wait()
        # After all waits: the copies queue behind the receives on the same stream.
        for place, buffer in self.strided:
            place.copy_(buffer)
        return self.tensors


def send_rows(
    tensors: Mapping[str, Tensor], header: Header, rows: Rows, peers: Sequence[int], group: ProcessGroup
) -> Message:
    """Start to send each global rank in ``peers`` its rows."""
    # A split along a dim other than 0 is strided, and messages are contiguous. The copies live as long as the sends.
    return start(dist.isend, [(peer, part.contiguous()) for peer, part in _cut(tensors, header, rows, peers)], group)


def start_receive_rows(
    tensors: Mapping[str, Tensor], header: Header, rows: Rows, peers: Sequence[int], group: ProcessGroup
) -> Receiving:
    """Start to receive the rows of ``tensors`` from each global rank in ``peers``."""
    parts = _cut(tensors, header, rows, peers)
    # Contiguous rows are received in place; others land in a buffer, and `wait` copies them.
    buffers = [part if part.is_contiguous() else part.new_empty(part.shape) for _, part in parts]
    landing = [(peer, buffer) for (peer, _), buffer in zip(parts, buffers, strict=True)]
    strided = [(part, buffer) for (_, part), buffer in zip(parts, buffers, strict=True) if buffer is not part]
    return Receiving(**vars(start(dist.irecv, landing, group)), strided=strided)


def _cut(tensors: Mapping[str, Tensor], header: Header, rows: Rows, peers: Sequence[int]) -> Parts:
    """Return views of the rows of each peer, in the same order on both sides."""
    return [
        (peer, part)
        for name, tensor in tensors.items()
        # Detached: bytes travel, and autograd must not record the views.
        for peer, part in zip(peers, torch.split(tensor.detach(), list(rows[name]), header[name].dim), strict=True)
    ]


def spec_of(name: str, tensor: Tensor, batch_dim: int | Mapping[str, int], device: torch.device) -> TensorSpec:
    """Return the spec of a tensor.

    Raises:
        LayoutError: the tensor has no batch dim, or is on another type of device than the bridge.
    """
    dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(name)
    if dim is None:
        raise LayoutError(f"batch_dim of the bridge has no {name!r}; add it: batch_dim={{..., {name!r}: 0}}.")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LayoutError(
            f"{name} {list(tensor.shape)} has no batch dim {dim}; add one (make a number a tensor of one row), or give "
            "batch_dim by name."
        )
    # Only the type: the index differs between the GPUs of both sides.
    if tensor.device.type != device.type:
        raise LayoutError(
            f"{name} is on {tensor.device}, but the bridge sends {device.type} tensors; move it, or set the device of "
            "the bridge."
        )
    # Counted from the front, because a header says nothing about how the sender counted.
    return TensorSpec(tuple(tensor.shape), tensor.dtype, dim % tensor.ndim, tensor.requires_grad)


def rows_of(header: Header, parts: Rows, count: int) -> dict[str, Sequence[int]]:
    """Return the number of rows of each tensor for each of ``count`` replicas: from ``parts``, or as even as possible.

    Raises:
        LayoutError: ``parts`` has an unknown name, or numbers that do not sum to the rows.
    """
    if unknown := parts.keys() - header.keys():
        raise LayoutError(
            f"parts has {', '.join(sorted(unknown))}, but the message has no such tensor; remove it from parts."
        )
    rows: dict[str, Sequence[int]] = {}
    for name, spec in header.items():
        # The first replicas get one row more where it does not divide.
        even = [spec.rows // count + (place < spec.rows % count) for place in range(count)]
        rows[name] = own = list(parts.get(name, even))
        if len(own) != count or sum(own) != spec.rows or min(own) < 0:
            raise LayoutError(
                f"parts of {name} are {own}; give {count} numbers, one per destination replica, that sum to its "
                f"{spec.rows} rows."
            )
    return rows


def checked_gradients(grads: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of all ``tensors``, in their order; missing gradients are zeros.

    Raises:
        LayoutError: a gradient was not requested, or does not have the shape, dtype and device of its tensor.
    """
    if unknown := grads.keys() - tensors.keys():
        raise LayoutError(
            f"gradients of {', '.join(sorted(unknown))} were not requested; the message needs those of "
            f"{', '.join(tensors)}."
        )
    checked = {}
    for name, tensor in tensors.items():
        grad = grads.get(name)
        # The source waits for a gradient of every tensor that asked for one, used or not.
        grad = torch.zeros_like(tensor) if grad is None else grad.detach()
        # The source reads the bytes into its own shape and dtype: a difference would arrive as noise.
        for what in ("shape", "dtype", "device"):
            if getattr(grad, what) != getattr(tensor, what):
                raise LayoutError(
                    f"the gradient of {name} has {what} {getattr(grad, what)}, but the tensor has "
                    f"{getattr(tensor, what)}; send gradients in the order of the messages."
                )
        checked[name] = grad
    return checked


@dataclass(frozen=True)
class BridgeLane:
    """Data-parallel replicas that exchange messages: several sources and one destination, the reverse, or one each.

    Attributes:
        sources: the global ranks of each source replica's last pipeline stage; the last one leads.
        destinations: the global ranks of each destination replica's first pipeline stage; the first one leads.
    """

    sources: tuple[tuple[int, ...], ...]
    destinations: tuple[tuple[int, ...], ...]

    @property
    def source_leaders(self) -> tuple[int, ...]:
        """The ranks that send activations and receive gradients, one per source replica."""
        return tuple(replica[-1] for replica in self.sources)

    @property
    def destination_leaders(self) -> tuple[int, ...]:
        """The ranks that receive activations and send gradients, one per destination replica."""
        return tuple(replica[0] for replica in self.destinations)


def lanes(src: ParallelMesh, dest: ParallelMesh) -> tuple[BridgeLane, ...]:
    """Divide the replicas of both sides into the same number of runs of neighbors, so that rows keep their order.

    Raises:
        LayoutError: the meshes share ranks, or neither data-parallel degree divides the other.
    """
    shared = sorted(set(src.members) & set(dest.members))
    if shared:
        raise LayoutError(
            f"both meshes of the bridge have ranks {_listed(shared)}; they must be disjoint. Give the second mesh an "
            "offset: ParallelMesh(..., offset=n) begins at global rank n."
        )
    if src.dp % dest.dp and dest.dp % src.dp:
        raise LayoutError(
            f"the data-parallel degrees of the bridge are {src.dp} (source) and {dest.dp} (destination); one must "
            "divide the other. Change a degree of one mesh."
        )
    # As many lanes as the smaller side has replicas; each takes a run of the larger side.
    count = min(src.dp, dest.dp)
    sources, destinations = _runs(src, src.pp - 1, count), _runs(dest, 0, count)
    return tuple(BridgeLane(*pair) for pair in zip(sources, destinations, strict=True))


def _runs(mesh: ParallelMesh, stage: int, count: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the ranks of the replicas in one pipeline stage, in ``count`` runs of neighboring replicas."""
    # Neighboring replicas form a run, so rows keep the order in which the source read them.
    replicas, length = mesh.replicas(stage), mesh.dp // count
    return [tuple(replicas[first : first + length]) for first in range(0, mesh.dp, length)]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


@dataclass(frozen=True)
class _Crossed:
    """A message whose gradients have not come back yet, with its tensors that require a gradient."""

    tensors: dict[str, Tensor]
    header: Header
    rows: Rows


@dataclass(frozen=True)
class Arriving:
    """A message that this rank is receiving. All ranks of a replica must call :meth:`wait` once, in message order."""

    bridge: BridgeCommunicator
    tensors: dict[str, Tensor]
    header: Header
    receiving: Receiving | None

    def wait(self) -> dict[str, Tensor]:
        """Return the tensors of the message. On a GPU the current stream waits, not the host."""
        # The leader alone has received; the broadcast brings its tensors to the rest of the replica.
        if self.receiving is not None:
            self.receiving.wait()
        self.bridge.share(self.tensors)
        # Last: until here they are memory that is written to, which autograd need not know.
        for name, spec in self.header.items():
            self.tensors[name].requires_grad_(spec.gradient)
        return self.tensors


class BridgeCommunicator:
    """Connects two models on disjoint meshes, such as a vision tower and a language model.

    Messages are dicts of tensors. They go from the last pipeline stage of the source mesh to the first stage of the
    destination mesh. All ranks of these two stages make the same calls in the same order::

        # the source                                  # the destination
        bridge.send_forward({"x": encoder(images)})   x = bridge.recv_forward()["x"]
                                                      loss(decoder(x)).backward()
        bridge.backward()                             bridge.send_backward()
        bridge.finish()                               bridge.finish()

    **Replicas.** One of the data-parallel degrees must divide the other. If several source replicas send to one
    destination replica, their rows are concatenated along the batch dim in the order of replicas (fan-in). If one
    source replica sends to several, its rows are split (fan-out). Replicas may send different numbers of rows.
    Gradients go back in the same parts.

    **Inside a replica** one leader communicates. The source's tensors must be whole and equal on all its ``tp x cp``
    ranks (for example after the layer that ends a sequence-parallel region, and after
    :func:`~megalight.parallel.collectives.join` of the shares along ``cp``). All of these ranks get the whole
    gradients. All ``tp x cp`` ranks of the destination get the whole tensors. Their gradients must be whole and equal
    on all ``tp`` ranks, as those of split layers are; gradients of ``cp`` ranks are summed. Nothing is scaled.

    **Gradients.** A received tensor requires a gradient if the sent tensor did. A message with such a tensor must be
    answered by one ``send_backward``, in the order of the messages. Other messages are not answered.

    **Order.** Sends do not block, and each direction has its own channel, so both sides may send first. A receive waits
    for the header of the message (names, shapes, dtypes) in host memory. For the data, the stream of a GPU waits, not
    the host. Do not write to tensors that were sent before :meth:`finish`.

    Args:
        src_mesh, dest_mesh: the meshes, both with the ``global_rank`` of this process. All ranks of both must create
            the bridge at the same time. Ranks of neither mesh may create it too, but cannot use it.
        batch_dim: the dim along which rows are concatenated and split, for all tensors or by name. The sender's value
            counts.
        device: device of received tensors. None: the current CUDA device, or the CPU if the backend is gloo.

    Raises:
        LayoutError: the meshes share ranks or have ranks beyond the world size, or neither data-parallel degree divides
            the other.

    Attributes:
        is_source: whether this rank is in the last stage of the source mesh.
        is_destination: whether this rank is in the first stage of the destination mesh.
    """

    def __init__(
        self,
        src_mesh: ParallelMesh,
        dest_mesh: ParallelMesh,
        *,
        batch_dim: int | Mapping[str, int] = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if src_mesh.global_rank != dest_mesh.global_rank:
            raise LayoutError(
                f"the meshes of the bridge have the global ranks {src_mesh.global_rank} and {dest_mesh.global_rank}; "
                "both must have the global rank of this process."
            )
        # Pure arithmetic, so all ranks of both meshes agree on who sends to whom without a message.
        found = lanes(src_mesh, dest_mesh)
        last = max(src_mesh.members[-1], dest_mesh.members[-1])
        if dist.is_initialized() and last >= dist.get_world_size():
            raise LayoutError(
                f"the meshes of the bridge use ranks up to {last}, but there are only {dist.get_world_size()} "
                "processes; start more, or make a mesh smaller."
            )
        self.src_mesh, self.dest_mesh = src_mesh, dest_mesh
        self.batch_dim = batch_dim
        rank = src_mesh.global_rank
        self.is_source = any(rank in replica for lane in found for replica in lane.sources)
        self.is_destination = any(rank in replica for lane in found for replica in lane.destinations)
        self._crossed: deque[_Crossed] = deque()
        self._sending: list[Message] = []
        if not (self.is_source or self.is_destination):
            return
        # Lanes are disjoint, and each rank of the two stages is in one.
        self._lane = next(lane for lane in found if rank in sum(lane.sources + lane.destinations, ()))
        self._device = torch.device(device) if device is not None else _default_device()
        self._connect(self._lane, rank)

    def _connect(self, lane: BridgeLane, rank: int) -> None:
        """Create the groups: one for the replica, one on the host for headers, one per direction for data.

        On a GPU, each direction needs its own communicator. The operations of one communicator run one after another,
        so two sides that both send first would wait for each other.
        """
        replica = next(replica for replica in lane.sources + lane.destinations if rank in replica)
        mesh = self.src_mesh if self.is_source else self.dest_mesh
        # Both groups lie inside one stage, so other stages take no part in a broadcast.
        self._replica, self._context = mesh.group("cp", "tp"), mesh.group("cp")
        self._leader = replica[-1] if self.is_source else replica[0]
        self._leads = rank == self._leader
        if self._leads or self.is_destination:
            listeners = sum(lane.destinations, ())
            # Over gloo, because the host reads headers: they must not queue behind the work of a device.
            self._headers = new_group(sorted(lane.source_leaders + listeners), "headers of a bridge", "gloo")
        if self._leads:
            leaders = sorted(lane.source_leaders + lane.destination_leaders)
            self._forward, self._backward = (new_group(leaders, f"a bridge, {way}") for way in ("forward", "backward"))
            # Connect all members now: later some may have nothing to send.
            for group in (self._forward, self._backward):
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def send_forward(self, tensors: Mapping[str, Tensor], parts: Rows | None = None) -> None:
        """Send a message from the source, without waiting.

        Args:
            tensors: tensors of any dtype with the batch dim. They must be equal on all ``tp x cp`` ranks.
            parts: name -> number of rows for each destination replica. By default rows are divided as evenly as
                possible; give parts for packed tokens, which must be split between sequences.

        Raises:
            LayoutError: this rank is not in the last stage of the source, a tensor has no batch dim or is on another
                type of device, or ``parts`` do not sum to the rows.
        """
        lane = self._ends("send_forward", source=True)
        # Both sides go through the tensors by name, also if replicas list them in different orders.
        tensors = dict(sorted(tensors.items()))
        header = {name: spec_of(name, tensor, self.batch_dim, self._device) for name, tensor in tensors.items()}
        rows = rows_of(header, parts or {}, len(lane.destinations))
        if self._leads:
            for place, replica in enumerate(lane.destinations):
                own = {name: spec.with_rows(rows[name][place]) for name, spec in header.items()}
                self._keep(send_text(encode(own), replica, self._headers))
            # Headers go first: receivers allocate the tensors before the data comes.
            self._keep(send_rows(tensors, header, rows, lane.destination_leaders, self._forward))
        self._remember(tensors, header, rows)

    def recv_forward(self) -> dict[str, Tensor]:
        """Receive the next message at the destination: whole tensors, equal on all ranks of a replica.

        Raises:
            LayoutError: this rank is not in the first stage of the destination, or source replicas sent different
                tensors.
        """
        return self.start_recv_forward().wait()

    def start_recv_forward(self) -> Arriving:
        """Wait only for the header of the next message. Its data arrives while this rank computes something else.

        Raises:
            LayoutError: as in :meth:`recv_forward`.
        """
        lane = self._ends("recv_forward", source=False)
        # The host waits here: it must know shapes before it can allocate the tensors.
        headers = {leader: decode(receive_text(leader, self._headers)) for leader in lane.source_leaders}
        header = joined(headers)
        rows = {name: [found[name].rows for found in headers.values()] for name in header}
        tensors = {name: torch.empty(s.shape, dtype=s.dtype, device=self._device) for name, s in header.items()}
        receiving = None
        if self._leads:
            # Posted now, so that rows arrive while the caller computes something else.
            receiving = start_receive_rows(tensors, header, rows, lane.source_leaders, self._forward)
        self._remember(tensors, header, rows)
        return Arriving(self, tensors, header, receiving)

    def send_backward(self, grads: Mapping[str, Tensor | None] | None = None) -> None:
        """Send the gradients of the oldest message that has not been answered, without waiting.

        Args:
            grads: gradients by name, for tensors that require one. None for a name, or a missing name, means zeros.
                Default: the ``grad`` of the received tensors.

        Raises:
            MegalightError: no message waits for gradients.
            LayoutError: this rank is not in the first stage of the destination, a gradient was not requested, or it
                does not have the shape, dtype and device of its tensor.
        """
        lane = self._ends("send_backward", source=False)
        message = self._oldest("send_backward")
        given = {name: tensor.grad for name, tensor in message.tensors.items()} if grads is None else grads
        answer = checked_gradients(given, message.tensors)
        # Ranks along cp saw different tokens, so their gradients are terms of a sum. Ranks along tp have equal ones, so
        # only those with tp rank 0 take part; the leader is one. The caller may still read its gradients: sum copies.
        if self._context is not None and self.dest_mesh.rank("tp") == 0:
            answer = {name: grad.clone(memory_format=torch.contiguous_format) for name, grad in answer.items()}
            for grad in answer.values():
                dist.reduce(grad, self._leader, group=self._context)
        if self._leads:
            self._keep(send_rows(answer, message.header, message.rows, lane.source_leaders, self._backward))
        # Not before the sends are queued: after an error, the message is still the oldest.
        self._crossed.popleft()

    def recv_backward(self) -> dict[str, Tensor]:
        """Receive, at the source, the gradients of the oldest message that has none yet.

        Raises:
            MegalightError: no message waits for gradients.
            LayoutError: this rank is not in the last stage of the source.
        """
        lane = self._ends("recv_backward", source=True)
        message = self._oldest("recv_backward")
        # Rows arrive as bytes, which needs contiguous memory, whatever the strides of the sent tensors.
        grads = {
            name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in message.tensors.items()
        }
        if self._leads:
            start_receive_rows(grads, message.header, message.rows, lane.destination_leaders, self._backward).wait()
        # Only the leader has received: the other ranks of the replica get its copy.
        self.share(grads)
        self._crossed.popleft()
        return grads

    def send_forward_recv_backward(self, tensors: Mapping[str, Tensor], parts: Rows | None = None) -> dict[str, Tensor]:
        """Send a message, and receive the gradients of the oldest message that has none yet."""
        self.send_forward(tensors, parts)
        return self.recv_backward()

    def send_backward_recv_forward(self, grads: Mapping[str, Tensor | None] | None = None) -> dict[str, Tensor]:
        """Send the gradients of the oldest message and receive the next message."""
        self.send_backward(grads)
        return self.recv_forward()

    def backward(self) -> None:
        """At the source, receive the gradients of the oldest message and run the backward pass of its tensors."""
        self._ends("backward", source=True)
        message = self._oldest("backward")
        grads = self.recv_backward()
        # One call for all tensors: several would run through the parts of the graph that
        # they share several times.
        torch.autograd.backward(list(message.tensors.values()), list(grads.values()))

    def finish(self) -> None:
        """Wait until all messages are sent. Call it once per step, after the last receive.

        Sent tensors are kept alive until then. With NCCL, a later send frees those that have already been sent.
        """
        for sending in self._sending:
            sending.wait()
        self._sending.clear()

    def _keep(self, sending: Message) -> None:
        self._sending.append(sending)
        # Sends that are done release their tensors here, not only in `finish`.
        self._sending = [sending for sending in self._sending if not sending.done()]

    def _remember(self, tensors: Mapping[str, Tensor], header: Header, rows: Rows) -> None:
        # The header says it: tensors that arrive do not require gradients yet.
        wanted = {name: tensor for name, tensor in tensors.items() if header[name].gradient}
        if wanted:
            self._crossed.append(_Crossed(wanted, header, rows))

    def _oldest(self, call: str) -> _Crossed:
        if not self._crossed:
            raise MegalightError(
                f"{call}: no message waits for gradients. Only messages with a tensor that requires a gradient are "
                "answered, each once; send or receive such a message first."
            )
        return self._crossed[0]

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast tensors from the leader of a replica to its other ranks."""
        if self._replica is not None:
            for tensor in tensors.values():
                # Some backends refuse empty tensors, and there is nothing to send.
                if tensor.numel():
                    dist.broadcast(as_bytes(tensor), self._leader, group=self._replica)

    def _ends(self, call: str, source: bool) -> BridgeLane:
        """Return the lane of this rank, and check that the rank is on the right side for ``call``."""
        if self.is_source if source else self.is_destination:
            return self._lane
        rank = self.src_mesh.global_rank
        place = "neither mesh"
        for side, mesh in (("source", self.src_mesh), ("destination", self.dest_mesh)):
            if mesh.contains(rank):
                place = f"stage {mesh.rank('pp')} of {mesh.pp} of the {side} mesh"
        side, stage, flag = ("source", "last", "is_source") if source else ("destination", "first", "is_destination")
        raise LayoutError(
            f"{call} is a call for the {stage} pipeline stage of the {side} mesh, but rank {rank} is in {place}; "
            f"check bridge.{flag} first."
        )


def _default_device() -> torch.device:
    # gloo sends from host memory, even where there are GPUs.
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
