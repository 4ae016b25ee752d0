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


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a floating-point number of four bits; the highest bit is the sign."""


def plain_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights of a folder, multiplied out: float32 where they are codes.

    A model with these weights computes what the quantized one does, but for the rounding of inputs, keys and values.

    Args:
        folder: written by ``megalight convert --to modelopt``.

    Raises:
        CheckpointError: there is no such folder.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        raise CheckpointError(f"{os.fspath(folder)} holds no *.safetensors; give a folder of megalight convert.")
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        module, parting = name.removesuffix("weight_scale")[:-1], name.removesuffix("weight_scale")[-1]
        if parting == "_":
            # a stack of experts
            found[module] = tensors[module].float() * tensors[name].float()
            continue
        weight = decode(tensors[f"{module}.weight"], tensors[name], tensors.get(f"{module}.weight_scale_2"))
        if f"{module}.pre_quant_scale" in tensors:
            # it multiplies inputs
            weight *= tensors[f"{module}.pre_quant_scale"].float()
        found[f"{module}.weight"] = weight
    return found


def decode(codes: Tensor, scale: Tensor, second: Tensor | None = None) -> Tensor:
    """Return a weight ``[out, in]`` in float32. Dtypes of codes and scales tell the format.

    Args:
        codes: FP8 or INT8 ``[out, in]``; INT4 ``[out / 2, in]``, FP4 ``[out, in / 2]``, two in a byte, the first in its
            low half.
        scale: of the layer, of each row, of each block of a row, or of each square. MX formats have exponents of two,
            plus 127.
        second: for NVFP4, what multiplies the scales of blocks; for W4A8, the step of the rounding to FP8.
    """
    narrow = codes.dtype == torch.uint8
    if scale.dtype == torch.uint8:
        steps = torch.exp2(scale.float() - 127)
        values = _fp4(codes) if narrow else codes.float()
    elif scale.dtype == torch.float8_e4m3fn:
        assert second is not None
        steps, values = scale.float() * second, _fp4(codes)
    elif narrow:
        # The sign is the highest of four bits.
        signed = codes.view(torch.int8)
        steps, values = scale.float(), torch.stack([signed << 4 >> 4, signed >> 4], 1).flatten(0, 1).float()
    else:
        steps, values = scale.float(), codes.float()
    if steps.ndim == 4:
        # squares: [out / b, 1, in / b, 1]
        steps = steps.flatten(1).repeat_interleave(len(values) // len(steps), 0)
    if steps.ndim == 2:
        steps = steps.repeat_interleave(values.shape[1] // steps.shape[1], 1)
    elif steps.ndim == 1:
        steps = steps[:, None]
    weight = values * steps
    if second is not None and scale.dtype != torch.float8_e4m3fn:
        weight = (weight / second).to(torch.float8_e4m3fn).float() * second
    return weight


def _fp4(codes: Tensor) -> Tensor:
    """Return the numbers of two codes in a byte, ``[out, in / 2] -> [out, in]``."""
    table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=codes.device)
    return table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
