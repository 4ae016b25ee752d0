"""A vision-language model: ``embed | layers | head``, where the embedding has a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalight.data.multimodal.images import Mixtures
from megalight.data.multimodal.template import MIXED, NEWLINE
from megalight.errors import DataError
from megalight.models.gpt.model import GPT, GPTOutput
from megalight.models.vision.model import PackedImages, VisionTower
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.nn import Activation, LayerNorm, Linear, RMSNorm, TokenEmbedding
from megalight.nn.init import Initializer, Normal
from megalight.ops.common import wide
from megalight.types import PackedSequences


class Projector(nn.Module):
    """``down(act(up(join(norm(x)))))``: from the width of the tower to that of the language model.

    ``join`` lays ``merge^2`` rows after each other side by side, or averages them. The norm is optional, and may come
    after it. With one layer: ``proj(norm(join(x)))``.
    """

    def __init__(self, config: VLMConfig, own: ProjectorConfig | None = None) -> None:
        super().__init__()
        own, wide = own or config.projector, config.language.hidden_size
        inner, std = own.hidden_size or wide, own.init.std
        self.joined, self.pool, self.norm_joined = own.merge**2, own.pool, own.norm_joined
        # A class token is no part of a square, and registers give no features.
        self.patches = PatchRows() if config.added_rows else None
        size = config.vision.hidden_size
        joined = size if own.pool else size * self.joined
        self.norm = build_norm(own, joined if own.norm_joined else size, config.vision.backends.norm)
        self.proj = Linear(joined, wide, bias=own.bias, std=std) if own.layers == 1 else None
        self.up = Linear(joined, inner, bias=own.bias, std=std) if own.layers == 2 else None
        self.act = Activation(own.activation, config.vision.backends.activation)
        self.down = Linear(inner, wide, bias=own.bias, std=std) if own.layers == 2 else None

    def forward(self, features: Tensor, patches: Tensor | None = None) -> Tensor:
        """``[P, hv] -> [P' / merge^2, h]``, where ``patches [P']`` are the rows to read. None: all."""
        if self.patches is not None:
            features = self.patches(features, patches)
        if self.norm is not None and not self.norm_joined:
            features = self.norm(features)
        if self.pool:
            features = features.view(-1, self.joined, features.shape[1]).mean(1)
        else:
            features = features.view(-1, self.joined * features.shape[1])
        if self.norm is not None and self.norm_joined:
            features = self.norm(features)
        if self.proj is None:
            assert self.up is not None and self.down is not None
            projected: Tensor = self.down(self.act(self.up(features)))
        else:
            projected = self.proj(features)
        return projected


class PatchRows(nn.Module):
    """Takes the rows of patches out of those of a tower with class tokens or registers. It has no parameters."""

    def forward(self, features: Tensor, patches: Tensor) -> Tensor:
        """``features [P, h], patches [P'] -> [P', h]``."""
        return features.index_select(0, patches)


def build_norm(own: ProjectorConfig, size: int, backend: str) -> nn.Module | None:
    """Build a projector's norm over ``size`` features, if it has one."""
    if own.norm == "none":
        return None
    if own.norm == "layer":
        return LayerNorm(size, own.norm_eps, backend=backend)
    return RMSNorm(size, own.norm_eps, backend, around_zero=own.norm_around_zero)


@dataclass(frozen=True, eq=False)
class RemoteFeatures:
    """Features of the images of a micro-batch, which were computed elsewhere.

    Attributes:
        features: ``[P, (1 + N) h]``: what the projector returns, and beside it what each of ``N`` deep projectors
            returns; at least one row.
        source: ``[T]`` int64, as in :class:`~megalight.models.vision.model.PackedImages`.
        mixtures: further rows of features.
    """

    features: Tensor
    source: Tensor
    mixtures: Mixtures | None = None


class ImageRows(nn.Module):
    """Puts features of images in the places of image tokens. It has no parameters."""

    def forward(self, source: Tensor, features: Tensor, hidden: Tensor) -> Tensor:
        """``source [T], features [P, h], hidden [T, h] -> [T, h]``."""
        here = source >= 0
        # Text reads a row too, which is not used. It is another one for each token: the backward adds zeros to them,
        # and adding all to one row would be slow on a GPU.
        spare = torch.arange(len(source), device=source.device) % len(features)
        rows = features.index_select(0, torch.where(here, source, spare))
        return torch.where(here[:, None], rows.to(hidden.dtype), hidden)


class Newline(nn.Module):
    """A learned row after the features of each image.

    Attributes:
        weight: ``[h]``.
    """

    def __init__(self, hidden_size: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, source: Tensor, hidden: Tensor) -> Tensor:
        """``source [T], hidden [T, h] -> [T, h]``."""
        return torch.where((source == NEWLINE)[:, None], self.weight.to(hidden.dtype), hidden)


