"""A replica: a model with its engine, which the coordinator drives. Start one for each GPU.

CUDA_VISIBLE_DEVICES=0 python examples/replicas/replica.py runs/first ENDPOINT &
CUDA_VISIBLE_DEVICES=1 python examples/replicas/replica.py runs/first ENDPOINT &
"""

from __future__ import annotations

import asyncio
import sys

from megalight.serving import LLM
from megalight.serving.engine_worker import EngineWorker

if __name__ == "__main__":
    checkpoint, endpoint = sys.argv[1:]
    asyncio.run(EngineWorker(LLM(checkpoint).served.loop, endpoint).run())
