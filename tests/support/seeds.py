"""Import this where there is no GPU: ``torch.manual_seed`` seeds the CPU's generator alone.

torch's own also notes for three kinds of GPU what to do if one is ever used, and from where: it formats the whole stack
of calls each time. In tests that takes milliseconds, in every rank and for every Trainer.
"""

from __future__ import annotations

import torch


def _seed(seed: int) -> torch.Generator:
    return torch.default_generator.manual_seed(int(seed))


torch.manual_seed = torch.random.manual_seed = _seed