class ImageTextEmbedding(TokenEmbedding):
    """The embedding of tokens, of which some are parts of images.

    Args:
        text: the embedding of the others.
        tower: turns images into features, or None: features arrive.
        projector: gives these the width of hidden states; None without a tower.
        newline: the row after each image, or None.
        deep: projectors of the tower's taps.

    Attributes:
        deep: by number, a module with each ``projector``; None: there are none, or features arrive.
        num_deep: their number, also where features arrive.
        num_ids: size of the vocabulary.
    """

    def __init__(
        self,
        text: TokenEmbedding,
        tower: VisionTower,
        projector: Projector,
        newline: Newline | None = None,
        deep: Sequence[Projector] = (),
    ) -> None:
        parts = text.word, text.position, text.token_type, text.norm
        super().__init__(*parts, multiplier=text.multiplier, dropout=text.dropout.p)
        self.tower: VisionTower | None = tower
        self.projector: Projector | None = projector
        self.remote_features: nn.Module | None = None
        self.images = ImageRows()
        self.newline = newline
        # Under a name that ends as that of the first projector: rules are for both.
        named = {str(number): nn.ModuleDict({"projector": each}) for number, each in enumerate(deep)}
        self.deep: nn.ModuleDict | None = nn.ModuleDict(named) if deep else None
        self.num_deep = len(deep)
        self.num_ids = len(text.word.weight)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        packed_images: PackedImages | RemoteFeatures | None = None,
    ) -> Any:
        """``tokens [T], positions [T] -> [T, h]``. Without ``packed_images``, no token is part of an image.

        With deep projectors and images: the same and, for each of them, ``[T, h]`` to add to a later layer.
        """
        if packed_images is None:
            return super().forward(tokens, positions, token_types)
        hidden = super().forward(self._spread(tokens, packed_images.source), positions, token_types)
        features, *deep = (mixed(each, packed_images.mixtures) for each in self._features(packed_images))
        source = among(packed_images.source, features, packed_images.mixtures)
        merged: Tensor = self.images(source, features, hidden)
        if self.newline is not None:
            merged = self.newline(source, merged)
        if not deep:
            return merged
        nothing = torch.zeros_like(hidden)
        return merged, torch.stack([self.images(source, each, nothing) for each in deep])

    def _spread(self, tokens: Tensor, source: Tensor) -> Tensor:
        """Return the tokens, with other ids where features come: ``[T]``.

        Nothing reads what the table has for them, and the gradient there is zero. But on a GPU, the gradients of one id
        are summed one after the other, and the image token is half of all tokens.
        """
        ids = torch.arange(len(tokens), device=tokens.device) % self.num_ids
        return torch.where(source == -1, tokens, ids)

    def _features(self, packed_images: PackedImages | RemoteFeatures) -> tuple[Tensor, ...]:
        if isinstance(packed_images, RemoteFeatures):
            assert self.remote_features is not None, "this model computes features itself"
            found: Tensor = self.remote_features(packed_images.features)
            return found.chunk(1 + self.num_deep, dim=1)
        assert self.tower is not None and self.projector is not None, "features of this model arrive"
        return project(self.tower, self.projector, self.deep, packed_images)


def mixed(features: Tensor, mixtures: Mixtures | None) -> Tensor:
    """Return features ``[P, h]`` and behind them ``M`` mixtures of these, ``[P + M, h]``."""
    if mixtures is None:
        return features
    # One corner after the other: all four at once would need four times the memory.
    kind = wide(features.dtype)
    shares = mixtures.shares.to(kind)
    corners = zip(mixtures.rows.unbind(1), shares.unbind(1), strict=True)
    parts = [features.index_select(0, rows) * share[:, None] for rows, share in corners]
    return torch.cat([features, sum(parts[1:], parts[0]).to(features.dtype)])


def among(source: Tensor, features: Tensor, mixtures: Mixtures | None) -> Tensor:
    """Return the source of each token, ``[T]``, in which mixtures are rows at the end of ``features [P + M, h]``."""
    if mixtures is None:
        return source
    first = len(features) - len(mixtures.rows)
    return torch.where(source <= MIXED, first + MIXED - source, source)


def project(
    tower: VisionTower, projector: Projector, deep: nn.ModuleDict | None, packed_images: PackedImages
) -> tuple[Tensor, ...]:
    """Return what the projector makes of all rows, ``[P, h]``, and then what each deep projector makes of its tap."""
    last, *tapped = tower(packed_images)
    projectors = () if deep is None else tuple(deep.values())
    further = [
        each.get_submodule("projector")(features, packed_images.patches)
        for each, features in zip(projectors, tapped, strict=True)
    ]
    return projector(last, packed_images.patches), *further


