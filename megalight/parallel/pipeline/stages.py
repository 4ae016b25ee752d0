"""Cut a model into the stages of a pipeline: ours by its layers, one of ``transformers`` by what it declares.

``base_model_pp_plan`` names the embedding, the list of layers and the norm, and ``_pp_plan`` of a class its head. The
code between them makes masks, position ids and rotary tables. Every stage runs that code from its start:

- the embedding returns zeros on later stages, and layers of earlier stages return hidden states that nobody reads;
- the first layer of the stage gets the hidden states of the previous stage in place of its own;
- where the code calls the first layer of the next stage, :class:`StageEnd` leaves it with the hidden states.

Layers may return more than hidden states. What the code gives to the next layer travels, too, and of the rest, such as
attention weights, that there is one.

The last stage goes on to the norm, the head and the loss, and to the caller's own code behind the model. So a step
is written for the whole model, as without a pipeline, and its carry is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalight.attachments import STAGE, attach_modules, overridden, shadow_of
from megalight.errors import ConfigurationError, LayoutError
from megalight.nn.canonical import joined
from megalight.parallel.initial_values import Elsewhere, on_meta
from megalight.parallel.layers import layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.layout import PipelineLayout, Stage
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.shard import ShardSpec

ENDS = {"embed": "embed", "head": "head", "mtp": "mtp", "distillation": "head"}
"""Part of a model -> attribute of the stages that hold it. A student's part for its teacher goes with the head."""
PARTS = ("embed", "layers", "head")


def check_protocol(model: nn.Module) -> int:
    """Return the number of layers of a model that can be cut.

    Raises:
        LayoutError: the model is not ``embed | layers | head`` and declares no other parts; the message names what is
            missing. Or its attribute ``uncut`` says why it has no stages.
    """
    if (declared := _declared(model)) is not None:
        return declared.count
    name = type(model).__name__
    if (reason := getattr(model, "uncut", None)) is not None:
        raise LayoutError(
            f"{name} has no pipeline stages: {reason}. Leave pipeline_parallel of the strategy out; a base that it "
            "learns from has a degree of its own (model.pipeline_parallel)."
        )
    missing = [part for part in PARTS if not hasattr(model, part)]
    if missing:
        raise LayoutError(
            f"{name} has no attribute {missing[0]!r}: a pipeline cuts models made of embed | layers | head. Give it "
            "these three (embed and head may be None), or wrap it in a module that has them."
        )
    indices = list(layers_of(model))
    if not isinstance(model.layers, nn.ModuleDict) or indices != list(range(len(model.layers))):
        keys = f" with keys {list(model.layers)[:4]}" if isinstance(model.layers, nn.ModuleDict) else ""
        raise LayoutError(
            f"{name}.layers is a {type(model.layers).__name__}{keys}; a pipeline needs an nn.ModuleDict keyed "
            "'0', '1', ... by global index, so that names stay the same."
        )
    return len(indices)


def _declared(model: nn.Module) -> DeclaredParts | None:
    return None if all(hasattr(model, part) for part in PARTS) else declared_parts(model)


def shell(model: nn.Module) -> nn.Module:
    """Return a second object of the same model, which shares everything except the dict of children."""
    # Chunks must stay callable as the user's own class, so they are shells of it instead of a class of ours.
    found: nn.Module = shadow_of(model, dict(model._modules))
    return found


