"""Attention and whole models under context parallelism beside one device, in float64."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.gpt.plan import gpt_plan
from megalight.nn import InnerAttention
from megalight.nn.init import initialize
from megalight.parallel.apply import parallelize, whole_tokens
from megalight.parallel.context.attention import ContextAttention, ContextOptions
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh
from megalight.types import PackedSequences, TokenBatch
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import BASE, canonical, jitter

GARBAGE = 1e3
"""What padding holds: it must not show anywhere."""


Case = tuple[list[int], tuple[int, int], dict]
"""Lengths, query and key heads, options of attention."""


def attention_errors(kind: str, cases: list[Case], inner: int | None = None, multiple: int = 1) -> dict[str, float]:
    """Output and gradients of one attention over all ranks of the world, and what padding got, case by case."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    groups = ContextGroups(ParallelMesh(cp, rank, cp=cp), inner)
    errors: dict[str, float] = {}
    for case in cases:
        found = _attention_errors(kind, case, groups, multiple)
        errors |= {f"{name} {case}": error for name, error in found.items()}
    return errors


def _attention_errors(kind: str, case: Case, groups: ContextGroups, multiple: int) -> dict[str, float]:
    lengths, heads, options = case
    generator = torch.Generator().manual_seed(7)
    sequences = PackedSequences.of_lengths(lengths)
    shapes = [(heads[0], 6), (heads[1], 6), (heads[1], 5), (heads[0], 5)]  # values are narrower than keys
    q, k, v, weight = (
        torch.randn((sequences.num_tokens, *shape), generator=generator, dtype=torch.float64) for shape in shapes
    )
    module = InnerAttention(**options)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = module(*whole, sequences)
    (wanted * weight).sum().backward()

    share, index = sequences.zigzag(groups.mesh.rank("cp"), groups.mesh.cp, multiple)
    real = index >= 0
    local = [x[index.clamp(min=0)] for x in (q, k, v, weight)]
    for x, filler in zip(local, (GARBAGE, GARBAGE, GARBAGE, 0.0), strict=True):
        x[~real] = filler
    mine = [x.requires_grad_() for x in local[:3]]
    out = ContextAttention(module, "attention", kind, groups)(*mine, share)
    (out * local[3]).sum().backward()
    errors = {"out": relative_error(out[real], wanted[index[real]])}
    for name, x, reference in zip("qkv", mine, whole, strict=True):
        errors[f"d{name}"] = relative_error(x.grad[real], reference.grad[index[real]])
        errors[f"d{name} of padding"] = float(x.grad[~real].abs().sum())
    return errors


def rows(batch: int, length: int, documents: tuple[tuple[int, ...], ...] | None, vocab: int) -> TokenBatch:
    """Random tokens, labels, and a mask with holes."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(vocab, (batch, length), generator=generator) for _ in range(2))
    mask = (torch.rand(batch, length, generator=generator) > 0.2).double()
    return TokenBatch(tokens, labels, mask, documents)


def gpt_errors(
    context: ContextOptions, tp: int, sequence_parallel: bool, options: dict, batch: tuple, causal: bool = True
) -> dict[str, float]:
    """Mean loss and gradients of a small GPT over ``cp = world / tp``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = ParallelMesh(world, rank, tp=tp, cp=world // tp)
    config = GPTConfig(**{**BASE, **options})
    module = GPTModule(config)
    whole = module.build_model().double()
    initialize(whole, 3)
    jitter(whole)
    for part in whole.modules():
        if isinstance(part, InnerAttention):
            part.causal = causal
    model = copy.deepcopy(whole)
    specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel, context=context)
    model = copy.deepcopy(model)  # a parallel model can be copied
    tokens = rows(*batch, config.vocab_size)

    def loss(one: nn.Module, batch: TokenBatch, count: torch.Tensor) -> torch.Tensor:
        total = module.loss_step(module.forward_step(one, batch), batch).sum / count
        total.backward()
        return total.detach()

    count = module.loss_tokens(tokens)
    wanted = loss(whole, tokens, count)
    module.token_multiple = tp if sequence_parallel else 1
    share = module.context_share(tokens, mesh.rank("cp"), mesh.cp)
    mine = module.loss_tokens(share)
    dist.all_reduce(mine, group=mesh.group("cp"))
    assert mine == count
    found = loss(model, share, count)
    for tensor in (found, *(p.grad for p in model.parameters())):
        dist.all_reduce(tensor, group=mesh.group("cp"))
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters()}, specs, mesh)
    reference = canonical(whole, {n: p.grad for n, p in whole.named_parameters()})
    assert grads.keys() == reference.keys()
    errors = {"loss": relative_error(found, wanted)}
    with torch.no_grad(), whole_tokens(model):  # whole sequences, as in generation
        ids, alone = tokens.tokens[0, :3], PackedSequences.of_lengths([3])
        errors["logits"] = relative_error(model(ids, alone).logits, whole(ids, alone).logits)
    return errors | {name: relative_error(grads[name], reference[name]) for name in grads}


def check(answers: list[dict[str, float]]) -> None:
    """Every rank's errors are below the bound."""
    for errors in answers:
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong
