"""cuDNN's graphs of attention: built once for each kind of request, then run on any tensors of that kind."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.plugins.cudnn_frontend.layout import Layout
from megalight.plugins.cudnn_frontend.masks import CONSTANTS, Function, capped, constants_of
from megalight.plugins.cudnn_frontend.support import PACKAGE

NAMES = (
    *("q", "k", "v", "out", "lse", "grad", "grad_q", "grad_k", "grad_v", "sink", "lengths", "key_lengths"),
    *(f"starts_{name}" for name in ("q", "k", "v", "out", "lse", "grad_q", "grad_k", "grad_v")),
    *CONSTANTS,
)
UIDS = {name: index for index, name in enumerate(NAMES, 1000)}
"""Names of tensors -> the numbers by which graphs know them. cuDNN numbers the others from 1."""


class Request(NamedTuple):
    """All that a graph depends on.

    Attributes:
        layout: sizes of sequences.
        dtype: dtype of all tensors but the log-sum-exp.
        heads: number of heads of queries.
        key_heads: number of heads of keys and values.
        sizes: features of a head of queries and keys, and of values.
        strides: elements from a token to the next, and from a head to the next, of queries, keys and values.
        causal: whether a query sees no later key.
        window: number of earlier keys that a query sees besides its own. None: all.
        scale: factor on scores.
        softcap: largest magnitude of a score. None: any.
        sink: whether cuDNN adds one more term to the denominator.
        deterministic: whether gradients of queries are added up in a fixed order.
    """

    layout: Layout
    dtype: torch.dtype
    heads: int
    key_heads: int
    sizes: tuple[int, int]
    strides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    sink: bool
    deterministic: bool


@dataclass(frozen=True)
class Graph:
    """A graph with its plan.

    Attributes:
        graph: cuDNN's graph.
        workspace: bytes that it needs while it runs.
        constants: numbers by name, on the host.
    """

    graph: Any
    workspace: int
    constants: Mapping[str, Tensor]

    def run(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Run on tensors by name, on the current stream. Outputs are among them."""
        tensors = {**tensors, **self.constants}
        workspace = torch.empty(max(self.workspace, 1), dtype=torch.uint8, device=device)
        # Tensors, not pointers: the package describes a pointer in Python, which takes five times as long.
        self.graph.execute(
            list(tensors.values()), workspace, handle_of(device), tensor_uids=tuple(UIDS[name] for name in tensors)
        )


_handles = threading.local()


def handle_of(device: torch.device) -> Any:
    """Return the handle of this thread and device, on the current stream. Autograd's threads have their own."""
    found: dict[str, Any] = _handles.__dict__
    stream = torch.cuda.current_stream(device)
    name = str(stream.device)
    if name not in found:
        with torch.cuda.device(stream.device):
            found[name] = PACKAGE.load("cudnn:create_handle")()
    PACKAGE.load("cudnn:set_stream")(handle=found[name], stream=stream.cuda_stream)
    return found[name]


class Builder:
    """The parts that graphs of both directions share."""

    def __init__(self, request: Request, **options: Any) -> None:
        self.request = request
        self.constants: dict[str, Tensor] = {}
        self.cudnn = PACKAGE.load("cudnn")
        kinds = self.cudnn.data_type
        self.kind = {torch.bfloat16: kinds.BFLOAT16, torch.float16: kinds.HALF}[request.dtype]
        self.graph = self.cudnn.pygraph(
            io_data_type=self.kind, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, **options
        )

    def index(self, name: str, length: int) -> Any:
        """Return a tensor of int32 lengths or int64 offsets."""
        kinds = self.cudnn.data_type
        kind = kinds.INT64 if name.startswith("starts") else kinds.INT32
        return self.graph.tensor(name=name, dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=UIDS[name])

    def starts(self, name: str) -> Any:
        """Return the offsets of a tensor, or None if sequences are equally long."""
        layout = self.request.layout
        return self.index(f"starts_{name}", layout.batch + 1) if layout.packed else None

    def shape(self, heads: int, length: int, size: int, strides: tuple[int, int] | None = None) -> tuple[Any, Any]:
        """Return dims and strides of tokens ``[T, heads, size]``, contiguous by default."""
        row, step = strides or (heads * size, size)
        return [self.request.layout.batch, heads, length, size], [length * row, step, row, 1]

    def lse_shape(self) -> tuple[Any, Any]:
        """Return dims and strides of the log-sum-exp: ``[batch, H, length]``, or ``[T, H]`` if packed."""
        heads, (batch, length) = self.request.heads, self.request.layout[:2]
        steps = [length * heads, 1, heads, 1] if self.request.layout.packed else [heads * length, length, 1, 1]
        return [batch, heads, length, 1], steps

    def inputs(self) -> dict[str, Any]:
        """Add queries, keys and values, and return the arguments that both directions take."""
        request, layout = self.request, self.request.layout
        (size, value_size), heads = request.sizes, request.key_heads
        found: dict[str, Any] = {}
        for name, count, length, features, strides in (
            ("q", request.heads, layout.length, size, request.strides[0]),
            ("k", heads, layout.keys, size, request.strides[1]),
            ("v", heads, layout.keys, value_size, request.strides[2]),
        ):
            found[name] = self.input(name, *self.shape(count, length, features, strides))
        found["attn_scale"] = request.scale
        if layout.packed:
            found |= {
                "use_padding_mask": request.softcap is None,
                "seq_len_q": self.index("lengths", layout.batch),
                "seq_len_kv": self.index("key_lengths", layout.batch),
            }
        if request.softcap is None:
            corner = self.cudnn.diagonal_alignment
            found["diagonal_alignment"] = corner.BOTTOM_RIGHT if layout.aligned else corner.TOP_LEFT
            if request.causal:
                found["diagonal_band_right_bound"] = 0
            if request.window is not None:
                # cuDNN counts the token itself.
                found["diagonal_band_left_bound"] = request.window + 1
        return found

    def input(self, name: str, dims: Any, strides: Any, starts: Any = None, kind: Any = None) -> Any:
        """Add an input."""
        starts = self.starts(name) if starts is None else starts
        return self.graph.tensor(
            name=name, dim=dims, stride=strides, data_type=kind or self.kind, ragged_offset=starts, uid=UIDS[name]
        )

    def output(self, name: str, tensor: Any, dims: Any, strides: Any, kind: Any = None) -> None:
        """Make a tensor an output."""
        tensor.set_output(True).set_dim(dims).set_stride(strides).set_data_type(kind or self.kind)
        tensor.set_uid(UIDS[name])
        if (starts := self.starts(name)) is not None:
            tensor.set_ragged_offset(starts)

    def capped(self, arguments: dict[str, Any]) -> tuple[Function, Function]:
        """Return the functions of a soft cap and its masks, with which cuDNN takes no masks of its own."""
        request = self.request
        assert request.softcap is not None
        lengths = (arguments["seq_len_q"], arguments["seq_len_kv"]) if request.layout.packed else None
        self.constants = constants_of(request.softcap, request.window)
        one, kind = [1, 1, 1, 1], self.cudnn.data_type.FLOAT
        tensors = {
            name: self.graph.tensor(
                name=name, dim=one, stride=one, data_type=kind, is_pass_by_value=True, uid=UIDS[name]
            )
            for name in self.constants
        }
        return capped(self.cudnn, tensors, request.causal, request.window, lengths)

    def built(self) -> Graph:
        """Choose a plan and compile it."""
        graph = self.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        # The package has kernels of its own too, which need more packages.
        graph.deselect_engines(["sdpa_"])
        graph.check_support()
        graph.build_plans()
        return Graph(graph, graph.get_workspace_size(), self.constants)


def make_forward(request: Request, **options: Any) -> Graph:
    """Build the graph of the output and of the log-sum-exp. ``options`` go to cuDNN's graph."""
    build = Builder(request, **options)
    layout, cudnn = request.layout, build.cudnn
    arguments = build.inputs()
    if request.sink:
        heads = request.heads
        arguments["sink_token"] = build.graph.tensor(
            name="sink", dim=[1, heads, 1, 1], stride=[heads, 1, 1, 1], data_type=cudnn.data_type.FLOAT,
            uid=UIDS["sink"],
        )  # fmt: skip
    if request.softcap is not None:
        arguments["score_mod"], _ = build.capped(arguments)
    out, lse = build.graph.sdpa(**arguments, generate_stats=True, name="attention")
    build.output("out", out, *build.shape(request.heads, layout.length, request.sizes[1]))
    build.output("lse", lse, *build.lse_shape(), cudnn.data_type.FLOAT)
    return build.built()


def make_backward(request: Request, **options: Any) -> Graph:
    """Build the graph of the gradients. A sink is in the log-sum-exp already, and cuDNN need not know of it."""
    build = Builder(request, **options)
    layout, cudnn, (size, value_size) = request.layout, build.cudnn, request.sizes
    arguments = build.inputs()
    values = build.shape(request.heads, layout.length, value_size)
    starts = build.starts("out")
    arguments["o"] = build.input("out", *values, starts)
    arguments["dO"] = build.input("grad", *values, starts)
    arguments["stats"] = build.input("lse", *build.lse_shape(), kind=cudnn.data_type.FLOAT)
    if layout.packed:
        arguments |= {"max_total_seq_len_q": layout.tokens, "max_total_seq_len_kv": layout.key_tokens}
    if request.softcap is not None:
        arguments["score_mod"], arguments["score_mod_bprop"] = build.capped(arguments)
    found = build.graph.sdpa_backward(
        **arguments, use_deterministic_algorithm=request.deterministic, name="attention_backward"
    )
    shapes = (
        build.shape(request.heads, layout.length, size),
        build.shape(request.key_heads, layout.keys, size),
        build.shape(request.key_heads, layout.keys, value_size),
    )
    for name, tensor, shape in zip(("grad_q", "grad_k", "grad_v"), found, shapes, strict=True):
        build.output(name, tensor, *shape)
    return build.built()


@lru_cache(maxsize=128)
def forward_graph(request: Request, device: torch.device) -> Graph:
    """Return the graph of a request, built at the first call: that takes about a second."""
    return make_forward(request, handle=handle_of(device))


@lru_cache(maxsize=128)
def backward_graph(request: Request, device: torch.device) -> Graph:
    """Return the graph of the gradients of a request, built at the first call."""
    return make_backward(request, handle=handle_of(device))
