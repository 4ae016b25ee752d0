"""What a rank of a training run saves and resumes from: weights, master weights, optimizer state, random states.

:class:`TrainingRun` collects them for a save and restores them, for every strategy. :class:`PlainRun` gives a plain
torch loop ``save`` and ``load`` on the same folders.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from megalight.attachments import SHARDING
from megalight.checkpoint import loading, saving
from megalight.checkpoint.disk.manifest import DP_RESHARDABLE, FULLY_RESHARDABLE
from megalight.checkpoint.loading import SavedCheckpoint
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.scheme import SCHEMES, Contents, State
from megalight.checkpoint.sources import MASTER
from megalight.checkpoint.view import targets_of
from megalight.errors import CheckpointError
from megalight.ops.parameter import cast_of
from megalight.ops.quantize.amax_history import AmaxHistory
from megalight.parallel.data_parallel import DataParallelEngine, FlatShard
from megalight.parallel.data_parallel.buffers import FlatParameters, history
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams
from megalight.parallel.shard import ShardSpec
from megalight.parallel.source import Target, parameter_targets, shard_targets

log = logging.getLogger(__name__)

MAGNITUDES = "magnitudes"
"""Entry of a rank's state with the histories of delayed scaling: names of weights, and ``[weights, steps, 3]``."""
PARAMETERS = "parameters"
"""Entry of the optimizer's common state: counters of single parameters, where they differ from those of the group."""
WIDE = ("float32", "float64")
"""Dtypes of masters that hold more than half-precision weights."""
OWN = ("model", "optimizer")
"""First parts of names in a checkpoint that no further state may have."""
STATE = "optimizer."
"""Prefix of the optimizer's tensors; the names of the state and of the weight follow."""
ADAMS = ("Adam", "AdamW")
"""Classes whose states are those of Adam."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a training run that checkpoints know.

    Attributes:
        model: the model.
        streams: random streams of the run.
        engine: None outside of training; then there is no optimizer state.
        optimizer: on the engine's shards.
        extra: name -> one flat tensor per engine shard, saved with the optimizer's state.
        peers: all ranks that hold other parameters of the model; None: those of the pipeline.

    Raises:
        CheckpointError: a name of ``extra`` is one of the checkpoint's own.
    """

    model: ParallelModel
    streams: RandomStreams
    engine: DataParallelEngine | None = None
    optimizer: Optimizer | None = None
    extra: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    peers: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name in self.extra:
            # Names of weights begin with the first, and names of the optimizer's tensors with the second.
            if name.split(".")[0] in OWN or not name:
                raise CheckpointError(
                    f"extra_shard_states has the name {name!r}, and checkpoints keep {' and '.join(OWN)} under theirs; "
                    "give this state another name, for example that of the callback."
                )

    def contents(self, *, optimizer: bool, only: Container[str] | None = None) -> Contents:
        """What is to be saved.

        Quantized parameters are represented by their master weights, in the dtype that they have outside training.
        Sharded parameters are represented by this rank's shards.

        Args:
            optimizer: with master weights that are copies, optimizer state, and ``extra``.
            only: canonical names of the weights to save; None: all.
        """
        tensors, flat = self._weights()
        if only is not None:
            tensors = {name: t for name, t in tensors.items() if self.model.specs[name].pieces[0].name in only}
            # a bucket holds parameters that are trained, or frozen ones
            flat = [b for b in flat if any(piece.name in only for spec, _ in b.shard.slots for piece in spec.pieces)]
        # Quantized values mean nothing without their scales, so master weights are written in their place.
        weights = [bucket.weights.to(bucket.layout.kind.param_dtype) for bucket in flat]
        states = [State("", weights, [bucket.shard for bucket in flat])] if flat else []
        if optimizer:
            states += self._states()
        return Contents(tensors, self.model.specs, self.model.mesh_of, states)

    def rank_state(self) -> dict[str, Any]:
        """Random states, which belong to this rank alone, and the past magnitudes of delayed scaling."""
        state: dict[str, Any] = {"random": self.streams.state_dict()}
        past = self._past()
        if past:
            # one tensor, because each is copied to the host on its own
            state[MAGNITUDES] = {"names": list(past), "past": torch.stack(list(past.values()))}
        return state

    def weight_targets(self) -> list[Target]:
        """Where weights are read into: parameters and buffers, masters of quantized parameters, and shards."""
        tensors, flat = self._weights()
        parts = shard_targets([bucket.weights for bucket in flat], [bucket.shard for bucket in flat])
        return [*parameter_targets(tensors.items(), self.model.specs), *parts]

    def group_options(self) -> dict[str, Any]:
        """What belongs to whole parameter groups: options (learning rate, ...), step counters, the names of states.

        Some pipeline stages have no parameter in a group: the first that has one speaks for it. ``magnitudes`` says
        whether any stage has past magnitudes of delayed scaling.
        """
        optimizer = self._training[1]
        groups: list[dict[str, Any]] = []
        held = [(shard, _readable(optimizer, shard.master)) for shard in self._shards]
        for index, group in enumerate(optimizer.param_groups):
            options = {name: value for name, value in group.items() if name != "params"}
            # A rank may have no state of a group. Another one of the pipeline then speaks for it.
            known = ((shard, states) for shard, states in held if shard.group == index and states)
            shard, states = next(known, (None, {}))
            flat = {name for name, value in states.items() if shard is not None and _flat(value, shard.master)}
            groups.append(
                {
                    "options": options,
                    "scalars": {name: value for name, value in states.items() if name not in flat},
                    "tensors": {name: str(states[name].dtype) for name in sorted(flat)},
                }
            )
        histories = bool(self._past())
        # Pipeline stages, and ranks with other experts, have other parameters.
        peers = self.peers or self.model.mesh.group("pp", "ep")
        if peers is not None:
            stages: list[Any] = [None] * peers.size()
            dist.all_gather_object(stages, (groups, histories), group=peers)
            histories = any(past for _, past in stages)
            same_groups = zip(*(found for found, _ in stages), strict=True)
            groups = [next((g for g in same if g["tensors"] or g["scalars"]), same[0]) for same in same_groups]
        found = {"class": type(optimizer).__name__, "groups": groups, MAGNITUDES: histories}
        own_counters = self._own_counters(held, groups)
        if peers is not None:
            every: list[Any] = [None] * peers.size()
            dist.all_gather_object(every, own_counters, group=peers)
            own_counters = {name: numbers for some in every for name, numbers in some.items()}
        return {**found, PARAMETERS: own_counters} if own_counters else found

    @staticmethod
    def _own_counters(
        held: Sequence[tuple[FlatShard, Mapping[str, Any]]], groups: Sequence[Mapping[str, Any]]
    ) -> dict[str, dict[str, Any] | None]:
        """The counters of parameters that had no gradient in some steps, where they differ from those of the group.

        Returns:
            by canonical name; None: a parameter that was never stepped, and has no state.
        """
        own_counters: dict[str, dict[str, Any] | None] = {}
        for shard, states in held:
            usual = groups[shard.group]
            numbers = {name: value for name, value in states.items() if name not in usual["tensors"]}
            stepped = usual["scalars"] or usual["tensors"]
            if _history(numbers if states else None) != _history(usual["scalars"] if stepped else None):
                names = (piece.name for spec, _ in shard.slots for piece in spec.pieces)
                own_counters.update(dict.fromkeys(names, numbers if states else None))
        return own_counters

    def resume(self, saved: SavedCheckpoint) -> None:
        """Read masters, optimizer state, group options, and what ranks keep on their own. Weights are read before.

        Raises:
            CheckpointError: no optimizer state in it, or of another optimizer.
        """
        options, optimizer = saved.common.get("optimizer"), self._training[1]
        if options is None:
            raise CheckpointError(
                f"{saved.path} holds weights only; it cannot resume training. Choose a full checkpoint."
            )
        groups, kind = options["groups"], type(optimizer).__name__
        # One entry for all groups: of another library, whose groups are not ours.
        if isinstance(groups, Mapping) and kind in ADAMS:
            groups, options = [groups] * len(optimizer.param_groups), {**options, "class": kind}
        own_counters = options.get(PARAMETERS, {})
        changes = changes_matrices(options, optimizer)
        if changes:
            groups, own_counters = self._kept_moments(saved, groups, own_counters, options["class"])
        elif options["class"] != kind or len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{saved.path} was trained with {options['class']} in {len(groups)} parameter groups; this run uses "
                f"{kind} in {len(optimizer.param_groups)}. Resume with the same optimizer, or load the weights alone."
            )
        # Room first, since the views of the states are filled below.
        self._make_states(groups, own_counters)
        held = Contents({}, self.model.specs, self.model.mesh_of, list(self._states()))
        views = {_found(name, saved): view for name, view in SCHEMES[saved.scheme](held).items()}
        missing = sorted(name for name in views.keys() - saved.tensors.keys() if name.startswith(STATE))
        if missing and not changes:
            raise CheckpointError(
                f"{saved.path} lacks {len(missing)} optimizer tensors that this run needs: {missing[0]}."
                f"{_advice(saved)}"
            )
        # Not strict: weights are in the checkpoint too, and were read before.
        saved.fill(targets_of(views), strict=False)
        self._tell_masters(saved)
        self.resume_rank(saved)

    def _kept_moments(
        self,
        saved: SavedCheckpoint,
        groups: Sequence[Mapping[str, Any]],
        own_counters: Mapping[str, Mapping[str, Any] | None],
        earlier: str,
    ) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any] | None]]:
        """Return groups and counters for another optimizer of matrices: moments of Adam stay where Adam updates still.

        The state of all other parameters begins anew, which rank 0 says.
        """
        optimizer = self._training[1]
        nothing: dict[str, Any] = {"options": {}, "scalars": {}, "tensors": {}}
        moments = next((g for g in groups if "exp_avg_sq" in g["tensors"]), nothing)
        result = [
            nothing if group.get("whole_matrices") else {**moments, "options": {}} for group in optimizer.param_groups
        ]
        # Names of pieces say their place behind the name of the tensor.
        known = {name.partition("@")[0] for name in saved.tensors}
        counters = dict(own_counters)
        kept, begun = set[str](), set[str]()
        for shard in self._shards:
            for name in (piece.name for spec, _ in shard.slots for piece in spec.pieces):
                if result[shard.group]["tensors"] and f"{STATE}exp_avg_sq.{name}" in known:
                    kept.add(name)
                else:
                    begun.add(name)
                    counters[name] = None
        if not self.model.mesh.global_rank:
            log.warning(
                "%s was trained with %s, and this run uses %s: the state of %d tensors (%s) begins anew, moments of "
                "Adam stay for %d others, and rates and schedules are those configured now.",
                saved.path, earlier, type(optimizer).__name__, len(begun), min(begun, default="none"), len(kept),
            )  # fmt: skip
        return result, counters

    def _tell_masters(self, saved: SavedCheckpoint) -> None:
        """Log what is lost or missing where the saved masters and those of this run differ."""
        # Masters in host memory are saved in any dtype, also in that of the weights.
        had = any(name.startswith(MASTER) and stored.dtype in WIDE for name, stored in saved.tensors.items())
        buckets = self._training[0].buckets
        narrow = [bucket.shard.master.dtype.itemsize < 4 for bucket in buckets]
        if self.model.mesh.global_rank:
            return
        if had and any(narrow):
            log.warning(
                "%s has masters that are wider than those of this run (data_parallel.master_dtype): training goes on "
                "from the masters rounded.",
                saved.path,
            )
        elif not had and any(b.rounds_masters and not half for b, half in zip(buckets, narrow, strict=True)):
            log.info(
                "%s has no masters that are wider than its weights: those of this run begin as the weights.", saved.path
            )

    def resume_rank(self, saved: SavedCheckpoint) -> None:
        """Read random states, and the past magnitudes of delayed scaling. All ranks call it together.

        Raises:
            CheckpointError: on every rank, when a file that any rank reads is damaged; then nothing changes.
        """
        own, histories = self.model.mesh.global_rank, self._histories()
        past: dict[str, Tensor] = {}
        random: list[dict[str, Any]] = []

        def read() -> None:
            state = saved.rank_state(own)
            random.extend([] if state is None else [state["random"]])
            _add_magnitudes(past, state)
            # Between steps, all ranks that hold a weight have the same magnitudes. Under the layout that was saved,
            # this rank has all of its own; under others, some rank has them. Without any, no other file is read.
            others = range(saved.world_size) if (saved.common.get("optimizer") or {}).get(MAGNITUDES) else ()
            for rank in others:
                if histories.keys() <= past.keys():
                    return
                _add_magnitudes(past, saved.rank_state(rank))

        # a file is damaged for one rank alone, and the others would wait for it at the next collective
        Ranks().together(f"reading the states of ranks from {saved.path}", read)
        for state in random:
            self.streams.load_state_dict(state)
        for name in histories.keys() & past.keys():
            histories[name].restore(past[name])

    def _past(self) -> dict[str, Tensor]:
        """The past magnitudes of delayed scaling, ``[steps, 3]`` by name, of the histories that have any."""
        held = self._histories().items()
        return {name: history.past for name, history in held if history.past is not None and history.rolled}

    def _histories(self) -> dict[str, AmaxHistory]:
        """The histories of delayed scaling, by the canonical name of the weight; of a fused one, of its first part.

        A stack of experts has the pieces of one expert after those of the other, and a history for each expert.
        """
        found = {}
        for name, parameter in self.model.root.named_parameters():
            if (cast := cast_of(parameter)) is not None and cast.history is not None:
                pieces, weights = self.model.specs[name].pieces, cast.history.weights
                for place, history in enumerate(weights):
                    found[pieces[place * len(pieces) // len(weights)].name] = history
        return found

    @property
    def _training(self) -> tuple[DataParallelEngine, Optimizer]:
        assert self.engine is not None and self.optimizer is not None
        return self.engine, self.optimizer

    def _weights(self) -> tuple[dict[str, Tensor], list[FlatParameters]]:
        """The tensors that hold weights themselves, and the buckets whose parameters are quantized or sharded."""
        flat: dict[int, FlatParameters] = {}  # by id: a sharded bucket may be quantized
        if self.engine is not None:
            flat |= {id(bucket): bucket for bucket in self.engine.buckets if bucket.is_quantized}
        if self.model.shards is not None:
            flat |= {id(bucket): bucket for bucket in self.model.shards.buckets}
        hidden = {id(info.parameter) for bucket in flat.values() for info in bucket.infos}
        whole = {name: tensor for name, tensor in self.model.tensors().items() if id(tensor) not in hidden}
        return whole, list(flat.values())

    def _states(self) -> Iterator[State]:
        """Master weights that are copies, element-wise optimizer states, and ``extra``."""
        engine, optimizer = self._training
        copies = [bucket.shard for bucket in engine.buckets if not bucket.master_is_own_params]
        # Masters in the parameters' own memory are the weights, and are saved as such.
        yield State(MASTER, [shard.master for shard in copies], copies)
        held = [(shard, _readable(optimizer, shard.master)) for shard in self._shards]
        for name in sorted({name for shard, state in held for name in state if _flat(state[name], shard.master)}):
            having = [(shard, state[name]) for shard, state in held if name in state]
            yield State(f"{STATE}{name}.", [tensor for _, tensor in having], [shard for shard, _ in having])
        # State of whole matrices, each on one rank.
        homes: dict[str, list[FlatShard]] = defaultdict(list)
        for name, matrix, tensor in getattr(optimizer, "home_tensors", tuple)():
            slots = [(ShardSpec.replicated(matrix, tuple(tensor.shape)), 0)]
            homes[name].append(FlatShard(0, 0, tensor.numel(), tensor.view(-1), slots))
        for name, shards in homes.items():
            yield State(f"{STATE}{name}.", [shard.master for shard in shards], shards)
        for name, tensors in self.extra.items():
            yield State(f"{name}.", tensors, engine.shards)

    @property
    def _shards(self) -> list[FlatShard]:
        """The shards for which the optimizer has a state each."""
        engine, optimizer = self._training
        sharding = SHARDING.get(optimizer)
        return engine.shards if sharding is None else cast(list[FlatShard], sharding.shards)

    def _make_states(self, groups: list[dict[str, Any]], own_counters: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Give the optimizer the options and counters that were saved, and room for its tensors.

        Args:
            own_counters: by canonical name the counters of parameters that have others than their group; None: no
            state.
        """
        optimizer = self._training[1]
        if (sharding := SHARDING.get(optimizer)) is not None:
            sharding.restart(lambda name: _history(own_counters.get(name, {})))
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved["options"])
        for shard in self._shards:
            saved, first = (
                groups[shard.group],
                next((spec.pieces[0].name for spec, _ in shard.slots if spec.pieces), ""),
            )
            if (numbers := own_counters.get(first, saved["scalars"])) is None:
                continue
            states = optimizer.state[shard.master]
            # State of earlier steps in this process would be mixed with what was saved.
            states.clear()
            for name, value in numbers.items():
                # A copy for each shard: counters are updated in place.
                states[name] = value.clone() if isinstance(value, Tensor) else value
            for name, dtype in saved["tensors"].items():
                # Zeros, because padding is not in the checkpoint and must stay finite.
                states[name] = torch.zeros_like(shard.master, dtype=_state_dtype(optimizer, shard.master, name, dtype))


def changes_matrices(saved: Mapping[str, Any], optimizer: Optimizer) -> bool:
    """Return whether a run goes on from Adam to an optimizer of whole matrices, back, or from one of them to another.

    Args:
        saved: the entry of the optimizer in the checkpoint.
    """
    groups = saved["groups"]
    if saved["class"] == type(optimizer).__name__ or isinstance(groups, Mapping):
        return False
    whole = any("whole_matrices" in group for group in optimizer.param_groups)
    had = any("whole_matrices" in group["options"] for group in groups)
    adam = all("betas" in group["options"] for group in groups)
    return hasattr(optimizer, "readable_state") and adam and (whole or had)


def _history(numbers: Mapping[str, Any] | None) -> Hashable:
    return None if numbers is None else history(numbers)


def _flat(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape and value.ndim == 1


def _readable(optimizer: Optimizer, master: Tensor) -> Mapping[str, Any]:
    """Return the state of a master. A quantized optimizer has ``readable_state``, which dequantizes."""
    read = getattr(optimizer, "readable_state", None)
    return cast(Mapping[str, Any], optimizer.state.get(master, {}) if read is None else read(master))


def _state_dtype(optimizer: Optimizer, master: Tensor, name: str, saved: str) -> torch.dtype:
    """Return the dtype of a state tensor: as it was saved, but an optimizer may need another one.

    torch's own need that of the masters, and one with ``room_dtype`` says how it reads its states.
    """
    room = getattr(optimizer, "room_dtype", None)
    if room is not None and (own := room(name, master)) is not None:
        return cast(torch.dtype, own)
    torchs = type(optimizer).__module__.partition(".")[0] == "torch"
    return master.dtype if torchs and DTYPES[saved].is_floating_point else DTYPES[saved]


def _add_magnitudes(past: dict[str, Tensor], state: Mapping[str, Any] | None) -> None:
    """Add what a rank has saved of histories, except of weights that are known."""
    found = (state or {}).get(MAGNITUDES, {"names": (), "past": ()})
    for name, values in zip(found["names"], found["past"], strict=True):
        past.setdefault(name, values)


def _advice(saved: SavedCheckpoint) -> str:
    if saved.scheme != DP_RESHARDABLE:
        return (
            " Parameters that were frozen in that run have no such state. Freeze the same ones, or start another run "
            "with its weights alone (--model.weights)."
        )
    return (
        f" It was saved as {DP_RESHARDABLE}, which no run with another tensor or expert parallelism reads. Resume with "
        f"the layout it was saved in, or convert it: megalight convert {saved.path} OUTPUT --to {FULLY_RESHARDABLE}."
    )


def _found(name: str, saved: SavedCheckpoint) -> str:
    """Masters go by the weights' own names where the run that saved them needed no copies."""
    return name.removeprefix(MASTER) if name.startswith(MASTER) and name not in saved.tensors else name


class PlainRun:
    """A run in a plain torch loop that can be saved and resumed.

    Attributes:
        model: the model that is trained.
        optimizer: steps on this rank's shards.
    """

    model: ParallelModel
    engine: DataParallelEngine
    optimizer: Optimizer

    def save(self, path: str | os.PathLike[str], **values: Any) -> None:
        """Write weights, optimizer state and random states as one folder, from all ranks; any layout can load it.

        Args:
            values: plain values to save with it (``step=100``); :meth:`load` returns them.
        """
        # Weights may still be gathered, and would be read half-way.
        self.engine.sync_parameters()
        run = self._run
        common = {"values": values, "optimizer": run.group_options()}
        views = SCHEMES[FULLY_RESHARDABLE](run.contents(optimizer=True))
        saving.save(path, views, common=common, rank_state=run.rank_state(), scheme=FULLY_RESHARDABLE)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Resume from a folder that :meth:`save` wrote under any layout; return the values that were saved with it.

        Raises:
            CheckpointError: missing, torn, of another model or another optimizer.
        """
        self.engine.sync_parameters()
        saved, run = loading.open(path), self._run
        self.model.clear_padding()
        saved.fill(run.weight_targets(), prefix=self.model.prefix)
        # Before optimizer state is read: masters from the checkpoint then replace these.
        self.engine.refresh_masters()
        run.resume(saved)
        # Quantized weights are cast from the masters, which are final now.
        self.engine.parameters.recast()
        return dict(saved.common.get("values", {}))

    @property
    def _run(self) -> TrainingRun:
        return TrainingRun(self.model, RandomStreams(self.model.mesh), self.engine, self.optimizer)
