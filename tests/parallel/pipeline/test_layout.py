from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalight.errors import LayoutError
from megalight.parallel.pipeline.layout import PipelineLayout, Stage, balanced


def held(layout: PipelineLayout) -> list[int]:
    return [len(stage.layers) for stage in layout.stages]


def test_stages_of_an_even_split() -> None:
    layout = PipelineLayout.even(8, 2, 2)
    assert layout.stages == (
        Stage(0, 0, 0, True, (0, 1), False),
        Stage(1, 1, 0, False, (2, 3), False),
        Stage(2, 0, 1, False, (4, 5), False),
        Stage(3, 1, 1, False, (6, 7), True),
    )
    assert layout.of_rank(1) == (layout.stages[1], layout.stages[3])
    assert layout.num_layers == 8
    assert str(layout) == "Ett|tt|tt|ttL"


def test_one_rank_holds_everything() -> None:
    assert PipelineLayout.even(3, 1).stages == (Stage(0, 0, 0, True, (0, 1, 2), True),)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_layers_of_a_chunk_are_megatrons(pp: int, vpp: int) -> None:
    """Chunk v of rank p: layers v L / VP + p L / (PP VP) and the next L / (PP VP)."""
    layers = 2 * pp * vpp
    layout = PipelineLayout.even(layers, pp, vpp)
    for rank in range(pp):
        for chunk, stage in enumerate(layout.of_rank(rank)):
            start = chunk * layers // vpp + rank * layers // (pp * vpp)
            assert stage.layers == tuple(range(start, start + 2))
            assert (stage.rank, stage.chunk, stage.index) == (rank, chunk, chunk * pp + rank)
            assert stage.embed == (rank == chunk == 0)
            assert stage.head == (rank == pp - 1 and chunk == vpp - 1)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "embedding", "loss", "counts"),
    [
        (7, 2, 1, True, False, [3, 4]),
        (7, 2, 1, False, True, [4, 3]),
        (6, 2, 1, True, True, [3, 3]),
        (126, 16, 1, True, True, [7, *[8] * 14, 7]),
        (7, 2, 2, True, False, [1, 2, 2, 2]),
        (6, 2, 2, True, True, [1, 2, 2, 1]),
    ],
)
def test_embedding_and_loss_count_as_layers(layers, pp, vpp, embedding, loss, counts) -> None:
    assert held(PipelineLayout.even(layers, pp, vpp, count_embedding=embedding, count_loss=loss)) == counts


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "first", "last", "counts"),
    [
        (8, 4, 1, None, None, [2, 2, 2, 2]),
        (7, 4, 1, 1, None, [1, 2, 2, 2]),
        (7, 4, 1, None, 1, [2, 2, 2, 1]),
        (8, 4, 1, 1, 3, [1, 2, 2, 3]),
        (8, 2, 1, 3, 5, [3, 5]),
        (14, 4, 2, 2, None, [1, 2, 2, 2] * 2),
        (14, 4, 2, 4, 2, [2, 2, 2, 1] * 2),
    ],
)
def test_first_and_last_rank_have_numbers_of_their_own(layers, pp, vpp, first, last, counts) -> None:
    layout = PipelineLayout.uneven(layers, pp, vpp, first=first, last=last)
    assert held(layout) == counts
    for rank, count in ((0, first), (pp - 1, last)):
        assert count in (None, sum(len(stage.layers) for stage in layout.of_rank(rank)))


@pytest.mark.parametrize(
    ("text", "layers", "pp", "vpp", "counts"),
    [
        ("Et|tt|t|L", 4, 4, 1, [1, 2, 1, 0]),
        ("Et|tt|t|L", 4, 2, 1, [1, 2, 1, 0]),
        ("Et|tt|t|L", 4, 2, 2, [1, 2, 1, 0]),
        ("E||tt|L", 2, 4, 1, [0, 0, 2, 0]),
        ("EtttL", 3, 1, 1, [3]),
        ("E|(t|)*126L", 126, 128, 1, [0, *[1] * 126, 0]),
    ],
)
def test_layout_strings(text, layers, pp, vpp, counts) -> None:
    layout = PipelineLayout.of_string(text, layers, pp, vpp)
    assert held(layout) == counts
    assert layout.vpp == len(counts) // pp
    assert [s.embed for s in layout.stages] == [True] + [False] * (len(counts) - 1)
    assert [s.head for s in layout.stages][::-1] == [True] + [False] * (len(counts) - 1)
    assert [layer for s in layout.stages for layer in s.layers] == list(range(layers))
    assert PipelineLayout.of_string(str(layout), layers, pp, vpp) == layout


