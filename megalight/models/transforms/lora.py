"""LoRA and DoRA: low-rank adapters beside frozen linear layers (https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from megalight.attachments import APPLIED
from megalight.errors import ConfigurationError, integer, nearest
from megalight.nn import Linear
from megalight.nn.adapter import DEFAULT, Adapter, AdapterSet, add_adapter, remove_adapters
from megalight.nn.init import ConstantInit
from megalight.nn.moe import Experts
from megalight.nn.moe.adapters import StackAdapter
from megalight.ops.quantized_weight import stored_of
from megalight.parallel.transform import ModelTransform, register

if TYPE_CHECKING:
    from megalight.parallel.model import ParallelModel


@register
@dataclass(frozen=True)
class LoRA(ModelTransform):
    """Freezes a model and changes linear layers to ``y = x W^T + alpha / rank * dropout(x) A^T B^T``.

    The initial ``A [rank, in]`` is random, the initial ``B [out, rank]`` is 0. A fused layer has a pair for each
    section (q, k, v; gate, up). All adapted sections of a layer share one dropout mask. Each expert of a stack has a
    pair for each projection, and one name stands for all experts (``layers.*.mlp.experts.gate``).

    A model may have several, each under a name of its own. The last one is trained and active; the others are frozen
    and compute only when :func:`activate` names them.

    Args:
        rank: rank of the updates.
        targets: globs that match full names of linear layers or sections (``layers.*.attention.q``) or the ends of
            names (``attention.q``, ``q``). Default: all linear layers in the transformer layers.
        alpha: the update is multiplied by ``alpha / rank``.
        dropout: probability of dropping an input feature of an adapter in training.
        rank_stabilized: scale by ``alpha / sqrt(rank)`` instead, so that a higher rank does not learn more slowly
            (rsLoRA, https://arxiv.org/abs/2312.03732).
        exclude: globs in the form of ``targets``; what they match gets no adapter.
        adapter: its name: letters, digits, ``_`` and ``-``.

    Raises:
        ConfigurationError: a value is out of range.
    """

    name: ClassVar[str] = "lora"
    given_by: ClassVar[str] = "the callback Adapters"

    rank: int
    targets: Sequence[str] = ("layers.*",)
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilized: bool = False
    exclude: Sequence[str] = ()
    adapter: str = DEFAULT

    def __post_init__(self) -> None:
        # A string is a sequence of letters, and each would be a target.
        for name in ("targets", "exclude"):
            if isinstance(given := getattr(self, name), str):
                raise ConfigurationError(f"{name}={given!r} is one string; give a list: [{given!r}].")
            object.__setattr__(self, name, tuple(given))
        integer("rank", self.rank)
        if not self.targets:
            raise ConfigurationError("targets is empty; name linear layers to adapt, such as 'attention.*'.")
        if not self.alpha > 0:
            raise ConfigurationError(f"alpha={self.alpha}; it must be above 0.")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"dropout={self.dropout}; it must be at least 0 and below 1.")
        # The name is one of a module, which has attributes of its own, and a part of names of tensors.
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.adapter) or hasattr(AdapterSet(), self.adapter):
            raise ConfigurationError(
                f"{self.adapter!r} cannot be the name of an adapter: take letters, digits, '_' and '-', and no name of "
                "an attribute of torch.nn.Module."
            )

    @property
    def scale(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def change(self, model: nn.Module) -> None:
        """Freeze all parameters and add the adapters. Styles split adapters with their layers, so no rule is needed.

        Raises:
            ConfigurationError: a target matches no linear layer, the rank is too large for a layer, or a layer has an
                adapter already.
        """
        layers = dict(linear_layers(model))
        names = [name for sections in layers.values() for name in sections]
        given = [("target", each) for each in self.targets] + [("exclude", each) for each in self.exclude]
        for kind, target in given:
            # Before anything is changed: a wrong target leaves the model as it was.
            if not any(matches(name, target) for name in names):
                raise ConfigurationError(
                    f"{kind} {target!r} of LoRA matches no linear layer of {type(model).__name__}."
                    + (nearest(target, {name.rpartition(".")[2] for name in names}) or nearest(target, names))
                    + f" It has {', '.join(dict.fromkeys(name.rpartition('.')[2] for name in names)) or 'none'}."
                )
        if not any(map(self._adapts, names)):
            raise ConfigurationError(
                f"exclude={list(self.exclude)} of LoRA leaves none of the layers of targets={list(self.targets)}; give "
                "narrower globs."
            )
        if self.adapter in names_of_adapters(model):
            raise ConfigurationError(
                f"{type(model).__name__} has an adapter {self.adapter!r} already; use one LoRA with the targets of "
                "both, or another name."
            )
        # Before adapters are added: those are trained.
        model.requires_grad_(False)
        for path, sections in layers.items():
            wanted = [name for name in sections if self._adapts(name)]
            if wanted:
                layer = model.get_submodule(path)
                adapt = self._adapt_experts if isinstance(layer, Experts) else self._adapt
                adapt(path, layer, wanted)
        _set_active(model, self.adapter)

    def _adapts(self, name: str) -> bool:
        return any(matches(name, each) for each in self.targets) and not any(
            matches(name, each) for each in self.exclude
        )

    def _adapt(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        own = [name.rpartition(".")[2] for name in wanted]
        adapter = Adapter.of(
            layer, path.rpartition(".")[2], own, width=self.rank, scale=self.scale, dropout=self.dropout
        )
        self._check_rank(path, adapter.A.shape[1], adapter.sizes)
        add_adapter(layer, adapter, self.adapter)

    def _adapt_experts(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        assert isinstance(layer, Experts)
        if self.dropout:
            raise ConfigurationError(
                f"dropout={self.dropout}: adapters of experts have none, and {path} is among the targets. Set dropout "
                "to 0, or exclude 'experts.*'."
            )
        for name in wanted:
            projection = name.rpartition(".")[2]
            weight = layer.weight_of(projection)
            count, out_features, in_features = weight.shape
            self._check_rank(name, in_features, [out_features])
            if projection not in layer.adapters:
                layer.adapters[projection] = AdapterSet()
            layer.adapters[projection][self.adapter] = StackAdapter(  # type: ignore[operator]
                nn.Parameter(weight.new_empty(count, self.rank, in_features)),
                nn.Parameter(weight.new_empty(count, out_features, self.rank)),
                self.scale,
                inner=1 if projection == "down" else 0,
            )

    def _check_rank(self, path: str, in_features: int, sizes: Sequence[int]) -> None:
        # A rank above this adds numbers and no freedom: the update cannot have more independent rows.
        least = min(in_features, *sizes)
        if self.rank > least:
            raise ConfigurationError(
                f"rank={self.rank} is larger than {path} allows, which has {in_features} input features and "
                f"sections of {', '.join(map(str, sizes))} output features; choose a rank of at most {least}."
            )


@torch.no_grad()
def merge(model: nn.Module) -> int:
    """Add the active adapter of a one-device model to its layers' weights, and remove all. It sums in float32 or wider.

    Returns:
        the number of layers that had that adapter; a stack of experts is one layer.

    Raises:
        ConfigurationError: another module holds a layer's weight too (a tied head), and the sum would be its as well;
            or weights are stored quantized.
    """
    count = 0
    holders = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    for path, module in model.named_modules():
        adapters = getattr(module, "adapter", None)
        if (
            isinstance(adapters, AdapterSet)
            and isinstance(adapters.current, Adapter)
            and holders[id(module.weight)] > 1
        ):
            raise ConfigurationError(
                f"{path} has an adapter and shares its weight with the embedding, which the sum would change, too. Use "
                "the adapter as it is (--base), or train with exclude=['output_layer']."
            )
    # A list, because adapters are removed from the tree on the way.
    for module in list(model.modules()):
        adapters = getattr(module, "adapter", None)
        if isinstance(adapters, AdapterSet):
            adapter = adapters.current
            remove_adapters(module)
            if not isinstance(adapter, Adapter):
                continue
            assert isinstance(module.weight, Tensor)
            _check_plain(module.weight)
            module.weight.copy_(merged(module.weight, adapter))
            count += 1
        elif isinstance(module, Experts) and module.adapters:
            found = {projection: cast(AdapterSet, each).current for projection, each in module.adapters.items()}
            module.adapters.clear()
            for projection, stack in found.items():
                if isinstance(stack, StackAdapter):
                    _check_plain(module.up, module.down)
                    weight = module.weight_of(projection)
                    weight.copy_(stack.merged(weight))
            count += any(stack is not None for stack in found.values())
    return count


def _check_plain(*weights: Tensor) -> None:
    if any(stored_of(weight) is not None for weight in weights):
        raise ConfigurationError(
            "the weights are stored quantized, which lacks bits for the sum. Merge the checkpoint of the adapters with "
            "its base instead (megalight merge)."
        )


def activate(model: nn.Module, adapter: str | None) -> None:
    """Let another adapter of a model compute, from the next forward pass on. What is trained does not change.

    Args:
        model: the model, or this process's part of one; all processes call it.
        adapter: the adapter's name. None: the model computes as without adapters.

    Raises:
        ConfigurationError: the model has no such adapter. The message lists those that it has.
    """
    names = names_of_adapters(model)
    if adapter is not None and adapter not in names:
        raise ConfigurationError(
            f"{type(model).__name__} has no adapter {adapter!r}.{nearest(adapter, names)} It has "
            f"{', '.join(names) or 'none'}."
        )
    _set_active(model, adapter)


def _set_active(model: nn.Module, adapter: str | None) -> None:
    for module in model.modules():
        if isinstance(module, AdapterSet):
            module.active = adapter


def names_of_adapters(model: nn.Module) -> list[str]:
    """Return the names of a model's adapters, in the order in which they were added."""
    # Not from its layers: a stage of a pipeline may hold none that an adapter changes.
    done = (transform for transform, _ in APPLIED.get(model, ()))
    inside = (name for module in model.modules() if isinstance(module, AdapterSet) for name in module)
    return list(dict.fromkeys([*(each.adapter for each in done if isinstance(each, LoRA)), *inside]))


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """Return ``W + scale * B A`` of each section, its rows rescaled if the adapter has magnitudes.

    The result is rounded once, to the dtype of ``weight``.
    """
    # product and sum in float32 or wider, so that only the result is rounded to a half dtype
    wide = torch.promote_types(weight.dtype, torch.float32)
    # Only adapted sections have pairs, in the order of the sections.
    downs, ups = iter(adapter.A.split(adapter.width)), iter(adapter.B.split(adapter.sizes))  # type: ignore[no-untyped-call]
    parts = [
        part.to(wide) + adapter.scale * (next(ups).to(wide) @ next(downs).to(wide)) if adapted else part.to(wide)
        for part, adapted in zip(torch.split(weight, adapter.section_sizes), adapter.adapted, strict=True)
    ]
    if adapter.magnitude is not None:
        wanted = torch.split(adapter.magnitude, adapter.sizes)
        for factor, (index, lengths) in zip(wanted, adapter.lengths(weight), strict=True):
            parts[index] = parts[index] * (factor.to(wide) / lengths)[:, None]
    return torch.cat(parts).to(weight.dtype)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each linear layer, and the full names of its sections, of its projections, or its own name."""
    for path, module in model.named_modules():
        if isinstance(module, Linear | nn.Linear):
            around = path.rpartition(".")[0]
            sections = getattr(module, "sections", None)
            yield path, [f"{around}.{part.name}".lstrip(".") for part in sections] if sections else [path]
        elif isinstance(module, Experts):
            yield path, [f"{path}.{name}" for names in module.projections.values() for name in names]


def matches(name: str, target: str) -> bool:
    """Return whether a glob matches a full name, or the end of it."""
    # Both forms, so that `q` finds every `q`.
    return fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name, f"*.{target}")


# DoRA: the magnitude of each weight row is learned on its own (https://arxiv.org/abs/2402.09353)


@register
@dataclass(frozen=True)
class DoRA(LoRA):
    """Freezes a model and changes linear layers to ``y = m / ||W + s B A|| * (W + s B A) x``, row by row.

    ``m`` has one number for each output feature (of each expert) and begins as the length of the row of ``W``. No
    gradient goes through the length of ``W + s B A``, as in the paper. A bias is added unchanged. Of weights that are
    stored quantized, ``W`` is what they stand for. Arguments are those of :class:`LoRA`.
    """

    name: ClassVar[str] = "dora"
    writes_in_place: ClassVar[bool] = True

    def _adapt(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        super()._adapt(path, layer, wanted)
        self._add_magnitudes(layer)

    def _adapt_experts(self, path: str, layer: nn.Module, wanted: list[str]) -> None:
        super()._adapt_experts(path, layer, wanted)
        self._add_magnitudes(layer)

    def _add_magnitudes(self, layer: nn.Module) -> None:
        for _, adapter in self._adapters_of(layer):
            # a number for each row of B
            adapter.magnitude = nn.Parameter(adapter.B.new_empty(adapter.B.shape[:-1]))
            # 0 says that the lengths are not known yet: the values of the frozen weights come later.
            adapter.initializers["magnitude"] = ConstantInit(0.0)

    @torch.no_grad()
    def with_values(self, model: ParallelModel) -> None:
        """Set magnitudes that no checkpoint has given."""
        for layer in model.root.modules():
            for projection, adapter in self._adapters_of(layer):
                if adapter.magnitude is None or adapter.magnitude.any():
                    continue
                if isinstance(adapter, StackAdapter):
                    assert isinstance(layer, Experts)
                    adapter.magnitude.copy_(adapter.lengths(layer.weight_of(projection)))
                else:
                    assert isinstance(layer.weight, Tensor)
                    adapter.magnitude.copy_(torch.cat([lengths for _, lengths in adapter.lengths(layer.weight)]))

    def _adapters_of(self, layer: nn.Module) -> Iterator[tuple[str, Adapter | StackAdapter]]:
        """Yield the adapters of this name that a layer has, with their projections; a linear layer has none."""
        sets = dict(layer.adapters) if isinstance(layer, Experts) else {"": getattr(layer, "adapter", None)}
        for projection, adapters in sets.items():
            adapter = adapters.find(self.adapter) if isinstance(adapters, AdapterSet) else None
            if isinstance(adapter, Adapter | StackAdapter):
                yield projection, adapter
