"""A client: it waits for two replicas, lets them complete prompts together, and ends all.

python examples/replicas/client.py ENDPOINT runs/first "def read(" "import "
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.inference.text import tokenizer_of
from megalight.serving import EngineRequest
from megalight.serving.inference_client import InferenceClient


async def main(endpoint: str, checkpoint: str, prompts: Sequence[str]) -> None:
    """Print each completion when it has ended."""
    tokenizer = tokenizer_of(latest_checkpoint(checkpoint))

    async def complete(client: InferenceClient, number: int, prompt: str) -> None:
        ids, ends = tokenizer.encode(prompt), [] if tokenizer.eod_id is None else [tokenizer.eod_id]
        request = EngineRequest(id=str(number), prompt=ids, max_new_tokens=32, ends=ends, seed=number)
        text = "".join([output.text async for output in client.submit(request)])
        print(f"{prompt!r} -> {text!r}", flush=True)

    async with InferenceClient(endpoint) as client:
        while len(client.engines) < 2:
            await asyncio.sleep(0.1)
        await asyncio.gather(*(complete(client, number, prompt) for number, prompt in enumerate(prompts)))
        await client.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
