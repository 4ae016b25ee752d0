"""A GPT on real text, all from Python: token files, data, model, strategy, and what the trained model writes.

    python examples/gpt_from_python.py --devices 2 --tensor-parallel 2

The text is the source of one package of Python's own library, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.data.gpt.module import GPTDataModule
from megalight.data.prepare import prepare
from megalight.inference import TextGenerator
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.optim import AdamConfig
from megalight.strategies import MegatronStrategy

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=192,
    vocab_size=512,
    max_sequence_length=64,
    tie_embeddings=True,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/gpt_from_python"))
    options = parser.parse_args()
    corpus = options.output / "corpus"
    if not corpus.with_suffix(".json").exists():  # the processes that fit() starts run this script as well
        sources = [str(path) for path in Path(json.__file__).parent.glob("*.py")]
        prepare(sources, str(corpus), train_tokenizer=True, vocab_size=CONFIG.vocab_size, workers=1, progress=False)
    data = GPTDataModule(data=str(corpus), split="80,20,0", global_batch_size=8, sequence_length=64)
    module = GPTModule(CONFIG, optimizer=AdamConfig(lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1))
    checkpoints = ModelCheckpoint(dirpath=options.output / "checkpoints", save_last=True, every_n_train_steps=20)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=MegatronStrategy(
            tensor_parallel=options.tensor_parallel,
            sequence_parallel=options.tensor_parallel > 1,
            micro_batch_size=4,
        ),
        max_steps=options.steps,
        val_check_interval=options.steps,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints],
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        print(f"validation loss: {float(trainer.callback_metrics['val_loss']):.5f}")
        writer = TextGenerator.from_checkpoint(checkpoints.last_model_path)
        print(writer.complete(["def "], max_new_tokens=24, temperature=0.5, seed=1)[0])


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
    main()
