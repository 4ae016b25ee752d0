"""What engines read of a folder in ModelOpt's format: names, dtypes and shapes, by the algorithm that it names.

Facts of vLLM's and SGLang's ``quantization/modelopt.py`` (``from_config`` and ``create_weights``) and of TensorRT-LLM's
``QuantAlgo`` and weight loaders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import load_file

ENGINES = {
    "vllm": {
        "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
    },
    "tensorrt_llm": {
        "W8A16", "W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4",
        "W4A8_NVFP4_FP8", "MIXED_PRECISION",
    },
    # ModelOpt's own name for a format of no engine
    "none": {"MXFP4"},
}  # fmt: skip
KEYS_AND_VALUES = {None, "FP8", "INT8", "NVFP4"}
FP8, FLOAT, BYTE = torch.float8_e4m3fn, torch.float32, torch.uint8
Shape = Callable[[int, int], tuple[int, ...]]
Leaves = dict[str, tuple[torch.dtype, Shape]]
NUMBER: tuple[torch.dtype, Shape] = (FLOAT, lambda out, features: ())
FEATURES: tuple[torch.dtype, Shape] = (FLOAT, lambda out, features: (features,))


def same(out: int, features: int) -> tuple[int, ...]:
    return out, features


def halves(out: int, features: int) -> tuple[int, ...]:
    return out, features // 2


def blocks(size: int) -> Shape:
    return lambda out, features: (out, features // size)


TENSORS: dict[str, Leaves] = {
    "FP8": {"weight": (FP8, same), "weight_scale": NUMBER, "input_scale": NUMBER},
    "FP8_PER_CHANNEL_PER_TOKEN": {"weight": (FP8, same), "weight_scale": (FLOAT, lambda out, _: (out,))},
    "FP8_PB_WO": {
        "weight": (FP8, same),
        "weight_scale": (FLOAT, lambda out, features: (out // 128, 1, features // 128, 1)),
    },
    "NVFP4": {
        "weight": (BYTE, halves),
        "weight_scale": (FP8, blocks(16)),
        "weight_scale_2": NUMBER,
        "input_scale": NUMBER,
    },
    "W4A8_NVFP4_FP8": {
        "weight": (BYTE, halves),
        "weight_scale": (FP8, blocks(32)),
        "weight_scale_2": NUMBER,
        "input_scale": NUMBER,
    },
    "MXFP8": {"weight": (FP8, same), "weight_scale": (BYTE, blocks(32))},
    "MXFP4": {"weight": (BYTE, halves), "weight_scale": (BYTE, blocks(32))},
    "W4A16_AWQ": {
        "weight": (BYTE, lambda out, features: (out // 2, features)),
        "weight_scale": (FLOAT, blocks(128)),
        "pre_quant_scale": FEATURES,
    },
    "W4A8_AWQ": {
        "weight": (BYTE, lambda out, features: (out // 2, features)),
        "weight_scale": (FLOAT, blocks(128)),
        "weight_scale_2": NUMBER,
        "input_scale": NUMBER,
        "pre_quant_scale": FEATURES,
    },
    "W8A8_SQ_PER_CHANNEL": {
        "weight": (torch.int8, same),
        "weight_scale": (FLOAT, lambda out, _: (out,)),
        "input_scale": NUMBER,
    },
}


def check_folder(folder: Path, plain: Path) -> None:
    """Check a folder, whose model without quantization is ``plain``."""
    described = json.loads((folder / "hf_quant_config.json").read_text())
    assert described["producer"]["name"] == "modelopt"
    given = described["quantization"]
    algorithm = str(given["quant_algo"]).upper()
    assert algorithm in set().union(*ENGINES.values())
    assert given["kv_cache_quant_algo"] in KEYS_AND_VALUES
    beside = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert beside["quant_method"] == "modelopt"
    assert str(beside["quant_algo"]).upper() == algorithm
    tensors, before = (load_file(each / "model.safetensors") for each in (folder, plain))
    scaled = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    stacks = {name.removesuffix("_weight_scale") for name in tensors if name.endswith("_weight_scale")} - scaled
    assert scaled | stacks
    if algorithm == "MIXED_PRECISION":
        algorithms = {name: str(each["quant_algo"]).upper() for name, each in given["quantized_layers"].items()}
        assert scaled == algorithms.keys()
    else:
        algorithms = dict.fromkeys(scaled, algorithm)
        excluded = given["exclude_modules"]
        assert isinstance(excluded, list)
        assert isinstance(given.get("group_size", 0), int)
        assert beside["ignore"] == excluded
        # Readers take all other matrices for quantized ones, but for those of norms and embeddings.
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if not name.endswith(".weight") or tensor.ndim != 2 or "embed" in name:
                continue
            assert any(fnmatch(module, pattern) for pattern in excluded) == (module not in scaled), module
    for module, name in algorithms.items():
        sizes = before[f"{module}.weight"].shape
        for leaf, (dtype, shape) in TENSORS[name].items():
            tensor = tensors[f"{module}.{leaf}"]
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape(*sizes)), f"{module}.{leaf}"
    # Stacks of experts: one scale for all
    for module in stacks:
        assert algorithm == "FP8"
        assert (tensors[module].dtype, tensors[module].shape) == (FP8, before[module].shape)
        for leaf in ("weight_scale", "input_scale"):
            assert (tensors[f"{module}_{leaf}"].dtype, tensors[f"{module}_{leaf}"].shape) == (FLOAT, ())
