"""The shapes of steps: which are recorded as CUDA graphs, and which graph serves a step.

A step has tokens of sequences that decode (one new token each) and of others (prefill). A graph serves every step that
is not larger: the rest of it is padding. Lists and rule are those of Megatron's dynamic engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class InferenceBatchDimensions:
    """The dimensions of a step, or of its graph.

    Attributes:
        token_count: new tokens.
        prefill_req_count: sequences with several new tokens, and those after the first of them.
        decode_req_count: sequences with one new token, before these.
    """

    token_count: int
    prefill_req_count: int
    decode_req_count: int

    @property
    def req_count(self) -> int:
        """Number of sequences."""
        return self.prefill_req_count + self.decode_req_count

    def is_valid(self, max_requests: int, max_sequence_length: int) -> bool:
        """Return whether a step of so many sequences at most can have these dimensions."""
        return (
            min(self.prefill_req_count, self.decode_req_count) >= 0
            and self.req_count <= max_requests
            and self.req_count <= self.token_count
            and self.token_count <= self.prefill_req_count * max_sequence_length + self.decode_req_count
        )

    def serves(self, real: InferenceBatchDimensions, strict: bool = False) -> bool:
        """Return whether a graph of these dimensions can run a step.

        Graphs without prefill serve steps without. In others a place for prefill can take a sequence that decodes.

        Args:
            real: the dimensions of the step.
            strict: it cannot.
        """
        if not real.prefill_req_count and self.prefill_req_count:
            return False
        return (
            self.token_count >= real.token_count
            and self.prefill_req_count >= real.prefill_req_count
            and self.req_count >= real.req_count
            and (not strict or self.decode_req_count >= real.decode_req_count)
        )


@dataclass(frozen=True)
class CUDAGraphBatchDimensionBuilder:
    """Makes the list of the dimensions of graphs.

    Numbers of tokens are those of Megatron, whose smallest is 8, and for steps that decode also 1, 2 and 4. One token
    has matmuls of its own (:mod:`megalight.ops.linear.gemv`), and tokens of padding go to experts, too, whose weights
    a step would read for nothing.

    Attributes:
        num_cuda_graphs: about how many numbers of tokens there are.
        max_requests: largest number of sequences of a step.
        max_sequence_length: tokens of the longest sequence.
        cuda_graph_max_tokens: largest number of tokens of a graph with prefill.
        cuda_graph_mixed_prefill_count: places for prefill of a graph that decodes, too. 0: all graphs are for decoding.
    """

    num_cuda_graphs: int
    max_requests: int
    max_sequence_length: int
    cuda_graph_max_tokens: int = 0
    cuda_graph_mixed_prefill_count: int = 0

    def token_counts(self, largest: int) -> list[int]:
        """Return numbers of tokens, the largest first: multiples of a multiple of 8, and ``largest``."""
        step = -(-max(1, largest // self.num_cuda_graphs) // 8) * 8
        return [largest, *range(step, largest, step)[::-1]]

    def build(self) -> list[InferenceBatchDimensions]:
        """Return the dimensions in the order of recording: the largest first, so that others fit into their memory."""
        requests, mixed = self.max_requests, self.cuda_graph_mixed_prefill_count
        found = {InferenceBatchDimensions(count, 0, count) for count in self.token_counts(requests)}
        found |= {InferenceBatchDimensions(count, 0, count) for count in (1, 2, 4) if count < requests}
        for size in self.token_counts(self.cuda_graph_max_tokens) if mixed and self.cuda_graph_max_tokens else ():
            few, most = min(mixed, requests), min(size, requests)
            found.add(InferenceBatchDimensions(size, few, most - few))
            least = max(mixed, -(-size // max(1, self.max_sequence_length - 1)))
            if least < requests:
                found.add(InferenceBatchDimensions(size, max(least, most), 0))
        valid = [each for each in found if each.is_valid(requests, self.max_sequence_length)]
        return sorted(valid, key=lambda each: (each.token_count - each.decode_req_count, each.decode_req_count))[::-1]


def with_draft_tokens(
    decodes: Iterable[InferenceBatchDimensions], num_speculative_tokens: int, max_tokens: int
) -> list[InferenceBatchDimensions]:
    """Return dimensions of steps that decode, and of those in which each sequence has so many guesses, too.

    Args:
        decodes: the largest first.
        num_speculative_tokens: most guesses of a sequence.
        max_tokens: of a step with guesses.
    """
    decodes = [*decodes]
    found = [
        InferenceBatchDimensions(each.req_count * (num_speculative_tokens + 1), each.req_count, 0) for each in decodes
    ]
    return [*(each for each in found if each.token_count <= max_tokens), *decodes]


def match_graph_config(
    real: InferenceBatchDimensions, graphs: Iterable[InferenceBatchDimensions], strict: bool = False
) -> InferenceBatchDimensions | None:
    """Return the smallest graph that serves a step; None: none does."""
    return min((each for each in graphs if each.serves(real, strict)), default=None)
