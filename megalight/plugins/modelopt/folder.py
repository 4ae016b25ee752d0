"""Read the weights of a folder in ModelOpt's format as plain numbers, for libraries that do not know it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megalight.errors import CheckpointError

SCALES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale")
"""What stands beside weights."""


def plain_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights of a folder of FP8, INT8 or INT4, multiplied out: float32 where they are codes.

    A model with these weights computes what the quantized one does, but for the rounding of inputs, keys and values.

    Args:
        folder: written by ``megalight convert --to modelopt``.

    Raises:
        CheckpointError: there is no such folder, or a weight has another format.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        raise CheckpointError(f"{os.fspath(folder)} holds no *.safetensors; give a folder of megalight convert.")
    found = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in SCALES}
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        codes, scale = tensors[f"{module}.weight"], tensors[name].float()
        if f"{module}.weight_scale_2" in tensors:
            raise CheckpointError(f"{module}.weight has two scales; plain_weights reads FP8, INT8 and INT4.")
        if codes.dtype == torch.uint8:
            # Two rows in a byte, the first in its low half; the sign is the highest of four bits.
            signed = codes.view(torch.int8)
            codes = torch.stack([signed << 4 >> 4, signed >> 4], 1).flatten(0, 1)
            scale = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        elif scale.ndim == 1:
            scale = scale[:, None]
        weight = codes.float() * scale
        if f"{module}.pre_quant_scale" in tensors:
            # it multiplies inputs
            weight *= tensors[f"{module}.pre_quant_scale"].float()
        found[f"{module}.weight"] = weight
    return found