def cut(
    model: nn.Module, specs: Mapping[str, ShardSpec], layout: PipelineLayout, mesh: ParallelMesh
) -> tuple[dict[str, ShardSpec], list[nn.Module]]:
    """Keep in ``model`` only the modules of this pipeline rank, and make its chunks.

    If several ranks hold a parameter (a tied embedding, or one outside of embed, layers and head), the first of them
    owns it, and its gradient is summed over all of them.

    Args:
        model: already split over the other axes, on meta or not.
        specs: the result of :func:`megalight.parallel.apply.parallelize` for it.

    Returns:
        the specs of the remaining parameters and buffers, by their unchanged names; and one callable model per stage on
        this rank, in model order. The chunks share their modules with ``model``, which has the modules of all of them.

    Raises:
        LayoutError: the model is not ``embed | layers | head``, or the layout has another number of layers.
    """
    num_layers = check_protocol(model)
    if num_layers != layout.num_layers:
        raise LayoutError(
            f"the layout places {layout.num_layers} layers and {type(model).__name__} has {num_layers}; give a layout "
            f"for {num_layers} layers.\n{layout.draw()}"
        )
    declared = _declared(model)
    by_tensor = {id(tensor): specs[name] for name, tensor in _tensors(model).items() if name in specs}
    holders: dict[int, set[int]] = {}
    for stage in layout.stages:
        for tensor in _tensors(_part(model, [stage], declared)).values():
            # By identity of the tensor, so that tied weights count as one that several stages hold.
            holders.setdefault(id(tensor), set()).add(stage.rank)
    here = layout.of_rank(mesh.rank("pp"))
    chunks = [_part(model, [stage], declared) for stage in here]
    places = _places(model)
    # Only now: tied ends are visible only while the whole model is there.
    if declared is None:
        model._modules.update(_part(model, here)._modules)
    else:
        for chunk, stage in zip(chunks, here, strict=True):
            before = sum(len(each.layers) for each in layout.stages[: stage.index])
            STAGE.set(chunk, DeclaredStage(model, declared, stage, before))
        put(model, parts_of(model, declared, here))
    _remember(model, places)
    kept = {name: tensor for name, tensor in _tensors(model).items() if id(tensor) in by_tensor}
    # Create the groups of shared tensors now, in the same order on all ranks.
    for ranks in sorted({tuple(sorted(ranks)) for ranks in holders.values() if len(ranks) > 1}):
        if mesh.rank("pp") in ranks:
            mesh.group(_axis(ranks, mesh))
    return {n: _shared(by_tensor[id(t)], sorted(holders[id(t)]), mesh) for n, t in kept.items()}, chunks


def _places(model: nn.Module) -> dict[int, tuple[str, nn.Module, str]]:
    """Return the first place of each parameter: the module's name and itself, and the parameter's name in it."""
    places: dict[int, tuple[str, nn.Module, str]] = {}
    for path, module in model.named_modules():
        for local, parameter in module._parameters.items():
            places.setdefault(id(parameter), (path, module, local))
    return places


def _remember(model: nn.Module, places: Mapping[int, tuple[str, nn.Module, str]]) -> None:
    """Let the modules that are left know where the whole model has the parameters that they share with others."""
    held = set(model.modules())
    for module in held:
        first = {local: places[id(p)] for local, p in module._parameters.items() if p is not None}
        elsewhere = {
            local: Elsewhere(path, on_meta(owner), name)
            for local, (path, owner, name) in first.items()
            if owner not in held
        }
        if elsewhere:
            module.elsewhere = elsewhere  # type: ignore[assignment]


def _part(model: nn.Module, stages: Sequence[Stage], declared: DeclaredParts | None = None) -> nn.Module:
    """Return the model with only the parts of some stages."""
    if declared is not None:
        return with_parts(model, parts_of(model, declared, stages))
    part = shell(model)
    layers = layers_of(model)
    part._modules["layers"] = nn.ModuleDict({str(i): layers[i] for stage in stages for i in stage.layers})
    for name, end in ENDS.items():
        if not any(getattr(stage, end) for stage in stages) and name in part._modules:
            # None instead of nothing: the model's forward asks whether it has this end.
            part._modules[name] = None
    return part


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _axis(ranks: Sequence[int], mesh: ParallelMesh) -> str:
    return "pp" if len(ranks) == mesh.pp else f"pp:{'+'.join(map(str, ranks))}"


def _shared(spec: ShardSpec, ranks: Sequence[int], mesh: ParallelMesh) -> ShardSpec:
    """Return the spec of a tensor that several pipeline ranks hold."""
    if len(ranks) < 2:
        return spec
    # One rank counts the tensor in norms and writes it to checkpoints. All of them sum their gradients of it.
    first = mesh.rank("pp") == ranks[0]
    axis = _axis(ranks, mesh)
    pieces = (replace(p, partial=(axis, *p.partial), owner=p.owner and first) for p in spec.pieces)
    return replace(spec, pieces=tuple(pieces))


