"""cuDNN's graphs of attention in small: they read and write memory by pointers, strides and offsets as cuDNN does."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Kind = enum.Enum("Kind", "BFLOAT16 HALF FLOAT INT32 INT64 BOOLEAN")
Corner = enum.Enum("Corner", "TOP_LEFT BOTTOM_RIGHT")
DTYPES = {
    Kind.BFLOAT16: torch.bfloat16, Kind.HALF: torch.float16, Kind.FLOAT: torch.float32, Kind.INT32: torch.int32,
    Kind.INT64: torch.int64,
}  # fmt: skip


@dataclass
class Described:
    """A tensor of a graph."""

    name: str = ""
    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: Kind | None = None
    ragged_offset: Described | None = None
    uid: int = -1
    is_pass_by_value: bool = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def put(value: Any) -> Described:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return put


class Memory:
    """Tensors by pointers, one sequence after the other."""

    def __init__(self, pointers: dict[int, int]) -> None:
        self.pointers = pointers

    def flat(self, tensor: Described, count: int) -> Tensor:
        assert tensor.data_type is not None
        dtype = DTYPES[tensor.data_type]
        found = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.pointers[tensor.uid])
        return torch.frombuffer(found, dtype=dtype)

    def sequence(self, tensor: Described, index: int, length: int) -> Tensor:
        """``[heads, length, size]`` of one sequence."""
        batch, heads, longest, size = tensor.dim
        assert index < batch
        assert length <= longest
        start = index * tensor.stride[0]
        if tensor.ragged_offset is not None:
            assert tensor.ragged_offset.dim[0] == batch + 1
            start = int(self.flat(tensor.ragged_offset, batch + 1)[index])
        _, head, row, feature = tensor.stride
        end = start + (heads - 1) * head + max(length - 1, 0) * row + size
        return self.flat(tensor, end).as_strided((heads, length, size), (head, row, feature), start)


class Inner:
    """The operations of functions of scores."""

    def __init__(self, values: dict[int, Tensor]) -> None:
        self.values = values

    def _of(self, x: Any) -> Any:
        return self.values[x.uid] if isinstance(x, Described) else x.found

    def _made(self, found: Tensor) -> Any:
        made = SimpleNamespace(found=found)
        made.set_data_type = lambda kind: made
        return made

    def mul(self, a: Any, b: Any) -> Any:
        return self._made(self._of(a) * self._of(b))

    def add(self, a: Any, b: Any, compute_data_type: Kind) -> Any:
        return self._made(self._of(a) + self._of(b))

    def tanh(self, input: Any) -> Any:
        return self._made(self._of(input).tanh())

    def tanh_backward(self, loss: Any, input: Any) -> Any:
        return self._made(self._of(loss) * (1 - self._of(input).tanh().square()))

    def gen_index(self, input: Any, axis: int) -> Any:
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        return self._made(torch.arange(input.found.shape[axis]).view(shape).expand(input.found.shape))

    def _compare(self, left: Any, right: Any, name: str) -> Any:
        return self._made(getattr(torch.as_tensor(self._of(left)), name)(self._of(right)))

    def cmp_ge(self, input: Any, comparison: Any, compute_data_type: Kind) -> Any:
        return self._compare(input, comparison, "ge")

    def cmp_gt(self, input: Any, comparison: Any, compute_data_type: Kind) -> Any:
        return self._compare(input, comparison, "gt")

    def cmp_lt(self, input: Any, comparison: Any, compute_data_type: Kind) -> Any:
        return self._compare(input, comparison, "lt")

    def logical_and(self, a: Any, b: Any, compute_data_type: Kind) -> Any:
        return self._made(self._of(a) & self._of(b))

    def binary_select(self, input0: Any, input1: Any, mask: Any) -> Any:
        return self._made(torch.where(self._of(mask), self._of(input0), self._of(input1)))


class Graph:
    """One operation, in float64."""

    made = 0

    def __init__(
        self, io_data_type: Kind, intermediate_data_type: Kind, compute_data_type: Kind, handle: Any = None
    ) -> None:
        type(self).made += 1
        self.deselected: list[str] = []
        self.constants: list[Described] = []

    def tensor(self, **given: Any) -> Described:
        made = Described(**given)
        if made.is_pass_by_value:
            self.constants.append(made)
        return made

    def sdpa(self, **given: Any) -> list[Described]:
        assert given["generate_stats"]
        self.given, self.outputs = given, [Described("out"), Described("lse")]
        return self.outputs

    def sdpa_backward(self, **given: Any) -> list[Described]:
        assert "sink_token" not in given
        self.given, self.outputs = given, [Described(name) for name in ("grad_q", "grad_k", "grad_v")]
        return self.outputs

    def validate(self) -> None:
        for tensor in (*self.given.values(), *self.outputs):
            assert not isinstance(tensor, Described) or (tensor.dim and tensor.stride and tensor.uid >= 1000)

    def build_operation_graph(self) -> None: ...
    def check_support(self) -> None: ...
    def build_plans(self) -> None: ...
    def create_execution_plans(self, modes: list[Any]) -> None: ...

    def deselect_engines(self, names: list[str]) -> None:
        self.deselected += names

    def get_workspace_size(self) -> int:
        assert self.deselected == ["sdpa_"]
        return 16

    def execute(self, tensors: list[Tensor], workspace: Tensor, handle: Any, *, tensor_uids: tuple[int, ...]) -> None:
        given = self.given
        memory = Memory({uid: tensor.data_ptr() for uid, tensor in zip(tensor_uids, tensors, strict=True)})
        batch, _, longest, _ = given["q"].dim
        counts = [[longest] * batch, [given["k"].dim[2]] * batch]
        if "seq_len_q" in given:
            counts = [memory.flat(given[name], batch).tolist() for name in ("seq_len_q", "seq_len_kv")]
        if "max_total_seq_len_q" in given:
            assert given["max_total_seq_len_q"] >= sum(counts[0])
            assert given["max_total_seq_len_kv"] >= sum(counts[1])
        for index, (length, keys) in enumerate(zip(*counts, strict=True)):
            if length:
                self._run(memory, index, length, keys)

    def _run(self, memory: Memory, index: int, length: int, keys: int) -> None:
        given = self.given
        q = memory.sequence(given["q"], index, length).double()
        k, v = (memory.sequence(given[name], index, keys).double() for name in "kv")
        group = len(q) // len(k)
        wide_k, wide_v = (x.repeat_interleave(group, 0) for x in (k, v))
        scores = (q @ wide_k.mT * given["attn_scale"])[None]
        inner = Inner({tensor.uid: memory.flat(tensor, 1) for tensor in self.constants})
        if "score_mod" in given:
            assert not given.get("use_padding_mask")
            assert not {"diagonal_band_left_bound", "diagonal_band_right_bound"} & given.keys()
            if "seq_len_q" in given:
                lengths = {"seq_len_q": length, "seq_len_kv": keys}
                inner.values |= {given[name].uid: torch.tensor(value) for name, value in lengths.items()}
            scores = given["score_mod"](inner, inner._made(scores)).found
        else:
            shift = keys - length if given["diagonal_alignment"] is Corner.BOTTOM_RIGHT else 0
            ahead = torch.arange(keys) - torch.arange(shift, shift + length)[:, None]
            if "diagonal_band_right_bound" in given:
                scores = scores.masked_fill(ahead > given["diagonal_band_right_bound"], -torch.inf)
            if "diagonal_band_left_bound" in given:
                scores = scores.masked_fill(-ahead >= given["diagonal_band_left_bound"], -torch.inf)
        scores = scores[0]
        if len(self.outputs) == 2:
            lse = scores.logsumexp(-1)
            if "sink_token" in given:
                lse = torch.logaddexp(lse, memory.flat(given["sink_token"], len(q))[:, None].double())
            out, kept = (memory.sequence(tensor, index, length) for tensor in self.outputs)
            out.copy_((scores - lse[..., None]).exp() @ wide_v)
            kept.copy_(lse[..., None])
            return
        out, grad, lse = (memory.sequence(given[name], index, length).double() for name in ("o", "dO", "stats"))
        weights = (scores - lse).exp()
        slopes = weights * (grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True))
        if "score_mod_bprop" in given:
            slopes = given["score_mod_bprop"](inner, inner._made(slopes[None])).found[0]
        slopes = slopes * given["attn_scale"]
        found = (slopes @ wide_k, slopes.mT @ q, weights.mT @ grad)
        for tensor, made, rows in zip(self.outputs, found, (length, keys, keys), strict=True):
            heads = tensor.dim[1]
            memory.sequence(tensor, index, rows).copy_(made.view(heads, -1, *made.shape[1:]).sum(1))


def module() -> dict[str, Any]:
    """What the package has."""
    return {
        "pygraph": Graph, "data_type": Kind, "diagonal_alignment": Corner, "heur_mode": SimpleNamespace(A="A"),
        "backend_version": lambda: 91900,
    }  # fmt: skip
