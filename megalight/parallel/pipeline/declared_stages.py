"""Stages of a model of ``transformers``, cut by what it declares and run by its own code.

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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalight.attachments import overridden, shadow_of
from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.pipeline.layout import Stage
from megalight.parallel.pipeline.p2p_communication import Carry

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
        yield from _declaring(child, f"{name}.{local}" if name else local)


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
        # Not as a child: the entry is no part of the model.
        self.__dict__["layer"] = layer if here else shadow_of(layer, {}, _parameters={}, _buffers={})
        self.__dict__["stage"] = run
        self.index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["stage"].run_layer(self.index, self.__dict__["layer"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class _Away(nn.Module):
    """Stands for a part that another stage holds."""

    def __init__(self, run: DeclaredStage, name: str) -> None:
        super().__init__()
        self.__dict__["stage"] = run
        self.name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__['name']} has no {name} here: {self.__dict__['stage'].stage} does not hold it. {INSTEAD}."
        )


class _Zeros(_Away):
    """Stands for the embedding on later stages, whose code needs the form of its output only."""

    def __init__(self, run: DeclaredStage, name: str) -> None:
        super().__init__(run, name)
        self.embedding_dim = run.root.get_submodule(name).get_parameter("weight").shape[1]

    def forward(self, tokens: Tensor) -> Tensor:
        received = self.__dict__["stage"].received
        return torch.zeros(*tokens.shape, self.embedding_dim, dtype=received.dtype, device=received.device)
