"""Resume from a single file, which Lightning's own strategies write: weights, optimizer and loops, in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.disk.manifest import FULLY_RESHARDABLE
from megalight.checkpoint.foreign.single_file import WEIGHTS, read
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.run import PARAMETERS, STATE
from megalight.checkpoint.sources import TensorSource
from megalight.errors import CheckpointError
from megalight.models.module import CANONICAL_PREFIX, MegalightModule
from megalight.nn.canonical import CanonicalPart, parts
from megalight.parallel.data_parallel.buffers import SCALARS, history
from megalight.parallel.model import ParallelModel
from megalight.parallel.source import FillReport, Target
from megalight.parallel.transform import apply_transforms
from megalight.strategies import _lightning

STATES = "optimizer_states"
"""Lightning's entry for the states of all optimizers."""
REGROUPED = "regrouped"
"""Entry of the optimizer's common state: groups and schedules of this run are not those of the file."""
NOT_OPTIONS = ("params", "param_names")
"""What a group of an optimizer holds besides its options."""
WAY_OUT = "Its weights alone can be loaded before fit: module.load_state_dict(torch.load(FILE)['state_dict'])."


class SingleFile:
    """An opened single file, with the interface :class:`~megalight.checkpoint.loading.SavedCheckpoint`.

    Args:
        path: the file.
        module: a module like the one that was saved, before or after it was split.

    Attributes:
        common: all entries except the weights.
        tensors: canonical name -> shape, dtype.

    Raises:
        CheckpointError: the file is not a checkpoint of Lightning, or holds more than tensors and plain values.
    """

    scheme = FULLY_RESHARDABLE
    world_size = 1

    def __init__(self, path: str, module: pl.LightningModule) -> None:
        self.path = path
        entries = read(path)
        self._weights: Mapping[str, Tensor] = entries.pop(WEIGHTS)
        self.common: dict[str, Any] = entries
        if module.automatic_optimization:
            self._count_steps(entries)
        # Keys of parameters are those of the single-device module. They hold one or more canonical tensors.
        self._parts, names = _parts_of(module)
        self._tied = {keys[0] for keys in names if len(keys) > 1}
        aliases = {key for keys in names for key in keys[1:]}
        prefix = "" if isinstance(module, MegalightModule) else CANONICAL_PREFIX
        self._values: dict[str, Tensor] = {}
        for key, value in self._weights.items():
            if key in self._parts:
                self._add("", key, value)
            elif key not in aliases:
                self._values[prefix + key] = value

    def _count_steps(self, entries: dict[str, Any]) -> None:
        """Count the steps that the module of the file made by hand, as two optimizers need it, as Lightning's own.

        By hand, Lightning counts a step of each optimizer. Adam counts its own.
        """
        loop = entries.get("loops", {}).get("fit_loop", {})
        made = loop.get("epoch_loop.manual_optimization.optim_step_progress", {}).get("total", {}).get("completed", 0)
        if made:
            states = [state for each in entries.get(STATES, ()) for state in each["state"].values()]
            step = int(max((state["step"] for state in states if "step" in state), default=made))
            entries["global_step"] = step
            loop.update(_lightning.entries_at(step)["loops"]["fit_loop"])

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The available tensors."""
        return {
            name: TensorInfo(name, tuple(value.shape), str(value.dtype).removeprefix("torch."), ())
            for name, value in self._values.items()
        }

    def release(self) -> None:
        """Do nothing: nobody locks a single file."""

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """Return None: it holds no random states."""
        return None

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> FillReport:
        """Read this rank's boxes; see :meth:`megalight.parallel.source.Source.fill`."""
        held = TensorSource(self._values, f"checkpoint {self.path}")
        return held.fill(targets, strict=strict, prefix=prefix, process_group=process_group)

    def read_optimizer_states(self, optimizer: Optimizer, model: ParallelModel) -> None:
        """Add the states of an optimizer by canonical name. All ranks call it together.

        Lightning counts parameters: groups list numbers, and states are by number. So the parameters of a group must
        be in the order of the model, which is checked.

        Args:
            optimizer: of this run, with groups that show parameters of the model.
            model: this rank's part of it.

        Raises:
            CheckpointError: on every rank: the file has no state, or that of another optimizer or other groups.
        """
        # All ranks see the same file, but each knows its own parameters only.
        found = _members(optimizer, model)
        gathered: list[Any] = [found]
        if dist.is_initialized():
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, found)
        Ranks().together(f"reading {self.path}", lambda: self._read_states(optimizer, gathered))

    def _read_states(self, optimizer: Optimizer, members: Sequence[Sequence[Sequence[str]]]) -> None:
        saved = self.common.get(STATES) or []
        whole = any(group.get("whole_matrices") for group in optimizer.param_groups)
        if whole and any("ns_steps" in group for each in saved for group in each["param_groups"]):
            self._read_muon(optimizer, saved, members)
            return
        if len(saved) != 1:
            raise CheckpointError(f"{self.path} holds the states of {len(saved)} optimizers, and this run has one.")
        groups, states = saved[0]["param_groups"], saved[0]["state"]
        if len(groups) != len(optimizer.param_groups):
            raise self._refused(f"{len(groups)} parameter groups, and this run has {len(optimizer.param_groups)}")
        known = []
        own_counters: dict[str, Any] = {}
        for number, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            options = {name: value for name, value in group.items() if name not in NOT_OPTIONS}
            # The file does not say its class, but the options tell Adam from SGD.
            differ = options.keys() ^ (own.keys() - set(NOT_OPTIONS))
            if differ:
                raise self._refused(f"another optimizer: only one of both has {', '.join(sorted(differ))}")
            keys = self._in_order([names[number] for names in members])
            known.append({"options": options, **self._read_group(keys, group["params"], states, own_counters)})
        self.common["optimizer"] = {"class": type(optimizer).__name__, "groups": known, PARAMETERS: own_counters}

    def _read_muon(
        self, optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Sequence[str]]]
    ) -> None:
        """Add the states of ``torch.optim.Muon``, and of the AdamW beside it, if there is one."""
        keys = {part.name: key for key, held in self._parts.items() for part in held}
        own_counters: dict[str, Any] = {}
        known: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        for muon in (True, False):
            theirs = [each for each in saved if ("ns_steps" in each["param_groups"][0]) == muon]
            if len(theirs) > 1:
                raise self._refused(f"{len(theirs)} optimizers of one kind, and this run has Muon and Adam")
            mine = [i for i, group in enumerate(optimizer.param_groups) if bool(group.get("whole_matrices")) == muon]
            found = {keys[name] for names in members for index in mine for name in names[index]}
            ordered = [key for key in self._parts if key in found]
            numbers = self._numbers(theirs[0]["param_groups"], ordered) if theirs else {}
            states = theirs[0]["state"] if theirs else {}
            for index in mine:
                own = {keys[name] for names in members for name in names[index]}
                group = [key for key in ordered if key in own]
                read = self._read_group(group, [numbers.get(key, -1) for key in group], states, own_counters)
                known[index] = {"options": {}, **read}
        self.common["optimizer"] = {
            "class": type(optimizer).__name__, "groups": known, PARAMETERS: own_counters, REGROUPED: True
        }  # fmt: skip

    def _numbers(self, groups: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, int]:
        """Return the numbers of parameters in the groups of one optimizer, by key: by name, or in the model's order."""
        numbers = [number for group in groups for number in group["params"]]
        if all("param_names" in group for group in groups):
            named = dict(zip((name for group in groups for name in group["param_names"]), numbers, strict=True))
            if missing := [key for key in keys if key not in named]:
                raise self._refused(f"no state of {missing[0]}, which this run updates in the same way")
            return {key: named[key] for key in keys}
        if len(groups) > 1:
            raise self._refused(f"{len(groups)} groups without names of parameters beside those of Muon")
        if len(numbers) != len(keys):
            raise self._refused(f"{len(numbers)} parameters in a group, and this run has {len(keys)} of that kind")
        return dict(zip(keys, numbers, strict=True))

    def _in_order(self, named: Sequence[Sequence[str]]) -> list[str]:
        """Return keys of a group's parameters in the file's order; ``named``: canonical names of each rank's."""
        keys = {part.name: key for key, held in self._parts.items() for part in held}
        places = {key: place for place, key in enumerate(self._parts)}
        for names in named:
            # The last stage of a pipeline has a tied parameter at the place of its second name.
            own = [places[keys[name]] for name in names if keys[name] not in self._tied]
            if own != sorted(own):
                raise self._refused("parameters in the order of the model, and this run's groups have another order")
        return sorted({keys[name] for names in named for name in names}, key=places.__getitem__)

    def _read_group(
        self, keys: Sequence[str], numbers: Sequence[int], states: Mapping[int, Any], own_counters: dict[str, Any]
    ) -> dict[str, Any]:
        """Add the states of a group's parameters, and return its counters and the dtypes of its tensors.

        Args:
            own_counters: gets the counters of parameters that have others: those without a gradient in some steps.
        """
        # Frozen parameters may be in a group, and have no state.
        numbers = [number for number in numbers if number in states] if len(numbers) != len(keys) else numbers
        if len(numbers) != len(keys):
            raise self._refused(f"{len(numbers)} parameters in a group, and this run has {len(keys)} there")
        first: Mapping[str, Any] = next((states[number] for number in numbers if states.get(number)), {})
        scalars = {name: value for name, value in first.items() if name in SCALARS}
        dtypes = {name: str(value.dtype) for name, value in first.items() if name not in SCALARS}
        for key, number in zip(keys, numbers, strict=True):
            shape, state = self._weights[key].shape, states.get(number, {})
            own = {name: value for name, value in state.items() if name in SCALARS}
            # A parameter that never had a gradient has no state.
            if first and (not state or history(own) != history(scalars)):
                own_counters.update(dict.fromkeys((part.name for part in self._parts[key]), own if state else None))
            for name in dtypes if state else ():
                if state[name].shape != shape:
                    raise self._refused(f"{name} of shape {list(state[name].shape)} for {key}, which is {list(shape)}")
                self._add(f"{STATE}{name}.", key, state[name])
        return {"scalars": scalars, "tensors": dtypes}

    def _add(self, prefix: str, key: str, value: Tensor) -> None:
        """Add the canonical tensors that lie in a parameter's values, or in one of its states."""
        held = self._parts[key]
        if value.numel() != sum(prod(part.shape) for part in held):
            raise CheckpointError(f"{key} in {self.path} has the shape {list(value.shape)}: it is of another model.")
        flat = value.detach().reshape(-1)
        for part in held:
            self._values[prefix + part.name] = flat[part.start : part.start + prod(part.shape)].view(part.shape)

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"cannot resume from {self.path}: its optimizer has {what}. {WAY_OUT}")