HIDDEN = "hidden_states"
READ, UNREAD = "read_", "unread_"
"""Prefixes of what layers return beside hidden states, by place: what the next layer reads, and what it does not."""
INSTEAD = (
    "Derive from megalight.models.module.MegalightModule, and write forward_step and loss_step, which run on each stage"
)
RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Options by which the end of a model reads all of its layers."""


class StageEnd(BaseException):
    """Leaves the code of a model where the layers of a stage end. It is no ``Exception``, which user code may catch."""


@dataclass(frozen=True)
class DeclaredParts:
    """The names of the parts of a model of ``transformers`` inside a module.

    Attributes:
        model: the model.
        layers: its list of layers.
        count: the number of layers.
        first: modules that only the first stage runs: the embedding.
        last: modules that only the last stage runs: norm and head.
    """

    model: str
    layers: str
    count: int
    first: tuple[str, ...]
    last: tuple[str, ...]

    @property
    def base(self) -> str:
        """The module that runs the layers."""
        return self.layers.rpartition(".")[0]


def declared_parts(root: nn.Module) -> DeclaredParts | None:
    """Return the parts of the model in a module that declares how a pipeline cuts it; None: there is none.

    Raises:
        LayoutError: there are several, or a declared part is missing.
    """
    found = list(_declaring(root, ""))
    if not found:
        return None
    if len(found) > 1:
        raise LayoutError(
            f"{type(root).__name__} holds several models that a pipeline could cut: "
            f"{' and '.join(name for name, _ in found)}. {INSTEAD}."
        )
    name, model = found[0]
    modules = dict(model.named_modules())
    lists, first, last = list[str](), list[str](), list[str]()
    for local, (takes, _) in vars(model)["_pp_plan"].items():
        part = modules.get(local)
        if isinstance(part, nn.ModuleList):
            lists.append(local)
        elif part is not None and any(True for _ in part.parameters()):
            (first if "input_ids" in takes else last).append(local)
    if not lists:
        lists, first, norms = _undeclared_parts(model, modules)
        last += norms
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    last += [local for local, part in modules.items() if part is head and local not in last]
    if len(lists) != 1:
        raise LayoutError(
            f"{name or type(root).__name__} ({type(model).__name__}) declares {len(lists)} lists of layers in its "
            f"pipeline plan, and a pipeline cuts one. {INSTEAD}."
        )
    base = modules[lists[0].rpartition(".")[0]]
    if _embeds_more(base, {modules[local] for local in (*first, *last)}, modules[lists[0]]):
        first = []
    layers = modules[lists[0]]
    assert isinstance(layers, nn.ModuleList)
    under = f"{name}." if name else ""
    return DeclaredParts(
        name, under + lists[0], len(layers), *(tuple(under + each for each in part) for part in (first, last))
    )


def _undeclared_parts(model: nn.Module, modules: dict[str, nn.Module]) -> tuple[list[str], list[str], list[str]]:
    """Return lists of layers, embedding and last norm of a model that declares its head alone.

    There is one list with as many layers as the configuration says, and after it one norm in the same module.
    """
    count = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    lists = [each for each, part in modules.items() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        return lists, [], []
    outer, _, local = lists[0].rpartition(".")
    beside = [*modules[outer]._modules]
    after = [f"{outer}.{each}" for each in beside[beside.index(local) + 1 :]]
    norms = [each for each in after if type(modules[each]).__name__.lower().endswith("norm")]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    first = [each for each, part in modules.items() if part is embedding]
    # One without weights may be used before the layers, too (NanoChat).
    return lists, first, [each for each in norms if any(True for _ in modules[each].parameters())]


def _declaring(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost models with a pipeline plan, by name."""
    # In the object itself: wrappers of `peft` answer for the model that they hold.
    if vars(module).get("_pp_plan") and hasattr(module, "config"):
        yield name, module
        return
    for local, child in module.named_children():
        yield from _declaring(child, joined(name, local))


def _embeds_more(base: nn.Module, declared: set[nn.Module], layers: nn.Module) -> bool:
    """Return whether a model has undeclared weights beside its layers, which may make more from its embedding.

    Layers of later stages then read what is made from it, so that all stages hold the embedding.
    """
    known = {*declared, layers}
    return any(child not in known and any(True for _ in child.parameters()) for child in base.children())


# ------------------------------------------------------------------ cutting


def parts_of(root: nn.Module, parts: DeclaredParts, stages: Sequence[Stage]) -> dict[str, nn.Module | None]:
    """Return, by name, what some stages hold in place of the parts of the whole model."""
    layers = root.get_submodule(parts.layers)
    held = {str(index): layers._modules[str(index)] for stage in stages for index in stage.layers}
    away = [] if any(stage.embed for stage in stages) else list(parts.first)
    away += [] if any(stage.head for stage in stages) else list(parts.last)
    # None instead of nothing: models ask whether they have a head.
    return {parts.layers: shadow_of(layers, held), **dict.fromkeys(away)}


