"""One-shot collectives: every GPU of a host writes its values into the memory of the others, and reads what they wrote.

A decoding step sums a few kilobytes twice in each layer, or brings them to experts and back. For those, a kernel takes
one trip over NVLink: 6 microseconds for 8 KB between two H200s. Each word of four bytes travels with the number of the
call in one store of eight bytes (the LL protocol of NCCL), so a receiver that sees the number has the value, and no
flag follows.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.common import HALF
from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, start_dependents, tl
from megalight.parallel.peers.memory import PeerMemory, unreachable, why_not

MOST_BYTES = 1 << 20
"""Bytes that a rank sends at most, not counting numbers: a bound on the memory of slots, not tuned."""
WORDS = 256
"""Words of four bytes that a program sums."""


class OneShotCollectives:
    """All-reduce, all-gather and reduce-scatter of small tensors. Sums are in float32 and in the order of ranks.

    The ranks make it, and call it, together; calls come on one stream at a time. A call can be recorded in a CUDA
    graph. All ranks bring the same shapes and dtypes.

    Args:
        group: ranks of one host, whose GPUs reach each other's memory.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        self.most = MOST_BYTES // (self.ranks - 1)
        # Per rank two slots, used in turn. A peer that writes the third call into the first slot has received all of
        # the second, which this rank sends after it has read the first.
        self._memory = PeerMemory(group, slots=1, exact=True)
        self._stride = cdiv(self.most // 4, WORDS) * WORDS
        self._memory.reserve(2 * self.ranks * self._stride * 8)
        begins = [self._memory.view(rank, 0, (1,), torch.int64, 0) for rank in range(self.ranks)]
        device = begins[self.rank].device
        self._begins = torch.tensor([begin.data_ptr() for begin in begins], dtype=torch.int64, device=device)
        # Programs count their calls: how many there are differs from call to call. In each, whatever it is, a program
        # sends its words to all other ranks, and receives as many from each.
        self._calls = torch.zeros(self._stride // WORDS, dtype=torch.int32, device=device)

    def takes(self, numel: int, dtype: torch.dtype) -> bool:
        """Return whether it sums tensors of so many elements; of a reduce-scatter, so many for each rank."""
        nbytes = numel * dtype.itemsize
        return (dtype in HALF or dtype == torch.float32) and 0 < nbytes <= self.most and nbytes % 4 == 0

    def gathers(self, *parts: Tensor) -> bool:
        """Return whether it gathers tensors like ``parts`` in one call."""
        sizes = [part.numel() * part.element_size() for part in parts]
        programs = sum(cdiv(size // 4, WORDS) for size in sizes)
        return all(size and size % 4 == 0 for size in sizes) and programs * WORDS <= self._stride

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of ``x``: the same bits on all of them."""
        y, words = torch.empty_like(x, memory_format=torch.contiguous_format), x.numel() * x.element_size() // 4
        self._sum(x, y, words, 0)
        return y

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's slice along dim 0 of the sum of ``x``."""
        y = x.new_empty(x.shape[0] // self.ranks, *x.shape[1:])
        words = y.numel() * y.element_size() // 4
        self._sum(x, y, words, words)
        return y

    def _sum(self, x: Tensor, y: Tensor, words: int, step: int) -> None:
        pdl = OVERLAP.on
        _reduce[(cdiv(words, WORDS),)](
            *(_words(x), _words(y), self._begins, self._calls, words, step, self._stride),
            RANK=self.rank, RANKS=self.ranks, DTYPE=getattr(tl, str(x.dtype).removeprefix("torch.")), WORDS=WORDS,
            PDL=pdl, launch_pdl=pdl, num_warps=4,
        )  # fmt: skip

    def all_gather(self, first: Tensor, second: Tensor, third: Tensor) -> list[Tensor]:
        """Return each of three tensors of all ranks, concatenated along dim 0, by one kernel."""
        parts = [part.contiguous() for part in (first, second, third)]
        found = [part.new_empty(part.shape[0] * self.ranks, *part.shape[1:]) for part in parts]
        sizes = [part.numel() * part.element_size() // 4 for part in parts]
        ends, pdl = [*accumulate(cdiv(size, WORDS) for size in sizes)], OVERLAP.on
        _gather[(ends[-1],)](
            *(*map(_words, parts), *map(_words, found), *sizes, *ends[:-1]), *(self._begins, self._calls, self._stride),
            RANK=self.rank, RANKS=self.ranks, WORDS=WORDS, PDL=pdl, launch_pdl=pdl, num_warps=4,
        )  # fmt: skip
        return found


def one_shot(group: ProcessGroup) -> OneShotCollectives | None:
    """Return those of a group, or None where its GPUs do not reach each other. All ranks call it together."""
    return OneShotCollectives(group) if why_not("cuda") is None and unreachable(group) is None else None


def _words(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.int32)


@jit
def _halves(word: Value, DTYPE: constexpr) -> tuple[Value, Value]:
    """Return the values of a word in float32: one float32, or two of 16 bits."""
    if DTYPE.primitive_bitwidth == 32:
        low = word.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@jit
def _word(low: Value, high: Value, DTYPE: constexpr) -> Value:
    if DTYPE.primitive_bitwidth == 32:
        word = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | lower
    return word


@jit
def _send(address: Value, word: Value, call: Value) -> None:
    # One store of eight bytes is seen whole, or not at all.
    tl.inline_asm_elementwise(
        "{ .reg .b64 v; mov.b64 v, {$2, $3}; st.relaxed.sys.global.b64 [$1], v; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [address, word, call],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _receive(address: Value, call: Value) -> Value:
    # A peer that is gone ends the process with an error after 2^31 loads, ten minutes or more.
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 n, seen; .reg .b64 v;
        mov.b32 n, 0x7fffffff;
        again:
        ld.relaxed.sys.global.b64 v, [$1];
        mov.b64 {$0, seen}, v;
        setp.eq.b32 p, seen, $2;
        @p bra there;
        sub.u32 n, n, 1;
        setp.ne.b32 p, n, 0;
        @p bra again;
        trap;
        there:
        }""",
        "=&r,l,r",
        [address, call],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _next_call(calls: Value, program: Value, WORDS: constexpr) -> tuple[Value, Value]:
    """Return the number of this program's call, also as a block of words."""
    call = tl.load(calls + program) + 1
    tl.debug_barrier()  # all threads have read the number before one of them writes the next
    return call, tl.zeros([WORDS], tl.int32) + call


@jit
def _reduce(
    x: Value, y: Value, begins: Value, calls: Value, words: Value, step: Value, stride: Value,
    RANK: constexpr, RANKS: constexpr, DTYPE: constexpr, WORDS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Sum the words of ``x`` that begin at ``step`` times this rank: with ``step`` 0, all ranks get all."""
    program = tl.program_id(0)
    place = program * WORDS + tl.arange(0, WORDS)
    inside = place < words
    start_dependents(PDL)
    call, numbers = _next_call(calls, program, WORDS)
    slot = (call & 1).to(tl.int64) * RANKS
    offset = place.to(tl.int64) * 8
    for turn in tl.static_range(1, RANKS):
        peer = (RANK + turn) % RANKS
        word = tl.load(x + peer * step + place, mask=inside, other=0)
        _send(tl.load(begins + peer) + (slot + RANK) * stride * 8 + offset, word, numbers)
    own = tl.load(x + RANK * step + place, mask=inside, other=0)
    here = tl.load(begins + RANK)
    low, high = tl.zeros([WORDS], tl.float32), tl.zeros([WORDS], tl.float32)
    for rank in tl.static_range(RANKS):
        word = own if rank == RANK else _receive(here + (slot + rank) * stride * 8 + offset, numbers)
        lower, upper = _halves(word, DTYPE)
        low += lower
        high += upper
    tl.store(y + place, _word(low, high, DTYPE), mask=inside)
    tl.store(calls + program, call)


@jit
def _gather(
    first: Value, second: Value, third: Value, first_out: Value, second_out: Value, third_out: Value,
    first_words: Value, second_words: Value, third_words: Value, first_end: Value, second_end: Value, begins: Value,
    calls: Value, stride: Value,
    RANK: constexpr, RANKS: constexpr, WORDS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Gather the words of three tensors: programs before ``first_end`` those of the first, and so on."""
    program = tl.program_id(0)
    lane = tl.arange(0, WORDS)
    start_dependents(PDL)
    call, numbers = _next_call(calls, program, WORDS)
    one, two = program < first_end, program < second_end
    # As integers, which can be chosen by a condition.
    given = tl.where(one, first.to(tl.int64), tl.where(two, second.to(tl.int64), third.to(tl.int64)))
    out = tl.where(one, first_out.to(tl.int64), tl.where(two, second_out.to(tl.int64), third_out.to(tl.int64)))
    words = tl.where(one, first_words, tl.where(two, second_words, third_words))
    begin = tl.where(one, 0, tl.where(two, first_end, second_end))
    x, y = given.to(tl.pointer_type(tl.int32)), out.to(tl.pointer_type(tl.int32))
    place = (program - begin) * WORDS + lane
    inside = place < words
    own = tl.load(x + place, mask=inside, other=0)
    slot = (call & 1).to(tl.int64) * RANKS
    offset = (program * WORDS + lane).to(tl.int64) * 8
    for turn in tl.static_range(1, RANKS):
        _send(tl.load(begins + (RANK + turn) % RANKS) + (slot + RANK) * stride * 8 + offset, own, numbers)
    here = tl.load(begins + RANK)
    for rank in tl.static_range(RANKS):
        word = own if rank == RANK else _receive(here + (slot + rank) * stride * 8 + offset, numbers)
        tl.store(y + rank * words + place, word, mask=inside)
    tl.store(calls + program, call)
