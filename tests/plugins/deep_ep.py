"""A stand-in of the package ``deep_ep``: its published interface and its conditions; ranks exchange by gloo."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Numbers of ranks for which the package has kernels."""


class EventOverlap:
    def __init__(self, started: bool) -> None:
        self.started = started

    def current_stream_wait(self) -> None:
        assert self.started, "the event exists only with async_finish"


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


def everyone(value: Any, group: ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group)
    return found


class Buffer:
    num_sms: ClassVar[int] = 20

    def __init__(self, group: ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group = group

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen = chosen.scatter_(1, topk_idx % (num_experts + 1), True)[:, :num_experts]
        to_rank = chosen.view(-1, self.group.size(), num_experts // self.group.size()).any(-1)
        return to_rank.sum(0).int(), None, chosen.sum(0).int(), to_rank, EventOverlap(async_finish)

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        event, me = EventOverlap(async_finish), self.group.rank()
        if handle is not None:
            assert topk_idx is topk_weights is None
            sources = [rows[to_rank[:, me]] for rows, to_rank in everyone((x, handle), self.group)]
            return torch.cat(sources), None, None, None, None, event
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert num_tokens_per_expert is not None
        count = len(num_tokens_per_expert) // self.group.size()
        sent = everyone((x, topk_idx, topk_weights, is_token_in_rank), self.group)
        rows, experts, weights = (torch.cat([each[i][each[3][:, me]] for each in sent]) for i in range(3))
        experts = experts - me * count
        experts = torch.where((experts >= 0) & (experts < count), experts, -1)
        sizes = [int((experts == e).sum()) for e in range(count)]
        return rows, experts, torch.where(experts < 0, 0, weights), sizes, is_token_in_rank, event

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        me, found = self.group.rank(), []
        splits = [int(to_rank[:, me].sum()) for to_rank in everyone(handle, self.group)]
        for part in (x, topk_weights):
            if part is None:
                found.append(None)
                continue
            back = [parts[me] for parts in everyone(part.split(splits), self.group)]
            total = torch.zeros(len(handle), part.shape[1])
            for rank, rows in enumerate(back):
                total[handle[:, rank]] += rows.float()
            found.append(total.to(part.dtype))
        return *found, EventOverlap(async_finish)


class HybridEPBuffer:
    num_sms: ClassVar[tuple[int, int]] = (0, 0)

    def __init__(
        self,
        group: ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int = 32,
        num_sms_combine_api: int = 32,
    ) -> None:
        HybridEPBuffer.num_sms = num_sms_dispatch_api, num_sms_combine_api
        self.group, self.width, self.count = group, hidden_dim, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        handle: Any = None,
    ) -> tuple[Any, ...]:
        assert hidden.dtype == torch.bfloat16
        assert hidden.shape[1] == self.width
        if handle is None:
            assert routing_map is not None
            assert routing_map.dtype == torch.bool
            assert num_of_experts_per_rank == self.count
            maps = everyone(routing_map, self.group)
            assert len({each.shape for each in maps}) == 1, "ranks have different numbers of tokens"
            mine = slice(self.group.rank() * self.count, (self.group.rank() + 1) * self.count)
            handle = torch.cat(maps)[:, mine].T.nonzero(), len(routing_map)  # (expert, token) of each row, and T
        else:
            assert num_permuted_tokens == len(handle[0])
        (pairs, _), first = handle, self.group.rank() * self.count
        rows = torch.cat(everyone(hidden, self.group))[pairs[:, 1]]
        weights = None
        if probs is not None:
            assert probs.dtype == torch.float32
            weights = torch.cat(everyone(probs, self.group))[pairs[:, 1], first + pairs[:, 0]]
        return rows, weights, None, torch.bincount(pairs[:, 0], minlength=self.count).int(), handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Any = None
    ) -> tuple[Any, ...]:
        assert hidden.dtype == torch.bfloat16
        (pairs, own), size = handle, self.group.size()
        total = torch.zeros(own * size, self.width).index_add_(0, pairs[:, 1], hidden.float())
        dist.all_reduce(total, group=self.group)
        mine = slice(self.group.rank() * own, (self.group.rank() + 1) * own)
        weights = None
        if probs is not None:
            dense = torch.zeros(own * size, self.count * size)
            dense[pairs[:, 1], self.group.rank() * self.count + pairs[:, 0]] = probs
            dist.all_reduce(dense, group=self.group)
            weights = dense[mine]
        return total[mine].bfloat16(), weights
