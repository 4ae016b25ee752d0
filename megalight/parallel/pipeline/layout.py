"""Which stage of the pipeline holds which part of the model.

Stages are counted in model order. With ``pp`` ranks and ``vpp`` chunks on each there are ``pp * vpp`` stages; stage
``i`` lies on pipeline rank ``i % pp`` as its chunk ``i // pp``, so a micro-batch goes round the ranks ``vpp`` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalight.errors import LayoutError
from megalight.parallel.pipeline import advice
from megalight.parallel.pipeline.grammar import compose, parse
from megalight.parallel.pipeline.picture import picture


@dataclass(frozen=True)
class Stage:
    """What one chunk of one pipeline rank holds.

    Attributes:
        index: place in model order.
        rank: pipeline rank.
        chunk: place among the rank's chunks.
        embed: it holds the embedding (the first stage does).
        layers: global indices of its layers, consecutive.
        head: it holds the head and computes the loss (the last stage does).
        mtp: how many multi-token-prediction layers it holds: all of the model's, or none.
    """

    index: int
    rank: int
    chunk: int
    embed: bool
    layers: tuple[int, ...]
    head: bool
    mtp: int = 0

    def __str__(self) -> str:
        held = ["embed"] * self.embed + ["head"] * self.head
        if self.layers:
            held.insert(self.embed, f"layers {self.layers[0]} to {self.layers[-1]}")
        return f"stage {self.index} ({', '.join(held) or 'no layers'})"


@dataclass(frozen=True)
class PipelineLayout:
    """All stages of a model. Made by :meth:`even`, :meth:`uneven` or :meth:`of_string`, which check what they get.

    Attributes:
        stages: in model order.
        pp: pipeline ranks.
        vpp: chunks on each rank.
    """

    stages: tuple[Stage, ...]
    pp: int
    vpp: int

    @classmethod
    def even(
        cls, num_layers: int, pp: int, vpp: int = 1, *, count_embedding: bool = False, count_loss: bool = False
    ) -> PipelineLayout:
        """Equally many layers on every stage.

        Args:
            num_layers: layers of the model.
            pp: pipeline ranks.
            vpp: chunks on each rank.
            count_embedding: the embedding counts as one layer, so the first stage holds one layer less.
            count_loss: the same for the head with the loss, and the last stage.

        Raises:
            LayoutError: the layers do not divide, or a stage would hold none; says what would work.
        """
        _check_degrees(num_layers, pp, vpp)
        counted = num_layers + count_embedding + count_loss
        share, left = divmod(counted, pp * vpp)
        counts = [share] * (pp * vpp)
        counts[0] -= count_embedding
        counts[-1] -= count_loss
        if left or min(counts) < 1:
            parts = [f"{num_layers} layers", *["the embedding"] * count_embedding, *["the loss"] * count_loss]
            what = " + ".join(parts) + (f" = {counted}" if counted > num_layers else "")
            rule = "do not divide evenly over" if left else "leave a stage without a layer, of"
            raise LayoutError(
                f"{what} {rule} {_stages(pp, vpp)}. {advice.instead_of_even(num_layers, pp, vpp, counted)}"
            )
        return cls._of_symbols(_symbols(counts), pp)

    @classmethod
    def uneven(
        cls, num_layers: int, pp: int, vpp: int = 1, *, first: int | None = None, last: int | None = None
    ) -> PipelineLayout:
        """A number of layers of their own for the first and the last rank; the others share what is left equally.

        Args:
            num_layers: layers of the model.
            pp: pipeline ranks.
            vpp: chunks on each rank; every rank's layers are divided equally among its chunks.
            first, last: layers on the first and on the last rank, all chunks together; None: as the others.

        Raises:
            LayoutError: what is left does not divide, or a rank's layers do not over its chunks.
        """
        _check_degrees(num_layers, pp, vpp)
        given = {rank: count for rank, count in ((0, first), (pp - 1, last)) if count is not None}
        if pp < 2 and given:
            raise LayoutError(f"pp={pp}: layers of the first or last rank of their own need pp of at least 2.")
        for rank, count in given.items():
            if count < vpp or count % vpp:
                raise LayoutError(
                    f"{count} layers on the {'last' if rank else 'first'} pipeline rank; a rank's layers are divided "
                    f"equally among its {vpp} chunk{'s' * (vpp > 1)}, so give a multiple of {vpp}."
                )
        others, rest = pp - len(given), num_layers - sum(given.values())
        share, left = divmod(rest, others * vpp) if others else (0, rest)
        if left or (others and share < 1):
            rule = f"a multiple of {others * vpp} above 0" if others else "0"
            raise LayoutError(
                f"{num_layers} layers with {first=} and {last=} leave {rest} for the {others} pipeline ranks between, "
                f"of {vpp} chunk{'s' * (vpp > 1)} each; that must be {rule}. "
                + advice.instead_of_uneven(num_layers, pp, vpp, first, last)
            )
        counts = [given.get(rank, share * vpp) // vpp for _ in range(vpp) for rank in range(pp)]
        return cls._of_symbols(_symbols(counts), pp)

    @classmethod
    def of_string(cls, text: str, num_layers: int, pp: int, vpp: int = 1, *, num_mtp: int = 0) -> PipelineLayout:
        """An explicit layout: ``"Et|tt|tt|tL"``; see :mod:`~megalight.parallel.pipeline.grammar`.

        A stage may hold no layer: the embedding alone, the head alone, or nothing (``||``).

        Args:
            text: the layout.
            num_layers: layers of the model; the layout must hold as many.
            pp: pipeline ranks; the number of stages divided by it is the number of chunks on each.
            vpp: checked against the layout; 1: as the layout says.
            num_mtp: multi-token-prediction layers of the model.

        Raises:
            LayoutError: the layout cannot be read, or is not one of this model over these ranks; shows it as read.
        """
        _check_degrees(num_layers, pp, vpp if pp > 1 else 1)
        stages = parse(text)
        chunks, left = divmod(len(stages), pp)
        wrong = advice.wrong_symbols(stages, num_layers, num_mtp)
        if left:
            low = len(stages) - left
            near = f"{low} or {low + pp}" if low else f"{pp}"
            wrong = f"it has {len(stages)} stages, no multiple of pp={pp}. Write {near}, or change pp."
        elif vpp not in (1, chunks):
            wrong = (
                f"its {len(stages)} stages over pp={pp} make {chunks} chunks per rank, not vpp={vpp}. Leave vpp out."
            )
        elif pp == 1 and chunks > 1:
            wrong = f"it has {len(stages)} stages for pp=1. Raise pp, or write one stage, without '|'."
        if wrong:
            raise LayoutError(f"layout {text!r}: {wrong} As read:\n{picture(stages, 1 if left else pp)}")
        return cls._of_symbols(stages, pp)

    @classmethod
    def _of_symbols(cls, symbols: Sequence[str], pp: int) -> PipelineLayout:
        stages: list[Stage] = []
        layer = 0
        for index, held in enumerate(symbols):
            layers = tuple(range(layer, layer := layer + held.count("t")))
            stages.append(Stage(index, index % pp, index // pp, "E" in held, layers, "L" in held, held.count("m")))
        return cls(tuple(stages), pp, len(symbols) // pp)

    @property
    def num_layers(self) -> int:
        """Layers of all stages together."""
        return sum(len(stage.layers) for stage in self.stages)

    def of_rank(self, pp_rank: int) -> tuple[Stage, ...]:
        """The chunks of one pipeline rank, in model order."""
        return self.stages[pp_rank :: self.pp]

    def weights(self, head: float) -> tuple[float, ...]:
        """How much work each stage is, in layers: the head with the loss is ``head`` of them, the embedding none."""
        return tuple(len(stage.layers) + stage.mtp + head * stage.head for stage in self.stages)

    def draw(self) -> str:
        """A table: a line per pipeline rank, a column per chunk; like neighbours are left out when there are many."""
        return picture(self._held(), self.pp)

    def __str__(self) -> str:
        """The layout string."""
        return compose(self._held())

    def _held(self) -> tuple[str, ...]:
        return tuple("E" * s.embed + "t" * len(s.layers) + "m" * s.mtp + "L" * s.head for s in self.stages)


def _symbols(counts: Sequence[int]) -> list[str]:
    held = ["t" * count for count in counts]
    held[0] = "E" + held[0]
    held[-1] += "L"
    return held


def _stages(pp: int, vpp: int) -> str:
    return f"{pp * vpp} stages (pp={pp}, vpp={vpp})" if vpp > 1 else f"{pp} stages"


def _check_degrees(num_layers: int, pp: int, vpp: int) -> None:
    for name, value in (("num_layers", num_layers), ("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise LayoutError(f"{name}={value}; it must be at least 1.")
    if vpp > 1 and pp == 1:
        raise LayoutError(f"vpp={vpp} chunks per rank with pp=1; there is no pipeline to interleave. Leave vpp at 1.")