def put(root: nn.Module, changes: Mapping[str, nn.Module | None]) -> None:
    """Put modules at their places in a model."""
    for name, module in changes.items():
        outer, _, local = name.rpartition(".")
        root.get_submodule(outer)._modules[local] = module


def with_parts(root: nn.Module, changes: Mapping[str, nn.Module | None]) -> nn.Module:
    """Return a second object of a model with other modules at some places; all else is shared."""
    children, inside = dict(root._modules), dict[str, dict[str, nn.Module | None]]()
    for name, module in changes.items():
        outer, _, rest = name.partition(".")
        if rest:
            inside.setdefault(outer, {})[rest] = module
        else:
            children[outer] = module
    for outer, those in inside.items():
        whole = children[outer]
        assert whole is not None
        children[outer] = with_parts(whole, those)
    found: nn.Module = shadow_of(root, children)
    return found


# ------------------------------------------------------------------ running


class DeclaredStage:
    """Runs one stage by the code of the whole model.

    Args:
        root: the module with the model, still whole.
        parts: names of the model's parts.
        stage: what this stage holds.
        start: the number of layers on earlier stages.
    """

    def __init__(self, root: nn.Module, parts: DeclaredParts, stage: Stage, start: int) -> None:
        layers = root.get_submodule(parts.layers)
        self.root, self.parts, self.stage = root, parts, stage
        self.start, self.stop = start, start + len(stage.layers)
        entries = {str(index): _Entry(self, index, layer) for index, layer in enumerate(layers.children())}
        self.changes: dict[str, nn.Module | None] = {parts.layers: shadow_of(layers, entries)}
        if not stage.embed:
            self.changes |= {name: _Zeros(self, name) for name in parts.first}
        if not stage.head:
            self.changes |= {name: _Away(self, name) for name in parts.last}
        self.received: Tensor | None = None
        self.others: tuple[Tensor | None, ...] = ()
        """What layers of earlier stages returned beside hidden states; None: nobody reads it."""
        self.sent: Carry | None = None
        self.next = 0

    def run(self, step: Callable[[nn.Module], Carry], received: Carry | None) -> Carry:
        """Run a step that is written for the whole model; return what this stage sends, or the step on the last one.

        Args:
            step: gets the module with the model, and calls that once.
            received: what the previous stage sends; None on the first.

        Raises:
            ConfigurationError: the step, or the model, cannot run on stages.
        """
        made: Carry = {}
        with self.entered(received or {}):
            made = step(self.root)
        sent, self.sent = self.sent, None
        return made if sent is None else sent

    @contextmanager
    def entered(self, received: Carry) -> Iterator[None]:
        """Let the model run this stage inside, once. A stage before the last leaves by :class:`StageEnd`.

        Raises:
            ConfigurationError: the model was not called, or not all of its layers.
        """
        self.received, self.sent, self.next = received.get(HIDDEN), None, 0
        self.others = tuple(
            value if name.startswith(READ) else None for name, value in received.items() if name != HIDDEN
        )
        before = {name: _at(self.root, name) for name in self.changes}
        put(self.root, self.changes)
        # Of the model and what holds it: a sum over all weights would miss those of other stages without a word.
        holders = {self.root, self.root.get_submodule(self.parts.model)}
        try:
            with suppress(StageEnd), ExitStack() as whole:
                for holder in holders:
                    whole.enter_context(overridden(holder, named_parameters=partial(self._few, holder)))
                yield
        finally:
            put(self.root, before)
            self.received, self.others = None, ()
        if self.sent is None and (not self.stage.head or self.next != self.parts.count):
            ran = f"ran {self.next} of its {self.parts.count} layers" if self.next else "was not called"
            raise ConfigurationError(
                f"{self.parts.model} {ran} in a step on {self.stage}, and every step of a pipeline runs it once. "
                f"{INSTEAD}."
            )

    def run_layer(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer in the model's own loop, or pass it over, or leave."""
        hidden = args[0] if args else kwargs.get(HIDDEN)
        if index != self.next or not isinstance(hidden, Tensor):
            raise ConfigurationError(
                f"{self.parts.layers}.{index} ran out of turn: the step calls {self.parts.model} more than once, or "
                f"the model does not run its layers one after the other. {INSTEAD}."
            )
        self.next += 1
        if index == 0:
            self._check_recorded(kwargs)
        last = index == self.parts.count - 1
        given = (*args[1:], *(value for name, value in kwargs.items() if name != HIDDEN))
        if index < self.start:
            # What this layer returns is read by nobody, except by the head of a stage without layers.
            passed = self.received if last else hidden
            return (passed, *self.others) if self.others else passed
        if index == self.start:
            hidden = hidden if self.received is None else self.received
            self._check_others(layer, given)
        if index == self.stop:
            self._leave(hidden, given)
        made = layer(hidden, *args[1:], **kwargs) if args else layer(**{**kwargs, HIDDEN: hidden})
        hidden, *others = made if isinstance(made, tuple) else (made,)
        if not isinstance(hidden, Tensor):
            raise ConfigurationError(
                f"{self.parts.layers}.{index} ({type(layer).__name__}) returns {type(made).__name__}, and a pipeline "
                f"sends tensors alone, hidden states first. {INSTEAD}."
            )
        self.others = tuple(each if isinstance(each, Tensor) else None for each in others)
        if last and not self.stage.head:
            self._leave(hidden, ())
        return made

    def _few(self, holder: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters for those who look at the first ones, and refuse to come to the end of them."""
        yield from type(holder).named_parameters(holder, *args, **kwargs)
        raise ConfigurationError(
            f"the step reads all parameters of {type(holder).__name__}, and {self.stage} has some of them only. "
            f"{INSTEAD}."
        )

    def _leave(self, hidden: Tensor, given: Sequence[Any]) -> None:
        """Leave the code of the model, which gives hidden states and others to the next layer."""
        self.sent = {HIDDEN: hidden}
        for place, other in enumerate(self.others):
            if other is not None and any(other is each for each in given):
                self.sent[f"{READ}{place}"] = other
            else:  # tensors without elements are no messages
                self.sent[f"{UNREAD}{place}"] = hidden.new_zeros(1, dtype=torch.uint8)
        raise StageEnd

    def _check_recorded(self, given: Mapping[str, Any]) -> None:
        """Refuse options by which the end of the model reads all of its layers."""
        config = self.root.get_submodule(self.parts.base).config
        if on := next((name for name in RECORDED if given.get(name, getattr(config, name, False))), None):
            raise ConfigurationError(
                f"{self.parts.model} runs with {on}=True, by which its end reads every layer, and the last stage of a "
                f"pipeline has its own only. Leave it out, or set it to False in the configuration. {INSTEAD}."
            )

    def _check_others(self, layer: nn.Module, others: Iterable[Any]) -> None:
        """Refuse what layers read beside hidden states, and later stages would get from zeros."""
        # On every stage the code makes it again; only from the embedding it cannot, where that is away.
        unknown = [each for each in others if isinstance(each, Tensor) and all(each is not one for one in self.others)]
        if self.parts.first and any(each.requires_grad for each in unknown):
            raise ConfigurationError(
                f"{type(layer).__name__} of {self.parts.layers} reads a tensor with a gradient beside the hidden "
                f"states, which later stages of a pipeline do not get. {INSTEAD}."
            )


def _at(root: nn.Module, name: str) -> nn.Module | None:
    outer, _, local = name.rpartition(".")
    return root.get_submodule(outer)._modules[local]


class _Entry(nn.Module):
    """Stands in the list of layers while a stage runs. It has the attributes of its layer, which may be elsewhere."""

    def __init__(self, run: DeclaredStage, index: int, layer: nn.Module) -> None:
        super().__init__()
        here = index in run.stage.layers
        attach_modules(self, layer=layer if here else shadow_of(layer, {}, _parameters={}, _buffers={}))
        self.run = run
        self.index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.run_layer(self.index, self.layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class _Away(nn.Module):
    """Stands for a part that another stage holds."""

    def __init__(self, run: DeclaredStage, name: str) -> None:
        super().__init__()
        self.run = run
        self.name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.name} has no {name} here: {self.run.stage} does not hold it. {INSTEAD}.")


class _Zeros(_Away):
    """Stands for the embedding on later stages, whose code needs the form of its output only."""

    def __init__(self, run: DeclaredStage, name: str) -> None:
        super().__init__(run, name)
        self.embedding_dim = run.root.get_submodule(name).get_parameter("weight").shape[1]

    def forward(self, tokens: Tensor) -> Tensor:
        received: Any = self.run.received
        return torch.zeros(*tokens.shape, self.embedding_dim, dtype=received.dtype, device=received.device)