def test_multi_token_prediction_layers_where_the_model_has_some() -> None:
    layout = PipelineLayout.of_string("Et*3|(tt|)*29,m|L", 61, 16, num_mtp=1)
    assert (layout.vpp, layout.stages[30].mtp, layout.stages[31].head) == (2, 1, True)
    assert str(layout) == "Ettt|(tt|)*29m|L"


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: PipelineLayout.even(0, 2), ["num_layers=0", "at least 1"]),
        (lambda: PipelineLayout.even(4, 0), ["pp=0", "at least 1"]),
        (lambda: PipelineLayout.even(4, 1, 2), ["vpp=2", "pp=1", "Set vpp to 1"]),
        (lambda: PipelineLayout.even(9, 4), ["9 layers", "4 stages", "8 or 12", "'Et|ttt|ttt|ttL'", "rank 3  7-8 L"]),
        (lambda: PipelineLayout.even(62, 8, 2), ["(pp=8, vpp=2)", "48 or 64", "count the embedding and the loss"]),
        (lambda: PipelineLayout.even(61, 16, count_embedding=True), ["61 layers + the embedding = 62", "63 layers"]),
        (lambda: PipelineLayout.even(3, 4, count_embedding=True), ["without a layer", "'E|t|tt|L'"]),
        (lambda: PipelineLayout.even(3, 8), ["fill 5 stages at most; lower pp"]),
        (
            lambda: PipelineLayout.uneven(8, 4, first=3),
            ["first=3", "leave 5 for the 3", "an even split", "3 layers and the last 3"],
        ),
        (lambda: PipelineLayout.uneven(8, 2, first=3, last=3), ["leave 2 for the 0", "must be 0"]),
        (lambda: PipelineLayout.uneven(14, 4, 2, first=3), ["3 layers on the first", "2 chunks", "multiple of 2"]),
        (lambda: PipelineLayout.uneven(14, 4, last=0), ["0 layers on the last", "multiple of 1"]),
        (lambda: PipelineLayout.uneven(4, 1, first=4), ["pp=1", "at least 2"]),
    ],
)
def test_layers_that_do_not_fill_the_stages(make, parts) -> None:
    with pytest.raises(LayoutError) as error:
        make()
    for part in parts:
        assert part in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("text", "options", "parts"),
    [
        ("Et|tt|tL", {"pp": 2}, ["3 stages, which is no multiple of pp=2", "Write 2 or 4", "chunk 2"]),
        ("Et|tt|t|L", {"pp": 2, "vpp": 4}, ["are 2 chunks per rank, not vpp=4"]),
        ("Et|tttL", {"pp": 1}, ["2 stages, but pp is 1"]),
        ("Et|tt|tL", {"pp": 3, "num_layers": 5}, ["names 4 layers 't'", "has 5: 1 too few"]),
        ("Et|tt|tttL", {"pp": 3}, ["names 6", "2 too many", "rank 2  3-5 L"]),
        ("t|tt|tL", {"pp": 3}, ["'E' (embedding) occurs 0 times"]),
        ("Et|Ett|tL", {"pp": 3}, ["'E' (embedding) occurs 2 times"]),
        ("t|Ett|tL", {"pp": 3}, ["'E' (embedding) must be the first symbol of the first stage"]),
        ("|Ett|ttL", {"pp": 3}, ["must be the first symbol of the first stage", "(nothing)"]),
        ("Et|ttL|t", {"pp": 3}, ["'L' (loss) must be the last symbol of the last stage"]),
        ("Et|tt|tmL", {"pp": 3}, ["names 1 multi-token-prediction layers 'm', but the model has none. Remove them"]),
        ("Et|tt|tL", {"pp": 3, "num_mtp": 1}, ["names 0 multi-token", "has 1. Write 1"]),
        ("Ettt|mt|L", {"pp": 3, "num_mtp": 1}, ["layers 't' follow"]),
        ("Ettt|tm|mL", {"pp": 3, "num_mtp": 2}, ["on different stages"]),
    ],
)
def test_strings_that_are_no_layout_are_shown_as_read(text, options, parts) -> None:
    with pytest.raises(LayoutError) as error:
        PipelineLayout.of_string(text, **{"num_layers": 4, **options})
    for part in ["As read:\n", f"layout {text!r}", *parts]:
        assert part in str(error.value), str(error.value)


def test_drawing() -> None:
    assert PipelineLayout.even(12, 3, 2).draw().splitlines() == [
        "        chunk 0  chunk 1",
        "rank 0  E 0-1    6-7",
        "rank 1  2-3      8-9",
        "rank 2  4-5      10-11 L",
    ]
    lines = PipelineLayout.of_string("E|t|t|t|t|t||L", 5, 8).draw().splitlines()
    assert lines == ["rank 0  E", "rank 1  0", "...     ...", "rank 5  4", "rank 6  (nothing)", "rank 7  L"]


@given(st.integers(1, 400), st.integers(2, 32), st.integers(1, 4))
def test_what_errors_suggest_works(layers: int, pp: int, vpp: int) -> None:
    if layers + 2 < pp * vpp:
        return
    stages = balanced(layers, pp * vpp)
    layout = PipelineLayout.of_string("|".join(stages), layers, pp, vpp)
    weights = [len(s.layers) + s.embed + s.head for s in layout.stages]
    assert max(weights) - min(weights) <= 1


@given(st.integers(1, 200), st.integers(2, 16), st.integers(1, 4))
def test_suggested_ends_divide(layers: int, pp: int, vpp: int) -> None:
    try:
        PipelineLayout.even(layers, pp, vpp)
    except LayoutError as error:
        words = str(error).replace(",", "").split()
        if "first" in words:
            first, last = int(words[words.index("hold") + 1]), int(words[words.index("last") + 1])
            assert PipelineLayout.uneven(layers, pp, vpp, first=first, last=last).num_layers == layers


def test_many_stages_at_once() -> None:
    PipelineLayout.even(1024, 128, 8)
    with pytest.raises(LayoutError, match="or give this layout"):
        PipelineLayout.even(1000, 128, 4)
    PipelineLayout.of_string("E|(t|)*126L", 126, 128).draw()
