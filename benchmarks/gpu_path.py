"""The way of a GPU's host on a CPU: ops choose the backends of a GPU, kernels do nothing, and calls are counted.

    python benchmarks/gpu_path.py             # a forward and a backward of each kind of layer
    python benchmarks/gpu_path.py "MoE FP8"   # of one kind, and what is called how often

Results are meaningless, because no kernel runs. What stays is what the host does for a layer: functions that Python
calls, operators of torch, and launches of our kernels and of the library's 8-bit products. Triton's own calls are not
in it, and Triton need not be installed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import host
from megalight import registry
from megalight.nn.moe.dispatch import HostCounts
from megalight.ops.jit import AbsentKernel
from megalight.ops.scaled_accumulate import cublaslt
from megalight.registry import BackendRegistry

NAMES = {"weight_gradient": "addmm_fp32", "scaled_mm": "torch_tensorwise", "scaled_accumulate": "cublaslt"}
"""What a GPU chooses where it is not ``triton``."""
CPU = ("attention", "adam", "cross_entropy")
"""Ops whose calls are counted as they are on a CPU (attention), or outside of layers."""


LAUNCHES: Counter[str] = Counter()
"""Launches of kernels, by name."""


def launch(kernel: AbsentKernel, *args: Any, **kwargs: Any) -> None:
    """Count a launch of a kernel, which does nothing."""
    LAUNCHES[f"{kernel.fn.__module__.removeprefix('megalight.ops.')}.{kernel.fn.__name__}"] += 1


class Descriptor:
    """Stands in for Triton's description of a matrix."""

    @staticmethod
    def from_tensor(matrix: Tensor, block: list[int]) -> Descriptor:
        return Descriptor()


class Anything(ModuleType):
    """A module with every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def triton() -> dict[str, ModuleType]:
    """Return modules that stand in for those of Triton that host code imports."""
    root, tools, described = (Anything(f"triton{name}") for name in ("", ".tools", ".tools.tensor_descriptor"))
    described.__dict__.update(TensorDescriptor=Descriptor)
    return {module.__name__: module for module in (root, tools, described)}


def scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None, **options: Any) -> Tensor:
    """Stand in for ``torch._scaled_mm``."""
    LAUNCHES["torch._scaled_mm"] += 1
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype) if out is None else out


def half_to_fp32(total: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **options: Any) -> Tensor:
    """Stand in for ``torch.addmm`` and ``torch.baddbmm`` of halves, which add to a float32 matrix."""
    assert a.shape[-2] == total.shape[-2]
    LAUNCHES["torch.addmm"] += 1
    return out


class Library:
    """Stands in for cuBLASLt: every call succeeds."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return self._matmul if name == "cublasLtMatmul" else self._nothing

    def _matmul(self, *args: Any) -> int:
        LAUNCHES["cublasLtMatmul"] += 1
        return 0

    def _nothing(self, *args: Any) -> int:
        return 0


def equal_counts(self: HostCounts, *lengths: int) -> list[list[int]]:
    """Return equal numbers of rows: kernels that do nothing count nothing."""
    each = host.LAYER.seq * 2 // host.EXPERTS
    return [[each * (number + 1) for number in range(length)] for length in lengths]


@contextmanager
def gpu_path() -> Iterator[None]:
    """Let ops choose what they would choose on a GPU, with kernels that do nothing."""
    select = BackendRegistry.select

    def as_on_gpu(self: BackendRegistry[Any, Any], spec: Any, name: str = "auto") -> Any:
        wanted = NAMES.get(self.op, "triton")
        # The run before was on a CPU, where products in FP8 are emulated by the reference.
        if self.op in CPU or wanted not in self._backends:
            return select(self, spec, name)
        return self._backends[wanted]

    stream = SimpleNamespace(cuda_stream=0)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, triton()))
        for where, name, value in (
            (AbsentKernel, "__getitem__", lambda kernel, grid: partial(launch, kernel)),
            (BackendRegistry, "select", as_on_gpu),
            (torch, "_scaled_mm", scaled_mm),
            (torch, "empty", torch.zeros),  # routes that nobody writes must be experts that exist
            (torch, "empty_like", torch.zeros_like),
            (Tensor, "new_empty", Tensor.new_zeros),
            (torch.cuda, "current_stream", lambda device=None: stream),
            (torch, "addmm", half_to_fp32),
            (torch, "baddbmm", half_to_fp32),
            (cublaslt, "_library", lambda: Library()),
            (cublaslt, "_plan", lambda *args: cublaslt._GemmPlan(*[cublaslt.c_void_p()] * 4, cublaslt.c_int())),
            (cublaslt, "_handle", lambda device: cublaslt.c_void_p()),
            (HostCounts, "wait", equal_counts),
        ):
            stack.enter_context(patch.object(where, name, value))
        forget()
        yield
    forget()


def forget() -> None:
    """Forget which backends ops have chosen."""
    for clear in registry._remembered:
        clear()


class Operators(TorchDispatchMode):
    """Counts operators of torch, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Calls(NamedTuple):
    """What the host calls, by name.

    Attributes:
        functions: functions that Python calls, in Python and in C.
        operators: operators of torch, on tensors and views.
        launches: kernels of ours, and products of 8 bits or into float32 of the library.
    """

    functions: Counter[str]
    operators: Counter[str]
    launches: Counter[str]

    @property
    def totals(self) -> dict[str, int]:
        """The number of each."""
        return {name: counter.total() for name, counter in self._asdict().items()}


def count(forward: host.Forward) -> Calls:
    """Count what a forward and its backward call, once weights are cast and choices made."""
    functions: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename == __file__ or event not in ("call", "c_call"):
            return  # what stands in for a kernel or a library is not the host's work
        place = f"{Path(code.co_filename).name}:{code.co_qualname}"
        functions[place if event == "call" else f"{argument.__qualname__} in {place}"] += 1

    def run() -> None:
        out = forward()
        out.backward(out.detach())

    run()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    LAUNCHES.clear()
    with Operators() as operators:
        run()
    return Calls(functions, operators.found, Counter(LAUNCHES))


def counted(kind: str) -> Calls:
    """Count what a layer of a kind calls, with the strategy's gradient buffers."""
    found: list[Calls] = []

    def look(forward: host.Forward, clock: Any, calls: int) -> dict[str, float]:
        # The steps before ran on the CPU's path, so that parameters and buffers are as in training.
        with gpu_path():
            found.append(count(forward))
        return {}

    with patch.object(host, "time_layer", look):
        host.of_kind(kind, "cpu", calls=3)
    return found[0]


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:]
    for kind in chosen or host.KINDS:
        calls = counted(kind)
        print(f"{kind}: {calls.totals}", flush=True)
        for name, counter in calls._asdict().items() if chosen else ():
            print(f"\n{name}")
            for what, times in counter.most_common():
                print(f"{times:6} {what}")


if __name__ == "__main__":
    main()
