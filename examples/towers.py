"""A vision tower and a language model in layouts of their own learn to name the color of pictures.

torchrun --nproc-per-node 2 examples/towers.py --tower-tensor-parallel 2
torchrun --nproc-per-node 4 examples/towers.py --placement disjoint --tower-ranks 2 --tower-tensor-parallel 2

In the first line both models share two ranks: a tensor-parallel tower and two replicas of the language model. In the
second line two tensor-parallel ranks read the pictures of two replicas of the language model on other ranks. The losses
are those of the first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megalight.data.multimodal.batch import ImageTextBatch, with_cuts
from megalight.data.multimodal.resolution import form_of
from megalight.models.gpt import GPTConfig
from megalight.models.vision import VisionConfig
from megalight.models.vlm import VLMConfig
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import end_at_exit
from megalight.towers import TowersTraining
from megalight.types import TokenBatch

COLORS = [(220, 30, 30), (30, 200, 30), (30, 30, 220), (230, 220, 40)]
IMAGE, QUESTION, FIRST = 0, 1, 2
"""Tokens: a part of a picture, the question, and the first of the answers, one for each color."""
ROWS, STEPS = 8, 60

CONFIG = VLMConfig(
    language=GPTConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=8, max_sequence_length=8),
    vision=VisionConfig(num_layers=1, hidden_size=16, num_heads=2, image_size=8, patch_size=4),
    image_token=IMAGE,
)


def batch(step: int) -> ImageTextBatch:
    """The global batch of a step: a picture, the question, and its answer in each row."""
    random, form = np.random.default_rng(step), form_of(CONFIG)
    answers = random.integers(0, len(COLORS), ROWS)
    noise = random.integers(-25, 25, (ROWS, 8, 8, 3))
    pictures = [np.clip(np.array(COLORS[a]) + n, 0, 255).astype(np.uint8) for a, n in zip(answers, noise, strict=True)]
    cuts = [[form.divided(picture)] for picture in pictures]
    tokens = torch.tensor([[IMAGE] * CONFIG.image_tokens + [QUESTION]] * ROWS)
    labels, mask = torch.zeros_like(tokens), torch.zeros(tokens.shape)
    labels[:, -1], mask[:, -1] = torch.from_numpy(answers) + FIRST, 1
    return with_cuts(TokenBatch(tokens, labels, mask), cuts, IMAGE, form)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placement", choices=("colocated", "disjoint"), default="colocated")
    parser.add_argument("--tower-ranks", type=int, default=1, help="of a disjoint tower")
    parser.add_argument("--tower-tensor-parallel", type=int, default=1)
    parser.add_argument("--accelerator", choices=("auto", "cpu"), default="auto")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start it by torchrun: each layout has several processes")
    cuda = options.accelerator == "auto" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    end_at_exit()
    language, tower = Layout(), Layout(tensor_parallel=options.tower_tensor_parallel)
    if options.placement == "disjoint":
        language = replace(language, ranks=dist.get_world_size() - options.tower_ranks)
        tower = replace(tower, ranks=options.tower_ranks)
    run = TowersTraining(
        CONFIG, tower=tower, language=language, placement=options.placement, optimizer=adam, device=device
    )
    losses = []
    for step in range(STEPS):
        shares = batch(step).to(device).split(ROWS // run.placed.language.dp)
        loss = run.forward_backward(lambda replica, shares=shares: shares[replica].split(4))  # type: ignore[misc]
        losses.append(float(loss))
        run.clip_grad_norm(1.0)
        run.optimizer.step()
    if dist.get_rank() == 0:
        print(f"losses: {losses[0]:.4f} {losses[4]:.4f} ... {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
