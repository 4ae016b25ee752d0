"""Compiles the attention kernels for Hopper without a GPU, and looks at what the assembler made of them.

Run as ``python -m tests.ops.compile_hopper`` where Triton is installed. It prints registers and stack of each.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalight.types import PackedSequences
from tests.ops.compile_kernels import SHARED_MEMORY, Driver, resources
from tests.ops.descriptors import ambiguous

STACK = 64
"""Bytes of a thread that may lie in memory instead of registers."""


def listing(cubin: bytes) -> str:
    """Return the instructions of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout


def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
    """What stands in for a launch."""

    def launch(*args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        used, shared, name = resources(compiled.asm["cubin"]), compiled.metadata.shared, kernel.fn.__name__
        assert shared <= SHARED_MEMORY, f"{name} {options} needs {shared} bytes of shared memory"
        assert used["STACK"] <= STACK, f"{name} {options} keeps {used['STACK']} bytes of a thread in memory"
        lost = ambiguous(listing(compiled.asm["cubin"])) if "wgmma" in compiled.asm["ptx"] else []
        assert not lost, f"{name} {options} may multiply other blocks: {lost[:4]}"
        print(f"{name} {options}: {used}, {shared} bytes shared", flush=True)

    return launch


def main() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Driver())
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign, assignment]

    from megalight.ops.attention.hopper import backward, forward

    sequences = PackedSequences.of_lengths([300, 212], "cpu")
    for causal, window, cap, dtype in (
        (True, None, None, torch.bfloat16),
        (True, 100, None, torch.bfloat16),
        (True, None, 20.0, torch.float16),
        (False, 100, None, torch.bfloat16),
    ):
        q, k, v = (torch.zeros(512, heads, 128, dtype=dtype) for heads in (8, 2, 2))
        out, lse = forward.run(q, k, v, q[0, :, 0].contiguous() if cap else None, sequences, causal, 0.1, window, cap)
        backward.run(q, q, k, v, out, lse, sequences, causal, 0.1, window, cap)


if __name__ == "__main__":
    main()
