"""Speed of the data pipeline: building of indices, samples, batches, blends, preparation.

Run: ``python benchmarks/data.py``. Times are CPU seconds of one process, which depend little on the machine's load.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megalight.data.blend import blend_index
from megalight.data.gpt.dataset import GPTDataset, SampleOptions, SamplePlan, build, collate
from megalight.data.indexed import IndexedDataset, IndexedWriter
from megalight.data.prepare import prepare
from megalight.data.tokenizer import Tokenizer

TOKENS, DOCUMENT, LENGTH = 10**8, 500, 4096


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    lengths = np.random.default_rng(0).poisson(DOCUMENT, TOKENS // DOCUMENT).astype(np.int32)
    total = int(lengths.sum(dtype=np.int64))
    tokens = np.random.default_rng(1).integers(0, 50_000, total, dtype=np.uint16)
    with IndexedWriter(folder / "a", "uint16") as writer:
        writer.add_documents(tokens, lengths)
    print(f"corpus: {total:,} tokens in {len(lengths):,} documents of about {DOCUMENT}")
    print(f"open: {seconds(lambda: IndexedDataset(folder / 'a')) * 1e3:.1f} ms")
    for epochs in (1, 10):
        plan = SamplePlan.make(total, LENGTH, epochs * (total // LENGTH))
        spent = seconds(lambda plan=plan: build(lengths, range(len(lengths)), plan, 1))
        print(f"indices, {plan.num_epochs} passes, {plan.num_samples:,} samples: {spent:.2f} s")
    for mask in (False, True):
        options = SampleOptions(sequence_length=LENGTH, document_mask=mask)
        dataset = GPTDataset(IndexedDataset(folder / "a"), range(len(lengths)), options)
        spent = seconds(lambda dataset=dataset: [dataset[k] for k in range(5000)])
        print(f"samples of {LENGTH} tokens, document_mask={mask}: {5000 / spent:,.0f}/s, {spent / 5:.4f} ms each")
        rows = [dataset[k] for k in range(16)]
        spent = seconds(lambda rows=rows: [collate(rows) for _ in range(100)])
        print(f"batch of 16 rows from samples: {spent * 10:.2f} ms")
    for name, weights, steps in (
        ("3 decimal", [5, 3, 2], 10**7),
        ("20 token counts", list(range(10**6, 10**6 + 20)), 10**6),
    ):
        spent = seconds(lambda weights=weights, steps=steps: blend_index(weights, steps))
        print(f"blend of {name} weights, {steps:,} samples: {spent:.2f} s")
    paragraph = "def f(x):\n    return x + {0}\n\nA line of prose for the tokenizer, number {0}.\n"
    texts = [paragraph.format(k) * 20 for k in range(3000)]
    for k, text in enumerate(texts):
        (folder / f"{k}.txt").write_text(text)
    tokenizer = Tokenizer.train(texts, 1000)
    tokenizer.save(folder / "t.json")
    size = sum(map(len, texts))
    alone = seconds(lambda: tokenizer.encode_batch(texts))
    spent = seconds(
        lambda: prepare([str(folder / "*.txt")], folder / "p", tokenizer=folder / "t.json", workers=1, progress=False)
    )
    print(f"tokenizer alone: {size / alone / 1e6:.1f} MB per CPU second; prepare: {size / spent / 1e6:.1f}")


if __name__ == "__main__":
    main()
