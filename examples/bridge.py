"""Two models on ranks of their own: a small vision tower sends its features over a bridge to a decoder.

python examples/bridge.py
torchrun --nproc-per-node 4 examples/bridge.py --encoder-ranks 2 --decoder-tensor-parallel 2

The second line encodes on two data-parallel replicas and decodes on two tensor-parallel ranks, with the loss of the
first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.parallel.apply import parallelize
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.mesh import ParallelMesh, end_at_exit
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Row

PATCHES, PIXELS, HIDDEN = 16, 9, 32
BATCH, STEPS = 32, 150


class Perceptron(nn.Module):
    """Two layers around the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.leave = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(torch.relu(self.enter(x)))


class Encoder(nn.Module):
    """Images as patches ``[rows, patches, pixels]`` to features ``[rows, patches, h]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, HIDDEN)
        self.mlp = Perceptron()

    def forward(self, images: Tensor) -> Tensor:
        return self.mlp(self.embed(images))


class Decoder(nn.Module):
    """Features to one logit per patch ``[rows, patches]``: is this the patch that was asked for?"""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Perceptron()
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.mlp(features)).squeeze(-1)


PLAN = ParallelizePlan({"mlp.enter": Column(), "mlp.leave": Row()})


def batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches; the label is the patch whose pixels vary most."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS + 1):
        labels = torch.randint(PATCHES, (BATCH,), generator=generator)
        images = torch.randn(BATCH, PATCHES, PIXELS, generator=generator)
        images[torch.arange(BATCH), labels] *= 3
        yield images.to(device), labels.to(device)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """This replica's term of the mean over the global batch."""
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / BATCH


def one_device(device: torch.device) -> float:
    """Both models in one process: what the parallel run must be equal to."""
    torch.manual_seed(0)
    encoder, decoder = Encoder().to(device), Decoder().to(device)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    for images, labels in batches(device):
        optimizer.step()  # of the batch before; the last batch is for validation
        optimizer.zero_grad()
        loss = mean_loss(decoder(encoder(images)), labels)
        loss.backward()
    return float(loss.detach())


def encode(bridge: BridgeCommunicator, encoder: nn.Module, images: Tensor, labels: Tensor) -> None:
    """This replica's rows go over the bridge, with their labels; gradients come back."""
    mesh = bridge.src_mesh
    mine = slice(mesh.rank("dp") * BATCH // mesh.dp, (mesh.rank("dp") + 1) * BATCH // mesh.dp)
    bridge.send_forward({"features": encoder(images[mine]), "labels": labels[mine]})
    bridge.backward()


def decode(bridge: BridgeCommunicator, decoder: nn.Module) -> Tensor:
    """Whatever rows the bridge brings."""
    message = bridge.recv_forward()
    loss = mean_loss(decoder(message["features"]), message["labels"])
    loss.backward()
    bridge.send_backward()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder-ranks", type=int, default=1)
    parser.add_argument("--encoder-tensor-parallel", type=int, default=1)
    parser.add_argument("--decoder-tensor-parallel", type=int, default=1)
    parser.add_argument("--accelerator", choices=("auto", "cpu"), default="auto")
    options = parser.parse_args()
    cuda = options.accelerator == "auto" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        print(f"validation loss: {one_device(device):.5f}")
        return
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    end_at_exit()
    rank, count = dist.get_rank(), options.encoder_ranks
    encoders = ParallelMesh(count, rank, tp=options.encoder_tensor_parallel, offset=0)
    decoders = ParallelMesh(world_size - count, rank, tp=options.decoder_tensor_parallel, offset=count)
    bridge = BridgeCommunicator(encoders, decoders)
    torch.manual_seed(0)
    encoder, decoder = Encoder().to(device), Decoder().to(device)
    model, mesh = (encoder, encoders) if bridge.is_source else (decoder, decoders)
    parallelize(model, PLAN, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros((), device=device)
    for images, labels in batches(device):
        optimizer.step()
        optimizer.zero_grad()
        if bridge.is_source:
            encode(bridge, encoder, images, labels)
        else:
            loss = decode(bridge, decoder)
        bridge.finish()
        if (replicas := mesh.group("dp")) is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=replicas)
    if bridge.is_destination and (replicas := decoders.group("dp")) is not None:
        dist.all_reduce(loss, group=replicas)
    if rank == count:
        print(f"validation loss: {float(loss):.5f}")


if __name__ == "__main__":
    main()
