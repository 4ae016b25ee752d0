"""Compare a student that learns from the demo's teacher with the same student trained alone, on the same batches.

    make demo
    python benchmarks/distillation.py RESULT.json [--demo runs/demo] [--steps 200] [--curves runs/curves]
    megalight plot runs/curves/* --metric val_loss --output docs/assets/distillation.svg

Both are the model of recipes/distill.yaml, with equal initial values. The validation loss is the cross entropy of the
same held-out text. The exit code is 0 if the last one of the distilled student is lower.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight.callbacks import Distillation
from megalight.data.gpt.module import GPTDataModule
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.optim import AdamConfig, Constant
from megalight.strategies import MegatronStrategy

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
LOSSES: dict[str, dict[str, Any] | None] = {"alone": None, "distilled": {"own_loss": True}}


class Curve(pl.Callback):
    """Keeps the validation losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def train(loss: dict[str, Any] | None, demo: Path, steps: int, every: int) -> list[float]:
    """Train the student, and return its validation losses."""
    recipes = [yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8")) for name in ("demo", "distill")]
    base, changed = (recipe["model"]["init_args"] for recipe in recipes)
    adam = {key: value for key, value in base["optimizer"].items() if key != "schedule"}
    warmup = base["optimizer"]["schedule"]["init_args"]["warmup"]
    pl.seed_everything(recipes[0]["seed_everything"], verbose=False)
    module = GPTModule(
        GPTConfig.from_dict(base["config"] | changed["config"]),
        AdamConfig(**{**adam, "betas": tuple(adam["betas"])}, schedule=Constant(warmup=warmup)),
    )
    data = GPTDataModule(
        data=str(demo / "data" / "stdlib"),
        tokenizer=str(demo / "data" / "stdlib.tokenizer.json"),
        **{key: value for key, value in recipes[0]["data"]["init_args"].items() if key not in ("data", "tokenizer")},
    )
    curve, teacher = Curve(), demo / "checkpoints" / "last.ckpt"
    trainer = pl.Trainer(
        strategy=MegatronStrategy(micro_batch_size=8),
        devices=1,
        max_steps=steps,
        val_check_interval=every,
        limit_val_batches=recipes[0]["trainer"]["limit_val_batches"],
        num_sanity_val_steps=0,
        gradient_clip_val=recipes[0]["trainer"]["gradient_clip_val"],
        callbacks=[curve, *([] if loss is None else [Distillation(teacher, **loss)])],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return curve.losses


def write_curves(folder: Path, about: dict[str, Any]) -> None:
    """Write the losses of each run as Lightning's CSVLogger does, which counts steps from 0."""
    for name, run in about["runs"].items():
        rows = [f"{step - 1},{loss}" for step, loss in zip(about["steps"], run["val_losses"], strict=True)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "metrics.csv").write_text("\n".join(["step,val_loss", *rows, ""]), encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="folder of a finished demo run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between validations")
    parser.add_argument("--curves", type=Path, help="folder for the losses of both runs, for `megalight plot`")
    arguments = parser.parse_args(words)
    about: dict[str, Any] = {
        "command": f"python benchmarks/distillation.py RESULT.json --steps {arguments.steps} --every {arguments.every}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "steps": [*range(arguments.every, arguments.steps + 1, arguments.every)],
        "runs": {},
    }
    for name, loss in LOSSES.items():
        losses = train(loss, arguments.demo, arguments.steps, arguments.every)
        about["runs"][name] = {"val_losses": losses}
        print(f"{name:10} {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
        arguments.result.write_text(json.dumps(about) + "\n", encoding="utf-8")
    if arguments.curves is not None:
        write_curves(arguments.curves, about)
    final = {name: run["val_losses"][-1] for name, run in about["runs"].items()}
    return 0 if final["distilled"] < final["alone"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
