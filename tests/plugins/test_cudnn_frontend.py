from __future__ import annotations

import gc
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.ops.attention import ATTENTION, EXAMPLE, reference
from megalight.plugins.cudnn_frontend import graphs, layout, support
from megalight.plugins.cudnn_frontend.layout import Layout, bucket, layout_of, offsets_of
from megalight.types import PackedSequences
from tests.ops.checks import check
from tests.plugins import cudnn_graphs, fakes
from tests.plugins.fakes import Fakes

GOOD = EXAMPLE._replace(device="cuda")
# The package exports a function of the same name.
plugin = import_module("megalight.plugins.cudnn_frontend.attention")
of_lengths, of_uniform = PackedSequences.of_lengths, PackedSequences.of_uniform


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes.pretend_cuda(monkeypatch)
    found = Fakes(tmp_path, monkeypatch)
    found.add("cudnn", "1.32.0", **cudnn_graphs.module())
    monkeypatch.setattr(graphs, "handle_of", lambda device: "handle")
    monkeypatch.setattr(support, "triton_why_not", lambda *args: None)
    monkeypatch.setattr(plugin, "_products", lambda out, grad: (out.double() * grad.double()).sum(-1).t())
    monkeypatch.setattr(cudnn_graphs.Graph, "made", 0)
    for make in (graphs.forward_graph, graphs.backward_graph):
        make.cache_clear()
    return found


SEQUENCES = {
    "dense": of_uniform(2, 9),
    "single": of_uniform(3, 1),
    "ragged": of_lengths([3, 1, 8, 5, 2]),
    "cached": replace(of_lengths([12, 30]), keys=of_lengths([25, 49])),
    "cached uniform": replace(of_uniform(2, 3), keys=of_uniform(2, 7)),
}


@pytest.mark.parametrize(
    ("name", "softcap"),
    [*((name, None) for name in SEQUENCES), *((name, 1.5) for name in SEQUENCES if "cached" not in name)],
)
@pytest.mark.parametrize(
    ("causal", "window", "sunk"),
    [(True, None, False), (True, 0, True), (True, 2, False), (False, None, True), (False, 3, False)],
)
def test_tensors_are_described_as_they_lie(
    packages: Fakes, name: str, causal: bool, window: int | None, sunk: bool, softcap: float | None
) -> None:
    torch.manual_seed(0)
    sequences = SEQUENCES[name]
    keys = sequences.keys or sequences
    shapes = ((sequences.num_tokens, 4, 16), (keys.num_tokens, 2, 16), (keys.num_tokens, 2, 8))
    tensors = [torch.randn(shape).bfloat16() for shape in shapes]
    sinks = [torch.randn(4).bfloat16()] if sunk else []
    check(
        lambda q, k, v, *sink: plugin.attention(q, k, v, sequences, causal, 0.3, window, softcap, 0.0, *sink),
        lambda q, k, v, *sink: reference.attention(q, k, v, sequences, causal, 0.3, window, softcap, 0.0, *sink),
        [*tensors, *sinks],
        sums=(3,),
    )


@pytest.mark.parametrize("sequences", [of_uniform(2, 6), of_lengths([3, 9])], ids=["dense", "ragged"])
def test_views_of_a_packed_projection(packages: Fakes, sequences: PackedSequences) -> None:
    def parts(rows: Tensor) -> Any:
        return rows.split((4, 2, 2), 1)

    rows = torch.randn(12, 8, 16).bfloat16()
    check(
        lambda x: plugin.attention(*parts(x), sequences, True, None, None, None, 0.0),
        lambda x: reference.attention(*parts(x), sequences, True, None, None, None, 0.0),
        [rows],
    )
    (request,) = {args[0] for args in _requests}
    assert request.strides == ((128, 16),) * 3, "no copy"


_requests: list[Any] = []


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    _requests.clear()
    make = plugin.forward_graph

    def noted(*args: Any) -> Any:
        _requests.append(args)
        return make(*args)

    monkeypatch.setattr(plugin, "forward_graph", noted)


def test_rows_that_it_cannot_load_are_copied(packages: Fakes) -> None:
    sequences = of_lengths([3, 9])
    for wide in (torch.randn(12, 4, 20)[..., :16], torch.randn(12, 4, 32)[..., ::2], torch.randn(12, 68)[:, 4:]):
        q = wide.bfloat16()
        q = q.view(12, 4, 16) if q.dim() == 2 and q.is_contiguous() else q.unflatten(-1, (4, 16)) if q.dim() == 2 else q
        out = plugin.attention(q, q, q, sequences, True, None, None, None, 0.0)
        expected = reference.attention(*(q.double(),) * 3, sequences, True, None, None, None, 0.0)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_a_run_has_few_graphs(packages: Fakes) -> None:
    """500 packs of the same size, of 1 to 40 documents."""
    generator = torch.Generator().manual_seed(0)
    found = set()
    for _ in range(500):
        count = int(torch.randint(1, 41, (), generator=generator))
        cuts = (torch.randperm(8191, generator=generator)[: count - 1] + 1).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, 8192], strict=True)]
        found.add(layout_of(replace(of_lengths([1, 2]), lengths=tuple(lengths))))
    assert len(found) <= 60


