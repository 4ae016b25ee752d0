"""The pipeline layout: which stage holds which part of the model.

Stages are counted in model order. With ``pp`` ranks and ``vpp`` chunks on each there are ``pp * vpp`` stages. Stage
``i`` is chunk ``i // pp`` of pipeline rank ``i % pp``, so a micro-batch visits every rank ``vpp`` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalight.errors import LayoutError
from megalight.parallel.pipeline import layout_string
from megalight.parallel.pipeline.layout_string import compose, draw, parse


@dataclass(frozen=True)
class Stage:
    """The part of the model that one chunk of one pipeline rank holds.

    Attributes:
        index: number of the stage in model order.
        rank: pipeline rank.
        chunk: number of the chunk on its rank.
        embed: whether it holds the embedding (only the first stage).
        layers: global indices of its layers, consecutive.
        head: whether it holds the head and computes the loss (only the last stage).
        mtp: number of multi-token-prediction layers: all of the model or none.
    """

    index: int
    rank: int
    chunk: int
    embed: bool
    layers: tuple[int, ...]
    head: bool
    mtp: int = 0

    def __str__(self) -> str:
        held = ["embed"] * self.embed + ["mtp"] * bool(self.mtp) + ["head"] * self.head
        if self.layers:
            held.insert(self.embed, f"layers {self.layers[0]} to {self.layers[-1]}")
        return f"stage {self.index} ({', '.join(held) or 'no layers'})"


@dataclass(frozen=True)
class PipelineLayout:
    """All stages of a model. Create one with :meth:`even`, :meth:`uneven` or :meth:`of_string`, which check it.

    Attributes:
        stages: the stages in model order.
        pp: number of pipeline ranks.
        vpp: number of chunks on each rank.
    """

    stages: tuple[Stage, ...]
    pp: int
    vpp: int

    @classmethod
    def even(
        cls,
        num_layers: int,
        pp: int,
        vpp: int = 1,
        *,
        count_embedding: bool = False,
        count_loss: bool = False,
        num_mtp: int = 0,
    ) -> PipelineLayout:
        """Create a layout with the same number of layers on every stage.

        Args:
            num_layers: layers of the model.
            pp: pipeline ranks.
            vpp: chunks on each rank.
            count_embedding: whether the embedding counts as a layer. The first stage then holds one layer less.
            count_loss: the same for the head with the loss and the last stage.
            num_mtp: multi-token-prediction layers of the model. They are on the last stage, and do not count.

        Raises:
            LayoutError: the layers do not divide, or a stage would have no layer. The message suggests layouts.
        """
        _check_degrees(num_layers, pp, vpp)
        counted = num_layers + count_embedding + count_loss
        share, left = divmod(counted, pp * vpp)
        counts = [share] * (pp * vpp)
        # The ends hold a layer less for each part that counts as one.
        counts[0] -= count_embedding
        counts[-1] -= count_loss
        if left or min(counts) < 1:
            parts = [f"{num_layers} layers", *["the embedding"] * count_embedding, *["the loss"] * count_loss]
            what = " + ".join(parts) + (f" = {counted}" if counted > num_layers else "")
            rule = "do not divide evenly over" if left else "leave a stage without a layer, of"
            advice = layout_string.suggest_even(num_layers, pp, vpp, counted, num_mtp)
            raise LayoutError(f"{what} {rule} {_stages(pp, vpp)}. {advice}")
        return cls._of_symbols(_symbols(counts, num_mtp), pp)

    @classmethod
    def uneven(
        cls,
        num_layers: int,
        pp: int,
        vpp: int = 1,
        *,
        first: int | None = None,
        last: int | None = None,
        num_mtp: int = 0,
    ) -> PipelineLayout:
        """Create a layout with given numbers of layers on the first and last rank; the others share the rest equally.

        Args:
            num_layers: layers of the model.
            pp: pipeline ranks.
            vpp: chunks on each rank. The layers of a rank are divided equally among its chunks.
            first, last: layers on the first and on the last rank, over all chunks. None: as on the others.
            num_mtp: multi-token-prediction layers of the model. They are on the last stage, and do not count.

        Raises:
            LayoutError: the rest does not divide, or the layers of a rank do not divide by its chunks.
        """
        _check_degrees(num_layers, pp, vpp)
        # With one rank, the first is the last; the next check refuses that.
        given = {rank: count for rank, count in ((0, first), (pp - 1, last)) if count is not None}
        if pp < 2 and given:
            raise LayoutError(f"pp={pp}; it must be at least 2 to set the layers of the first or last rank.")
        for rank, count in given.items():
            if count < vpp or count % vpp:
                raise LayoutError(
                    f"{count} layers on the {'last' if rank else 'first'} pipeline rank cannot be divided equally "
                    f"among its {vpp} chunk{'s' * (vpp > 1)}; give a positive multiple of {vpp}."
                )
        # With every rank given, the sum has to be right.
        others, rest = pp - len(given), num_layers - sum(given.values())
        share, left = divmod(rest, others * vpp) if others else (0, rest)
        if left or (others and share < 1):
            rule = f"a multiple of {others * vpp} above 0" if others else "0"
            raise LayoutError(
                f"{num_layers} layers with {first=} and {last=} leave {rest} for the {others} other pipeline ranks "
                f"with {vpp} chunk{'s' * (vpp > 1)} each; this number must be {rule}. "
                + layout_string.suggest_uneven(num_layers, pp, vpp, first, last, num_mtp)
            )
        # In model order: chunk 0 of every rank, then chunk 1 of every rank.
        counts = [given.get(rank, share * vpp) // vpp for _ in range(vpp) for rank in range(pp)]
        return cls._of_symbols(_symbols(counts, num_mtp), pp)

    @classmethod
    def of_string(cls, text: str, num_layers: int, pp: int, vpp: int = 1, *, num_mtp: int = 0) -> PipelineLayout:
        """Create a layout from a string such as ``"Et|tt|tt|tL"`` (:mod:`~megalight.parallel.pipeline.layout_string`).

        A stage may hold no layer: only the embedding, only the head, or nothing (``||``).

        Args:
            text: the layout string.
            num_layers: layers of the model. The layout must have the same number.
            pp: pipeline ranks. The number of stages must be a multiple of it.
            vpp: chunks on each rank, to check the layout. 1: not checked.
            num_mtp: multi-token-prediction layers of the model.

        Raises:
            LayoutError: the string cannot be parsed, or does not fit the model or the ranks. The message shows how it
                was read.
        """
        # With one rank, `vpp` only checks the string, and the message below is the better one.
        _check_degrees(num_layers, pp, vpp if pp > 1 else 1)
        stages = parse(text)
        chunks, left = divmod(len(stages), pp)
        wrong = layout_string.wrong_symbols(stages, num_layers, num_mtp)
        if left:
            low = len(stages) - left
            near = f"{low} or {low + pp}" if low else f"{pp}"
            wrong = f"it has {len(stages)} stages, which is no multiple of pp={pp}. Write {near}, or change pp."
        elif vpp not in (1, chunks):
            wrong = f"its {len(stages)} stages with pp={pp} are {chunks} chunks per rank, not vpp={vpp}. Remove vpp."
        elif pp == 1 and chunks > 1:
            wrong = f"it has {len(stages)} stages, but pp is 1. Increase pp, or write one stage without '|'."
        if wrong:
            raise LayoutError(f"layout {text!r}: {wrong} As read:\n{draw(stages, 1 if left else pp)}")
        return cls._of_symbols(stages, pp)

    @classmethod
    def _of_symbols(cls, symbols: Sequence[str], pp: int) -> PipelineLayout:
        stages: list[Stage] = []
        layer = 0
        for index, held in enumerate(symbols):
            # Arguments are evaluated from left to right, so `layer` ends as the first one of the next stage.
            layers = tuple(range(layer, layer := layer + held.count("t")))
            stages.append(Stage(index, index % pp, index // pp, "E" in held, layers, "L" in held, held.count("m")))
        return cls(tuple(stages), pp, len(symbols) // pp)

    @property
    def num_layers(self) -> int:
        """Number of layers of all stages."""
        return sum(len(stage.layers) for stage in self.stages)

    def of_rank(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the chunks of one pipeline rank, in model order."""
        # Stage `i` is on rank `i % pp`.
        return self.stages[pp_rank :: self.pp]

    def weights(self, head: float) -> tuple[float, ...]:
        """Return the work of each stage in layers. The head with the loss counts ``head`` layers, the embedding 0."""
        return tuple(len(stage.layers) + stage.mtp + head * stage.head for stage in self.stages)

    def draw(self) -> str:
        """Return a table: a line per pipeline rank, a column per chunk. Long runs of equal ranks are shortened."""
        return draw(self._held(), self.pp)

    def __str__(self) -> str:
        """Return the layout string."""
        return compose(self._held())

    def _held(self) -> tuple[str, ...]:
        return tuple("E" * s.embed + "t" * len(s.layers) + "m" * s.mtp + "L" * s.head for s in self.stages)


def _symbols(counts: Sequence[int], num_mtp: int) -> list[str]:
    held = ["t" * count for count in counts]
    held[0] = "E" + held[0]
    # They share the head and its loss, so they stand before it on the last stage.
    held[-1] += "m" * num_mtp + "L"
    return held


def _stages(pp: int, vpp: int) -> str:
    return f"{pp * vpp} stages (pp={pp}, vpp={vpp})" if vpp > 1 else f"{pp} stages"


def _check_degrees(num_layers: int, pp: int, vpp: int) -> None:
    for name, value in (("num_layers", num_layers), ("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise LayoutError(f"{name}={value}; it must be at least 1.")
    if vpp > 1 and pp == 1:
        raise LayoutError(f"vpp={vpp} chunks per rank with pp=1; there is no pipeline to interleave. Set vpp to 1.")
