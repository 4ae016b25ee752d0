"""TransformerEngine's recipes, quantizers and products in small: cast by our reference, and watchful of their use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megalight.ops.quantize import Quantized, Scheme, quantize
from tests.plugins.fakes import Fakes


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


def recipe_class(name: str) -> type:
    @dataclass
    class Recipe:
        fp8_format: Format = Format.E4M3

    Recipe.__name__ = Recipe.__qualname__ = name
    return Recipe


PARTS = 2
"""Tensors of quantized values of one direction: the quantized values and their scale."""


class Storage:
    """Quantized values by rows and by columns, where they were asked for."""

    def __init__(self, rows: Quantized | None, columns: Quantized | None, shape: tuple[int, ...]) -> None:
        self.rows, self.columns, self.shape = rows, columns, shape
        self.scheme: Any = None

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert self.columns is not None or not columnwise_usage
        self.rows = self.rows if rowwise_usage else None

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Storage]:
        tensors: list[Tensor | None] = []
        for quantized in (self.rows, self.columns):
            tensors += [None] * PARTS if quantized is None else quantized.tensors
            self.scheme = self.scheme if quantized is None else quantized.scheme
        self.rows = self.columns = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        self.rows, self.columns = (
            None if part[0] is None else Quantized.of_tensors(self.scheme, *part)
            for part in (tensors[:PARTS], tensors[PARTS:])
        )
        return []


class Quantizer:
    internal = False

    def __init__(self, form: Any, multiple: int, delayed: bool) -> None:
        self.form, self.multiple = form, multiple
        self.scale = torch.ones(()) if delayed else None
        self.amax = torch.zeros(1)
        self.usage = (True, True)

    def set_usage(self, rowwise: bool, columnwise: bool) -> None:
        self.usage = rowwise, columnwise

    def __call__(self, x: Tensor) -> Storage:
        assert self.internal
        assert x.ndim == 2
        assert x.is_contiguous()
        assert x.shape[0] % self.multiple == 0
        scheme = Scheme(self.form)
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax().float()))
        amax = None if self.scale is None else {"e4m3": 448.0, "e5m2": 57344.0}[self.form] / self.scale
        rows, columns = (
            quantize(t, scheme, amax) if wanted else None for t, wanted in zip((x, x.T), self.usage, strict=True)
        )
        return Storage(rows, columns, tuple(x.shape))


class RecipeState:
    def __init__(self, recipe: Any, mode: str, count: int) -> None:
        self.recipe, self.mode, self.count = recipe, mode, count

    @staticmethod
    def create(recipe: Any, *, mode: str, num_quantizers: int, device: torch.device) -> RecipeState:
        assert num_quantizers == {"forward": 3, "backward": 2}[mode]
        return RecipeState(recipe, mode, num_quantizers)

    def make_quantizers(self) -> list[Quantizer]:
        wide = self.mode == "backward" and self.recipe.fp8_format is Format.HYBRID
        name = type(self.recipe).__name__
        form = "e5m2" if wide else "e4m3"
        return [Quantizer(form, 16, name == "DelayedScaling") for _ in range(self.count)]


def general_gemm(
    A: Storage, B: Storage, out_dtype: torch.dtype | None = None, accumulate: bool = False, layout: str = "TN",
    out: Tensor | None = None, grad: bool = False, use_split_accumulator: bool = False,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """As cuBLAS counts: ``TN`` is ``B A^T``, ``NN`` is ``B A``, ``NT`` is ``B^T A``."""
    a, b = {"TN": (A.rows, B.rows), "NN": (A.columns, B.rows), "NT": (A.columns, B.columns)}[layout]
    assert a is not None
    assert b is not None
    assert use_split_accumulator == grad == (layout != "TN")
    y = (b.dequantize() @ a.dequantize().T).to(out_dtype)
    if out is None:
        return y, None, None, None
    assert out.dtype == out_dtype
    out.copy_(out + y if accumulate else y)
    return out, None, None, None


def install(
    packages: Fakes, version: str = "2.12.0", module: str = "quantization", able: tuple[bool, str] = (True, "")
) -> None:
    names = ["Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]
    checks = ["check_fp8_support", "check_fp8_block_scaling_support", "check_mxfp8_support", "check_nvfp4_support"]
    packages.add("transformer_engine", version)
    packages.add("transformer_engine.pytorch")
    packages.add("transformer_engine.common.recipe", Format=Format, **{name: recipe_class(name) for name in names})
    packages.add("transformer_engine.pytorch.cpp_extensions", general_gemm=general_gemm)
    packages.add(
        f"transformer_engine.pytorch.{module}", RecipeState=RecipeState, **{name: lambda: able for name in checks}
    )
