"""The short help of the Trainer's commands. It imports nothing, so that it is there at once."""

from __future__ import annotations

from pathlib import Path

from megalight.cli.verbs import TRAINER_VERBS

DEMO, MINE = "recipes/demo.yaml", "mine.yaml"
"""A recipe of the repository, and what it is called where there is none."""

START = (
    "prepare FOLDER_OF_TEXT --output data/text --train-tokenizer --vocab-size 4096",
    f"recipes gpt2_medium-pretrain-1xGPU > {MINE}",
)
"""Where there is no recipe: commands that make data and one."""

EXAMPLES = {
    "fit": "--trainer.max_steps=100",
    "validate": "--ckpt_path=last",
    "test": "--ckpt_path=last",
    "predict": "--ckpt_path=last",
}

OPTIONS: dict[str, dict[str, str]] = {
    "configuration": {
        "-c FILE": "a recipe in YAML; give several to stack them: later values win",
        "--print_config": "print the complete configuration and stop",
        "--export_hf=FOLDER": "write the trained model for transformers when training ends",
        "--ckpt_path=PATH": "a checkpoint, or a run's folder: its newest one. last: the newest of all runs",
        "--resume.optimizer=saved": "keep the checkpoint's learning rate and others (default: what is given wins)",
        "--seed_everything=N": "seed of all random numbers (default: 1234)",
    },
    "trainer": {
        "--trainer.devices=N": "devices on this machine (default: all)",
        "--trainer.num_nodes=N": "machines (default: 1)",
        "--trainer.accelerator=NAME": "cpu, gpu ... (default: what there is)",
        "--trainer.precision=NAME": "32-true (default), bf16-mixed, 16-mixed ...",
        "--trainer.max_steps=N": "optimizer steps",
        "--trainer.gradient_clip_val=X": "largest norm of the gradient",
        "--trainer.accumulate_grad_batches=N": "global batches per optimizer step (default: 1)",
        "--trainer.val_check_interval=N": "batches between validations",
        "--trainer.log_every_n_steps=N": "steps between rows of the log (default: 50)",
        "--trainer.default_root_dir=PATH": "folder of logs and checkpoints (default: this one)",
    },
    "parallelism": {
        "--trainer.strategy=NAME": "megatron (default), auto, ddp, fsdp ...",
        "--trainer.strategy.tensor_parallel=N": "devices that share every layer",
        "--trainer.strategy.sequence_parallel=true": "they also share the activations between layers",
        "--trainer.strategy.pipeline_parallel=N": "stages of layers",
        "--trainer.strategy.context_parallel=N": "devices that share every sequence",
        "--trainer.strategy.expert_parallel=N": "devices that share the experts",
        "--trainer.strategy.micro_batch_size=N": "samples that pass the model at once, or auto",
    },
    "model and data": {
        "--model=CLASS": "GPTModule, BertModule, or the import path of yours",
        "--model.config=PRESET": "a named model, such as llama3_8b",
        "--model.config.num_layers=N": "any field of the model's configuration",
        "--model.optimizer.lr=X": "learning rate",
        "--model.weights=PATH": "weights to start from",
        "--data=CLASS": "GPTDataModule, BertDataModule, SFTDataModule, PromptDataModule, or your import path",
        "--data.data=PREFIX": "token files of megalight prepare",
        "--data.global_batch_size=N": "samples per batch, over all devices",
        "--data.sequence_length=N": "tokens per sample",
    },
}
"""Section -> option -> meaning. A test holds the names to the full parser's."""

ONLY_FIT = ("max_steps", "clip_val", "accumulate", "check_interval", "optimizer", "export_hf")


def short_help(verb: str) -> str:
    """Return the help page of ``fit``, ``validate``, ``test`` or ``predict``."""
    lines = [
        f"usage: megalight {verb} -c FILE [-c FILE ...] [--KEY=VALUE ...]",
        "",
        f"{TRAINER_VERBS[verb]}, for example:",
        *example(verb),
    ]
    for section, options in OPTIONS.items():
        lines += ["", f"{section}:"]
        for option, meaning in options.items():
            # Evaluation has no optimizer steps.
            if verb == "fit" or not any(word in option for word in ONLY_FIT):
                lines.append(f"  {option:<43} {meaning}")
    return "\n".join([*lines, "", f"megalight {verb} --help-all shows every option; docs/commands.md explains."])


def nothing_given(verb: str) -> str:
    """Return the message for a verb without a model."""
    shown = "\n".join(example(verb))
    return f"a model and data are missing. Type, for example:\n{shown}\nSee: megalight {verb} --help"


def example(verb: str) -> list[str]:
    """Return lines with commands for the working directory, indented."""
    here = Path(DEMO).is_file()
    lines = [] if here or verb != "fit" else START
    return [f"  megalight {line}" for line in (*lines, f"{verb} -c {DEMO if here else MINE} {EXAMPLES[verb]}")]
