"""Weights in 8 and 4 bits are widened exactly, and only the blocks that are needed are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalight.checkpoint import boxes
from megalight.checkpoint.foreign.transformers_folder import read_config
from megalight.errors import CheckpointError
from megalight.models.gpt.hugging_face import config_from_transformers, weight_map
from megalight.models.hugging_face.folder import Folder
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.parallel.source import Target
from tests.models.test_gpt_hugging_face import theirs

transformers = pytest.importorskip("transformers")

ROWS, COLUMNS = 300, 260  # the last blocks are cut in both dims
EXPERTS, GROUPS = 3, 2


def widened_fp8(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """The reference: element by element, in float64."""
    numbers, factors = values.double().tolist(), scales.double().tolist()
    rows = [[x * factors[i // block][j // block] for j, x in enumerate(row)] for i, row in enumerate(numbers)]
    return torch.tensor(rows, dtype=torch.float64)


def number(code: int) -> float:
    """A number of 4 bits: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def widened_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    experts, rows, groups, _ = blocks.shape
    whole = torch.empty(experts, groups * 32, rows, dtype=torch.float64)
    for e in range(experts):
        for r in range(rows):
            for g in range(groups):
                power = 2.0 ** (int(scales[e, r, g]) - 127)
                for b, byte in enumerate(blocks[e, r, g].tolist()):
                    whole[e, g * 32 + 2 * b, r] = number(byte & 15) * power
                    whole[e, g * 32 + 2 * b + 1, r] = number(byte >> 4) * power
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    torch.manual_seed(5)
    fp8 = torch.randn(ROWS, COLUMNS).mul(50).to(torch.float8_e4m3fn)
    tensors = {
        "a.weight": fp8,
        "b.weight": torch.randn(4, 6, dtype=torch.bfloat16),
        "c.experts_blocks": torch.randint(0, 256, (EXPERTS, 70, GROUPS, 16), dtype=torch.uint8),
        "c.experts_scales": torch.randint(100, 140, (EXPERTS, 70, GROUPS), dtype=torch.uint8),
    }
    scales = {"a.weight_scale_inv": torch.rand(3, 3) + 0.1}  # in another file than the values
    save_file(tensors, path / "one.safetensors")
    save_file(scales, path / "two.safetensors")
    names = {**dict.fromkeys(tensors, "one.safetensors"), **dict.fromkeys(scales, "two.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    return path


PLACES = WeightMap({name: TensorMapping(name) for name in ("a.weight", "b.weight", "c.experts")})


def reference(folder: Path, name: str) -> Tensor:
    tensors = load_file(folder / "one.safetensors") | load_file(folder / "two.safetensors")
    if name == "a.weight":
        return widened_fp8(tensors[name], tensors[f"{name}_scale_inv"], 128)
    return widened_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])


BOXES = [
    ("a.weight", (0, 0), (ROWS, COLUMNS)),
    ("a.weight", (127, 255), (3, 5)),
    ("a.weight", (256, 0), (44, 129)),
    ("c.experts", (0, 0, 0), (EXPERTS, 64, 70)),
    ("c.experts", (1, 31, 8), (2, 2, 5)),
    ("c.experts", (2, 32, 69), (1, 32, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "offset", "size"), BOXES)
def test_a_box_is_widened(
    name: str,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    dtype: torch.dtype,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megalight.models.hugging_face.quantized_weights.SLAB", 1000)
    expected = reference(folder, name)
    cut = expected[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    source = Folder(folder, PLACES, "model.")
    assert (source.tensors[f"model.{name}"].shape, source.tensors[f"model.{name}"].dtype) == (
        tuple(expected.shape),
        "bfloat16",
    )
    turned = torch.empty(size[::-1], dtype=dtype).permute(*reversed(range(len(size))))
    for data in (torch.empty(size, dtype=dtype), turned):
        source.fill([Target(f"model.{name}", tuple(expected.shape), offset, data)], strict=False)
        # one rounding, to float32 at least, and one to what is asked for
        assert torch.equal(data, (cut if dtype == torch.float64 else cut.float()).to(dtype))


def test_only_blocks_that_are_needed_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "GAP", 1)
    source = Folder(folder, PLACES, "model.")
    source.fill([Target("model.a.weight", (ROWS, COLUMNS), (128, 128), torch.empty(10, 20))], strict=False)
    assert source.bytes_read == 10 * 20 + 4
    source.fill([Target("model.c.experts", (EXPERTS, 64, 70), (1, 32, 7), torch.empty(1, 32, 3))], strict=False)
    assert source.bytes_read == 10 * 20 + 4 + 3 * (16 + 1)


def test_a_model_in_fp8_is_read_like_its_widened_one(tmp_path: Path) -> None:
    theirs("llama").float().save_pretrained(tmp_path / "wide")
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    packed, wide = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "_proj" in name:
            scales = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) + 0.5
            packed[name] = tensor.to(torch.float8_e4m3fn)
            packed[f"{name}_scale_inv"] = scales
            wide[name] = widened_fp8(packed[name], scales, 128).float()
    config = read_config(tmp_path / "wide")
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors")
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    save_file(wide, tmp_path / "wide" / "model.safetensors")
    table = weight_map(config_from_transformers(config))
    sources = [Folder(tmp_path / kind, table, "model.") for kind in ("packed", "wide")]
    assert sources[0].tensors.keys() == sources[1].tensors.keys()
    for name, kept in sources[0].tensors.items():
        found = [torch.full(kept.shape, torch.nan) for _ in sources]
        for source, data in zip(sources, found, strict=True):
            source.fill([Target(name, kept.shape, (0,) * data.ndim, data)], strict=False)
        assert torch.equal(*found), name


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, {}, "has no weight_scale_inv"),
        (
            {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.zeros(2, 1)},
            {},
            r"float32 \[2, 1\]; float \[1, 1\] is expected for \[4, 4\] in blocks of \[128, 128\]",
        ),
        *(
            (
                {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)},
                {"quant_method": "fp8", "weight_block_size": size},
                r"weight_block_size in .*config\.json is .*; it must be two positive numbers",
            )
            for size in (128, "128x128", [128], [0, 128], ["128", "128"], {"rows": 128})
        ),
        ({"c.experts_blocks": torch.zeros(2, 3, 16, dtype=torch.uint8)}, {}, "scales None; MXFP4"),
        ({"b.weight": torch.zeros(2, 2, dtype=torch.int8)}, {}, "b.weight in .* is in int8, as quantized weights are"),
        ({"b.weight": torch.zeros(2)}, {"quant_method": "gptq"}, "packed by 'gptq'; those packed by fp8"),
    ],
)
def test_other_packing_is_refused(
    tensors: dict[str, Tensor], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        Folder(tmp_path, PLACES, "model.")