class TowerPart(nn.Module):
    """The tower and the projectors of a vision-language model, under their names in it.

    Attributes:
        embed: has ``tower``, ``projector``, and ``deep`` if the model has taps.
    """

    def __init__(self, tower: VisionTower, projector: Projector, deep: nn.ModuleDict | None = None) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"tower": tower, "projector": projector})
        if deep is not None:
            self.embed["deep"] = deep

    @property
    def parts(self) -> tuple[VisionTower, Projector, nn.ModuleDict | None]:
        """Tower, projector and deep projectors."""
        deep = self.embed["deep"] if "deep" in self.embed else None  # noqa: SIM401 - a ModuleDict has no get
        return self.embed["tower"], self.embed["projector"], deep  # type: ignore[return-value]

    def forward(self, packed_images: PackedImages) -> Tensor:
        """Return features ``[P, (1 + N) h]`` of all rows: those of ``N`` taps are beside those of the last layer."""
        features = project(*self.parts, packed_images)
        return torch.cat(features, dim=1) if len(features) > 1 else features[0]


class VLM(GPT):
    """A language model that reads images. Parameters have no values until they are initialized or loaded.

    Features of images take the places of image tokens in the output of the embedding. All else is the language model.

    Attributes:
        divided: whether tower and projectors were taken out, and run by themselves.
    """

    def __init__(self, config: VLMConfig) -> None:
        super().__init__(config.language)
        self.divided = False
        assert self.embed is not None
        newline = Newline(config.language.hidden_size, config.language.init.std) if config.newline else None
        # Their norm is of joined features, that of the first projector of patches.
        own = replace(config.projector, norm_joined=True)
        deep = [Projector(config, own) for _ in config.deepstack]
        tower = VisionTower(config.vision, config.deepstack)
        self.embed = ImageTextEmbedding(self.embed, tower, Projector(config), newline, deep)
        self.deepstack = config.deepstack
        for number in range(len(config.deepstack)):
            self.layers[str(number)].adds = number  # type: ignore[assignment]
            self.layers[str(number)].narrow(False)  # type: ignore[operator]  # what it adds is of all tokens
        for layer in self.layers.values() if config.mutual else ():
            layer.get_submodule("attention.inner").mutual = True  # type: ignore[assignment]
        self.config = config  # type: ignore[assignment]  # it has what the language model asks of its own

    def forward(
        self,
        tokens: Tensor | None,
        sequences: PackedSequences,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        *rest: Any,
        packed_images: PackedImages | RemoteFeatures | None = None,
        memory: Tensor | None = None,
        **options: Any,
    ) -> GPTOutput:
        """Run the parts that this model has; see :meth:`megalight.models.gpt.model.GPT.forward`.

        Args:
            packed_images: the images of the sequences, which only the embedding reads.
            memory: ``[N, T, h]``: features that are added to the output of the first layers, from the part before.

        Raises:
            DataError: a sequence is longer than ``max_sequence_length``, or the input of this part is missing.
        """
        if self.embed is not None and packed_images is not None:
            if tokens is None:
                raise DataError("tokens is None, but this model begins with its embedding; pass token ids [T].")
            hidden = self.embed(tokens, sequences.positions, packed_images=packed_images)
            if isinstance(hidden, tuple):
                hidden, memory = hidden
        options["memory"] = memory
        output = super().forward(tokens, sequences, labels, hidden, *rest, **options)
        if output.hidden is None or max(map(int, self.layers), default=-1) >= len(self.deepstack) - 1:
            return output
        if memory is None:
            # The next part waits for it, whether there are images or not.
            memory = output.hidden.new_zeros(len(self.deepstack), *output.hidden.shape)
        return replace(output, memory=memory)

    def without_tower(self) -> TowerPart:
        """Take tower and projectors out of the model, which then reads features that arrive."""
        embed = self.embed
        assert isinstance(embed, ImageTextEmbedding) and embed.tower is not None and embed.projector is not None
        part = TowerPart(embed.tower, embed.projector, embed.deep)
        embed.tower = embed.projector = embed.deep = None
        self.divided = True
        embed.remote_features = nn.Identity()
        return part

    def attach(self, part: TowerPart) -> None:
        """Give tower and projectors their names in the model again. They do not run in it: features arrive."""
        if isinstance(self.embed, ImageTextEmbedding):
            self.embed.tower, self.embed.projector, self.embed.deep = part.parts
        else:  # a part of a model without its embedding
            self.embed = part.embed  # type: ignore[assignment]
