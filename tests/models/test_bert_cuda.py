"""BERT on a GPU: precision against float64 on the CPU, and steps that never wait for the device."""

from __future__ import annotations

import pytest
import torch

from megalight.data.bert.batch import BertBatch
from megalight.models.bert import Bert, BertConfig, InitConfig
from megalight.models.bert.module import BertModule
from megalight.nn.init import initialize
from tests.support.reference_gpt import relative_error

pytestmark = pytest.mark.gpu

CONFIG = BertConfig(
    num_layers=2, hidden_size=256, num_heads=4, vocab_size=1031, max_sequence_length=200, init=InitConfig(std=0.06)
)
LENGTHS = {"ragged": (7, 100, 149, 64), "uniform": (80, 80, 80, 80)}


def batch(lengths: tuple[int, ...]) -> BertBatch:
    generator = torch.Generator().manual_seed(1)
    count = sum(lengths)
    tokens, labels = (torch.randint(0, 1031, (count,), generator=generator) for _ in range(2))
    types = torch.cat([(torch.arange(n) >= n // 2).long() for n in lengths])
    labels = labels.masked_fill(torch.rand(count, generator=generator) > 0.15, -100)
    return BertBatch(tokens, types, labels, torch.tensor([0, 1, 1, 0]), lengths).with_rows()


def step(module: BertModule, rows: BertBatch) -> torch.Tensor:
    loss = module.loss_step(module.forward_step(module.model, rows), rows)
    total = loss.sum / module.loss_tokens(rows) + loss.aux_losses["order_loss"] / len(rows)
    total.backward()
    return total.detach()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_precision(lengths: str, dtype: torch.dtype, tolerance: float) -> None:
    module, reference = BertModule(CONFIG), BertModule(CONFIG)
    with torch.device("cuda"):
        module.model = Bert(CONFIG)
    initialize(module.model, 5)
    module.model.to(dtype)
    reference.model = Bert(CONFIG).double()
    reference.model.load_state_dict(module.model.state_dict())
    rows = batch(LENGTHS[lengths])
    expected = step(reference, rows)
    assert relative_error(step(module, rows.pin_memory().to("cuda")).cpu(), expected) < tolerance
    for name, parameter in module.model.named_parameters():
        if not name.endswith("qkv.bias"):  # the keys' part is rounding noise around 0
            error = relative_error(parameter.grad.cpu(), reference.model.get_parameter(name).grad)
            assert error < 4 * tolerance, (name, error)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_host_never_waits(lengths: str) -> None:
    module = BertModule(CONFIG)
    with torch.device("cuda"):
        module.model = Bert(CONFIG)
    initialize(module.model, 5)
    module.model.bfloat16()
    rows = batch(LENGTHS[lengths]).pin_memory()
    step(module, rows.to("cuda"))  # kernels are built and backends chosen
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, rows.to("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
