"""flash-attn itself, against the float64 reference: relative norms of 8e-3 in bfloat16, outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight import imports
from megalight.models.gpt import GPTBackendConfig
from megalight.ops.attention_block import EXAMPLE
from megalight.plugins import flash_attn
from megalight.plugins.flash_attn import VERSION_2, VERSION_3, VERSION_4
from tests.ops.test_attention_block_gpu import check_block, check_merged_blocks, inputs
from tests.plugins.real import GOOD, MARKS, check_attention, check_model, need, ragged, serve, uniform

pytestmark = MARKS
BLOCK = EXAMPLE._replace(device="cuda")
VERSIONS: dict[str, Any] = {"flash_attn": VERSION_2, "flash_attn_3": VERSION_3, "flash_attn_4": VERSION_4}


@pytest.fixture(params=VERSIONS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    version = VERSIONS[name]
    if name == "flash_attn" and not imports.version("flash-attn"):
        pytest.skip("flash-attn is not installed")  # release 4 alone makes the package's name importable
    need(version.package.name, "flash_attn", flash_attn.register)
    absent = "No module named" if name == "flash_attn_4" else "is not installed"  # 2 and 4 share a name
    serve(version.why_not, GOOD, absent)
    return name


@pytest.mark.parametrize(("heads", "dim"), [((8, 8), 64), ((8, 2), 128), ((4, 1), 256)])
@pytest.mark.parametrize("causal", [True, False])
def test_uniform(backend: str, heads: tuple[int, int], dim: int, causal: bool) -> None:
    check_attention(backend, uniform(2, 500), heads, dim, causal=causal)


@pytest.mark.parametrize("window", [None, 17, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged(backend: str, window: int | None, causal: bool) -> None:
    check_attention(backend, ragged(63, 1, 500, 129), (8, 2), 128, causal=causal, window=window)


@pytest.mark.parametrize("window", [None, 50])
def test_keys_longer_than_queries(backend: str, window: int | None) -> None:
    check_attention(backend, replace(uniform(2, 17), keys=uniform(2, 300)), (8, 2), 64, window=window)
    check_attention(backend, replace(ragged(7, 100), keys=ragged(63, 1000)), (8, 2), 64, window=window)


def test_softcap(backend: str) -> None:
    check_attention(backend, uniform(2, 500), (8, 2), 128, softcap=5.0)
    check_attention(backend, ragged(63, 1, 500), (8, 2), 128, softcap=5.0)


def test_sinks(backend: str) -> None:
    if backend != "flash_attn_4":
        pytest.skip("has no sinks")
    check_attention(backend, uniform(2, 500), (8, 2), 128, window=100, sink=True)
    check_attention(backend, ragged(63, 1, 500), (8, 2), 64, sink=True)


def test_a_model_by_name(backend: str) -> None:
    check_model("windowed", GPTBackendConfig(attention=backend))


@pytest.fixture
def of_blocks() -> None:
    need(VERSION_4.package.name, "flash_attn", flash_attn.register)
    serve(flash_attn.blocks_why_not, BLOCK, "No module named")


@pytest.mark.usefixtures("of_blocks")
@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128)])
@pytest.mark.parametrize(("queries", "keys"), [(126, 126), (256, 512), (512, 256)])
@pytest.mark.parametrize("causal", [True, False])
def test_dense_blocks(heads: tuple[int, int, int], queries: int, keys: int, causal: bool) -> None:
    if causal and queries != keys:
        pytest.skip("causal blocks are square")
    check_block("flash_attn_4", inputs(2, queries, keys, heads, torch.bfloat16), None, causal)


@pytest.mark.usefixtures("of_blocks")
@pytest.mark.parametrize("causal", [True, False])
def test_packed_blocks(causal: bool) -> None:
    queries = ragged(63, 1, 500, 130)
    check_block("flash_attn_4", inputs(1, 694, 694, (8, 2, 128), torch.bfloat16), queries, causal)
    sequences = replace(queries, keys=ragged(70, 9, 501, 300))
    check_block("flash_attn_4", inputs(1, 694, 880, (8, 2, 128), torch.bfloat16), sequences, causal)


@pytest.mark.usefixtures("of_blocks")
def test_gradients_of_merged_blocks_add_up() -> None:
    check_merged_blocks("flash_attn_4", (8, 2, 128), 2)