def _members(optimizer: Optimizer, model: ParallelModel) -> list[list[str]]:
    """Return, for each group, a canonical name of each trained parameter on this rank."""
    names = {id(tensor): name for name, tensor in model.root.named_parameters()}
    return [
        [model.specs[names[id(p)]].pieces[0].name for p in group["params"] if p.requires_grad]
        for group in optimizer.param_groups
    ]


def _parts_of(module: pl.LightningModule) -> tuple[dict[str, list[CanonicalPart]], list[list[str]]]:
    """Return the canonical tensors in each parameter by its key in the ``state_dict``, and all keys of each."""
    model: nn.Module = module
    if isinstance(module, MegalightModule):
        # Built again: the module may be split already, and here it takes no memory.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = module.build_model()
            apply_transforms(model, module.transforms)
    prefix = CANONICAL_PREFIX if isinstance(module, MegalightModule) else ""
    held: dict[str, list[CanonicalPart]] = {}
    for part in _named(parts(model)):
        held.setdefault(prefix + part.parameter, []).append(part)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(prefix + name)
    return held, list(names.values())


def _named(found: Iterable[CanonicalPart]) -> Iterator[CanonicalPart]:
    """Yield parts with their names in a checkpoint."""
    for part in found:
        yield CanonicalPart(part.parameter, CANONICAL_PREFIX + part.name, part.shape, part.start)
