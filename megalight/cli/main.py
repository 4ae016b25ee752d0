"""The console script ``megalight``: finds the verb and imports only what it needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megalight import __version__
from megalight.cli.report import Parser, debugging, reported, tell
from megalight.cli.verbs import TRAINER_VERBS, VERBS, load
from megalight.errors import nearest

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
        "-c FILE": "a recipe in YAML, or its name (megalight recipes); several stack: later win",
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
        "--model.weights=PATH": "weights to start from, or their name: Qwen/Qwen3-0.6B",
        "--data=CLASS": "GPTDataModule, SFTDataModule, StreamingDataModule, ..., or your import path",
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


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells know it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``megalight``. None: the arguments of this process.

    Returns:
        the exit code: 0 for success, 2 for an error that the user can correct (a message was printed), 130
        after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in words:
        words.remove("--debug")
        os.environ["MEGALIGHT_DEBUG"] = "1"  # an environment variable, so that ranks launched by this process see it
    try:
        # Verbs exit by `SystemExit` where a parser ends them. Callers of this function get a code.
        name, *rest = words or ["--help"]
        return _dispatch(name, rest)
    except KeyboardInterrupt:
        if debugging():
            raise
        tell("megalight", "interrupted.")
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))


def _dispatch(name: str, rest: list[str]) -> int:
    if name in ("-h", "--help"):
        return _show("megalight", _overview())
    if name in ("-V", "--version") and "--verbose" in rest:
        from megalight.cli.verbs.doctor import bug_report  # it looks at every package

        return _show("megalight", bug_report())
    if name in ("-V", "--version"):
        return _show("megalight", f"megalight {__version__}")
    if name in TRAINER_VERBS:
        return _train(name, rest)
    if name not in VERBS:
        known = (*TRAINER_VERBS, *VERBS)
        tell("megalight", f"unknown command {name!r}.{nearest(name, known)} Commands: {', '.join(known)}.")
        return 2
    verb = load(name)
    parser = Parser(
        prog=f"megalight {name}",
        description=verb.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        passed_on=getattr(verb, "PASSED_ON", None),
    )
    verb.add_arguments(parser)
    if parser.passed_on is not None:
        parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} -- -c RECIPE ..."
    # Cut off first: argparse would take options that come after an argument for some of these.
    cut = rest.index("--") if "--" in rest and hasattr(verb, "PASSED_ON") else len(rest)
    arguments = parser.parse_args(rest[:cut])
    arguments.passed_on = rest[cut + 1 :]
    arguments.words = rest
    with reported(parser.prog, OSError):
        if parser.passed_on is not None:
            from megalight.cli.config_args import named_recipes_as_text

            verb.check(arguments)  # type: ignore[attr-defined]  # its own options first: they need no torch
            arguments.passed_on = named_recipes_as_text(arguments.passed_on)
            _check_passed_on(parser, arguments.passed_on)
        return verb.run(arguments)


def _check_passed_on(parser: Parser, words: list[str]) -> None:
    """Check the options after ``--``, as those of the verb that takes them are.

    Raises:
        MegalightError: there are none, or one is wrong.
    """
    from megalight.cli.config_args import check_files
    from megalight.errors import ConfigurationError

    if not words or words[0] in TRAINER_VERBS:
        found = f"{words[0]!r} comes after --, and" if words else "there is nothing after --, where"
        raise ConfigurationError(
            f"{found} the options of megalight {parser.passed_on} alone are expected: {parser.prog} ... -- -c RECIPE"
        )
    check_files(words)


def _train(name: str, rest: list[str]) -> int:
    """Run a verb of the Trainer: first what needs no torch, because importing it takes seconds."""
    if not rest:
        tell(f"megalight {name}", nothing_given(name))
        return 2
    if "-h" in rest or "--help" in rest:
        return _show(f"megalight {name}", short_help(name))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` does: users' modules lie in the working directory
    with reported(f"megalight {name}"):
        from megalight.cli.config_args import check_files, named_recipes_as_text, written_out

        every = "--help-all" in rest
        rest = named_recipes_as_text([word for word in rest if word != "--help-all"])
        rest = written_out(name, rest)
        # Files first: a file that cannot be read would make every later message wrong.
        check_files(rest)
    # Torch and Lightning come in only here, seconds later.
    from megalight.imports import deferred

    with deferred("transformers"):  # seconds more, only for one metric of those that come with Lightning
        import lightning.pytorch  # noqa: F401
    if every:
        from megalight.cli.all_options import page

        return _show(f"megalight {name}", page(name, rest))
    from megalight.cli.lightning import run

    return run([name, *rest])


def _show(prog: str, text: str) -> int:
    with reported(prog):
        print(text, flush=True)
    return 0


def _overview() -> str:
    rows = [*TRAINER_VERBS.items(), *((name, load(name).DESCRIPTION.splitlines()[0]) for name in VERBS)]
    commands = "\n".join(f"  {name:<16} {line}" for name, line in rows)
    return (
        "usage: megalight COMMAND [arguments]\n\n"
        "Train, evaluate and sample language models on any layout of devices, with PyTorch Lightning.\n\n"
        f"commands:\n{commands}\n\n"
        "  megalight COMMAND --help   the arguments of one command\n"
        "  megalight --version        the version; with --verbose, the page for a report of a bug\n"
        "  --debug                    (any command) show the traceback of an error"
    )
