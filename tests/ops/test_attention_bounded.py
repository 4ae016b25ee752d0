"""Keys whose number only the device knows: attention, and a decoding step that could be recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import DataError, LayoutError
from megalight.inference import Cache
from megalight.models.gpt import GPT, GPTConfig, InitConfig
from megalight.nn.init import initialize
from megalight.ops.attention import attention
from megalight.parallel.graphs.inspection import Inspection
from megalight.types import PackedSequences

TOTALS, BOUND = [5, 2, 7], 8
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 2, "softcap": 1.5}, {"scale": 0.3}, {"sink": SINK}], ids=str
)
def test_equals_attention_to_the_keys_that_are_there(length: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q = torch.randn(3 * length, 4, 6, dtype=torch.float64)
    k, v = (torch.randn(3, BOUND, 2, 6, dtype=torch.float64) for _ in range(2))
    queries = PackedSequences.of_uniform(3, length)
    there = [torch.cat([rows[:count] for rows, count in zip(t, TOTALS, strict=True)]) for t in (k, v)]
    expected = attention(q, *there, replace(queries, keys=PackedSequences.of_lengths(TOTALS)), **options)
    keys = PackedSequences.of_bound(torch.tensor(TOTALS), BOUND)
    for number, count in enumerate(TOTALS):
        k[number, count:] = v[number, count:] = torch.nan  # never written
    found = attention(q, k.flatten(0, 1), v.flatten(0, 1), replace(queries, keys=keys), **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Slots:
    """One token more in every slot; only the device counts."""

    def __init__(self, stored: Tensor, capacity: int) -> None:
        self.stored = stored
        self.capacity = capacity

    def per_token(self) -> Rows:
        return Rows(self)

    def per_sequence(self) -> Entries:
        return Entries()

    def sequences(self) -> PackedSequences:
        keys = PackedSequences.of_bound(self.stored + 1, self.capacity)
        return replace(PackedSequences.of_uniform(len(self.stored), 1), positions=self.stored, keys=keys)


class Rows:
    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.rows = torch.empty(0)

    def append(self, rows: Tensor) -> Tensor:
        slots = self.slots
        self.rows[torch.arange(len(rows)) * slots.capacity + slots.stored] = rows
        return self.rows  # where they lie: nothing is gathered


class Entries:
    entries: Tensor

    def read(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self.entries

    def write(self, entries: Tensor) -> None:
        self.entries = entries


def test_a_decoding_step_waits_for_nothing_that_only_the_device_knows() -> None:
    config = GPTConfig(
        num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2, vocab_size=61, max_sequence_length=40,
        mixer_pattern=("attention", "conv"), init=InitConfig(std=0.4),
    )  # fmt: skip
    model = GPT(config).double()
    initialize(model, 5)
    cache = Cache(model.layers, 3, 12)
    with torch.no_grad():
        model(torch.arange(14), cache.extend([0, 1, 2], TOTALS, "cpu"), states=cache.states)
    slots = Slots(torch.tensor(TOTALS), 12)
    states = {name: layer.make_state(slots) for name, layer in model.layers.items()}  # type: ignore[operator]
    for name, state in states.items():
        if isinstance(state, Entries):
            state.entries = cache.states[name]._entries.clone()
        else:
            state.keys.rows, state.values.rows = (
                rows._rows.clone() for rows in (cache.states[name].keys, cache.states[name].values)
            )
    for token in (3, 4):
        tokens = torch.full((3,), token)
        with torch.no_grad():
            expected = model(tokens, cache.extend([0, 1, 2], [1, 1, 1], "cpu"), states=cache.states).logits
            with Inspection(torch.device("cpu")) as inspection:
                found = model(tokens, slots.sequences(), states=states).logits
                slots.stored += 1
        assert inspection.reasons == []
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_what_bounds_do_not_serve_is_refused() -> None:
    x = torch.ones(2, 1, 4)
    keys = PackedSequences.of_bound(torch.tensor([1, 2]), 2)
    queries = replace(PackedSequences.of_uniform(2, 1), keys=keys)
    stored = torch.ones(4, 1, 4)
    with pytest.raises(LayoutError, match="Only the reference backend serves them"):
        attention(x, stored, stored, queries, backend="sdpa")
    with pytest.raises(LayoutError, match=r"queries of \[1, 2\] tokens"):
        attention(torch.ones(3, 1, 4), stored, stored, replace(PackedSequences.of_lengths([1, 2]), keys=keys))
    with pytest.raises(DataError, match="cannot be padded"):
        queries.pad_to(4)
    assert torch.equal(keys.to("cpu").present, torch.tensor([1, 2]))
