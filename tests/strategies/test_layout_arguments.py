"""The flat arguments of MegatronStrategy are the fields of Layout, so that the two cannot drift apart."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.layout import Layout
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.strategies import MegatronStrategy

ELSEWHERE = {"ranks": "of towers, whose models have ranks of their own", "transforms": "the module's own"}
FIELDS = [each for each in fields(Layout) if each.name not in ELSEWHERE]
HINTS = get_type_hints(Layout), get_type_hints(MegatronStrategy.__init__)
OTHER: dict[str, Any] = {
    "tensor_parallel": 2,
    "sequence_parallel": True,
    "tensor": TensorOptions(overlap="pipelined"),
    "context_parallel": 2,
    "context": ContextOptions(kind="ring"),
    "expert_parallel": 2,
    "expert_tensor_parallel": 2,
    "expert": ExpertOptions(dispatcher="all_gather"),
    "pipeline_parallel": 2,
    "virtual_pipeline": 2,
    "pipeline_layout": "Et|t|t|tL",
    "pipeline": PipelineOptions(schedule="interleaved"),
    "recompute": RecomputeOptions(granularity="full"),
    "data_parallel": DataParallelOptions(level="optim_grads"),
    "plan": ParallelizePlan(),
}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_names_types_and_defaults_agree(field: Any) -> None:
    argument = inspect.signature(MegatronStrategy.__init__).parameters[field.name]
    own, flat = (hints[field.name] for hints in HINTS)
    if field.default is MISSING:
        # Options are None in the signature, which a command line shows shorter than all their defaults.
        assert argument.default is None
        assert is_dataclass(own)
        assert getattr(MegatronStrategy().layout, field.name) == field.default_factory()
        own |= None
    else:
        assert argument.default == field.default
    assert set(get_args(flat) or [flat]) == set(get_args(own) or [own])


def test_every_argument_reaches_the_layout() -> None:
    assert OTHER.keys() == {field.name for field in FIELDS}
    layout = MegatronStrategy(**OTHER).layout
    assert {name: getattr(layout, name) for name in OTHER} == OTHER
    assert layout == Layout(**OTHER)
    default = Layout()
    assert all(getattr(default, name) != value for name, value in OTHER.items() if name != "virtual_pipeline")
