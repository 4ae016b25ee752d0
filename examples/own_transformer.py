"""Your own language model in every layout: tensors, sequences, pipeline stages, contexts and replicas.

python examples/own_transformer.py --devices 2 --tensor-parallel 2 --sequence-parallel
python examples/own_transformer.py --devices 2 --pipeline-parallel 2 --virtual-pipeline 2
python examples/own_transformer.py --devices 2 --context-parallel 2
python examples/own_transformer.py --devices 2 --level optim_grads_params
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalight.models.batches import pack
from megalight.models.module import Carry, MegalightModule
from megalight.nn import InnerAttention, Linear, LMHead
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, ContextRegion, Row, SequenceRegion, Vocab, VocabHeadStyle
from megalight.strategies import DataParallelOptions, MegatronStrategy
from megalight.types import Loss, PackedSequences, TokenBatch

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 64, 64, 4, 32, 4


class Embed(nn.Module):
    """A vector for each word and one for each position. Batches lie end to end: ``[T]`` tokens, ``[T, h]`` vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.word(tokens) + self.position(positions)


class Layer(nn.Module):
    """Attention and an MLP side by side, of the same normed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.attention = InnerAttention()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        x = self.norm(hidden)
        # As many heads as this rank has: no word of ranks here.
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v))
        attended = self.attention(q, k, v, sequences).flatten(-2)
        return hidden + self.proj(attended) + self.down(torch.relu(self.up(x)).square())


class Model(nn.Module):
    """``embed | layers | head``. A pipeline stage lacks one end or both, and holds some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = Embed()
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(LAYERS)})
        self.head: nn.Module | None = LMHead(nn.LayerNorm(WIDTH), Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor, labels: Tensor, sequences: PackedSequences, hidden: Tensor | None) -> Tensor:
        """Ids ``[T]`` and what the stage before returned to hidden states ``[T, h]``, at the end to losses ``[T]``."""
        if self.embed is not None:
            hidden = self.embed(tokens, sequences.positions)
        for layer in self.layers.values():
            hidden = layer(hidden, sequences)
        return hidden if self.head is None else self.head(hidden, labels)


PLAN = ParallelizePlan(
    {
        "embed.word": Vocab(),
        "embed.position": SequenceRegion(split_input=True),
        "*.[qkv]": Column(),
        "*.attention": ContextRegion(),
        "*.proj": Row(),
        "*.up": Column(),
        "*.down": Row(),
        "head": VocabHeadStyle(),
        nn.LayerNorm: SequenceRegion(),
    }
)


class LanguageModel(MegalightModule):
    """The contract: build the model, run it, sum the losses, count the tokens."""

    def build_model(self) -> nn.Module:
        return Model()

    def plan(self, model: nn.Module) -> ParallelizePlan:
        return PLAN

    def forward_step(self, model: nn.Module, batch: TokenBatch, carry: Carry | None = None) -> Carry:
        # Sequence parallelism gives each rank equally many tokens, so there may be padding at the end.
        sequences = batch.sequences.pad_to(self.token_multiple)
        tokens, labels = (pack(rows, sequences, 0) for rows in (batch.tokens, batch.labels))
        return {"output": model(tokens, labels, sequences, carry["output"] if carry else None)}

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        mask = batch.loss_mask.flatten()
        return Loss(sum=(carry["output"][: len(mask)] * mask).sum())

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        return batch.loss_mask.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def collate(samples: list[tuple[Tensor]]) -> TokenBatch:
    rows = torch.stack([row for (row,) in samples])
    return TokenBatch(rows[:, :-1], rows[:, 1:], torch.ones(len(rows), LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    for degree in ("tensor", "pipeline", "context"):
        parser.add_argument(f"--{degree}-parallel", type=int, default=1)
    parser.add_argument("--virtual-pipeline", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--level", default="optim", help="what data parallelism shards")
    options = vars(parser.parse_args())
    pl.seed_everything(0)
    starts, strides = torch.randint(VOCABULARY, (512, 1)), torch.randint(1, 4, (512, 1))
    data = TensorDataset((starts + strides * torch.arange(LENGTH + 1)) % VOCABULARY)  # counting in ones, twos or threes
    trainer = pl.Trainer(
        accelerator=options.pop("accelerator"),
        devices=options.pop("devices"),
        strategy=MegatronStrategy(
            micro_batch_size=8, data_parallel=DataParallelOptions(level=options.pop("level")), **options
        ),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loaders = DataLoader(data, 32, shuffle=True, collate_fn=collate), DataLoader(data, 128, collate_fn=collate)
    trainer.fit(LanguageModel(), *loaders)
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")


if __name__ == "__main__":
    main()