def test_packs_of_one_layout_share_a_graph(packages: Fakes) -> None:
    for lengths in ([30, 1, 20], [5, 9, 40, 2], [50, 3, 8]):
        q = torch.randn(sum(lengths), 2, 8).bfloat16()
        out = plugin.attention(q, q, q, of_lengths(lengths), True, None, None, None, 0.0)
        expected = reference.attention(*(q.double(),) * 3, of_lengths(lengths), True, None, None, None, 0.0)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert cudnn_graphs.Graph.made == 1


def test_sizes_are_rounded_up_by_less_than_a_quarter() -> None:
    assert [bucket(n) for n in (1, 64, 65, 513, 641, 8191, 8193)] == [64, 64, 128, 640, 768, 8192, 10240]
    for n in range(1, 5000):
        assert n <= bucket(n) < max(1.25 * n + 1, n + 64)
        assert bucket(bucket(n)) == bucket(n)


def test_layouts() -> None:
    assert layout_of(of_uniform(3, 50)) == Layout(3, 50, 50, 150, 150, packed=False, aligned=False)
    assert layout_of(of_lengths([3, 100, 7])) == Layout(4, 128, 128, 128, 128, packed=True, aligned=False)
    assert layout_of(SEQUENCES["cached"]) == Layout(2, 64, 64, 64, 128, packed=True, aligned=True)
    assert layout_of(of_uniform(3, 1)).packed, "cuDNN has no gradient of single queries of single keys"


def test_offsets_are_made_once_and_forgotten_with_their_sequences() -> None:
    sequences = of_lengths([3, 1, 8])
    found = offsets_of(sequences, 4)
    assert found.lengths.tolist() == [3, 1, 8, 0]
    assert found.lengths.dtype == torch.int32
    assert found.of(96).tolist() == [0, 288, 384, 1152, 1152]
    assert found.of(96) is offsets_of(sequences, 4).of(96)
    many = 3 * 2**29
    assert found.of(many).tolist()[-1] == 12 * many, "offsets exceed 32 bits"
    count = len(layout._known)
    del sequences, found
    gc.collect()
    assert len(layout._known) == count - 1


def test_deterministic_algorithms_are_handed_on(packages: Fakes) -> None:
    q = torch.randn(12, 2, 8).bfloat16().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        plugin.attention(q, q, q, of_uniform(2, 6), True, None, None, None, 0.0).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    ((request, device),) = _requests
    assert graphs.backward_graph(request, device).graph.given["use_deterministic_algorithm"] is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": True}, "has no dropout"),
        ({"softcap": True, "square": False}, "a soft cap only where queries and keys are the same tokens"),
        ({"dtype": torch.float32}, "in half types"),
        ({"head_dim": 264, "value_dim": 264}, "multiples of 8 up to 256"),
        ({"value_dim": 20}, "multiples of 8"),
    ],
)
def test_what_it_refuses(packages: Fakes, change: dict[str, Any], reason: str) -> None:
    assert support.why_not(GOOD) is None
    assert support.why_not(GOOD._replace(uniform=False, window=True, softcap=True, sink=True)) is None
    assert reason in str(support.why_not(GOOD._replace(**change)))


def test_versions_and_devices(packages: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.add("cudnn", "1.32.0", backend_version=lambda: 91002)
    assert support.why_not(GOOD) == "needs cuDNN 91900, found 91002. Next: install a newer torch"
    packages.add("cudnn", "1.14.1")
    assert support.why_not(GOOD) == (
        "attention needs cudnn >= 1.32, found 1.14.1. Next: pip install nvidia-cudnn-frontend"
    )
    packages.add("cudnn", "1.32.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert support.why_not(GOOD) == "needs a GPU of compute capability 9.0, not 8.0"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.pretend_cuda(monkeypatch)
    assert support.why_not(GOOD) == (
        "needs the package cudnn, which is not installed. Next: pip install nvidia-cudnn-frontend"
    )


def test_auto_takes_it_where_it_is_faster(packages: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**change: Any) -> str:
        return ATTENTION.select(GOOD._replace(**change)).name

    assert chosen(window=True) == chosen(sink=True) == "cudnn_frontend"
    # The others need a real device here; what counts is that the plugin is passed over.
    assert chosen() == "sdpa"
    assert chosen(window=True, near=True) == "sdpa"
    assert chosen(window=True, swift=True) == "sdpa"
    assert chosen(sink=True, swift=True) == "block"
    assert chosen(window=True, uniform=False) == "sdpa"
    assert chosen(window=True, square=False) == "sdpa"
    assert chosen(window=True, head_dim=64, value_dim=64) == "sdpa"
    assert chosen(window=True, sink=True) == "block"
    assert chosen(window=True, softcap=True) == "reference"
    with monkeypatch.context() as patch:
        patch.setattr(support, "cuda_why_not", lambda device: None)
        assert chosen(window=True) == "cudnn_frontend"
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
        assert chosen(window=True) == "sdpa"
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(window=True) == "sdpa"
    finally:
        torch.use_deterministic_algorithms(False)
    packages.add("cudnn", "1.14.1")
    assert chosen(window=True) == "sdpa"


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at gradients of all tensors
def test_the_compiler_goes_around_it(packages: Fakes) -> None:
    sequences = of_uniform(2, 6)
    q = torch.randn(12, 2, 8).bfloat16()

    def doubled(q: Tensor) -> Tensor:
        out: Tensor = plugin.attention(q * 2, q, q, sequences, True, None, 2, None, 0.0) * 2
        return out

    made = torch.compile(doubled, backend="eager")(q.requires_grad_())
    torch.testing.assert_close(made, doubled(q))
    made.sum().backward()
    assert q.grad is not None
