"""``megalight evaluate CKPT --tasks NAME ...``: score a model on tasks of ``lm-eval``."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalight.cli.processes import add_layout_arguments, check_ranks, text_generator
from megalight.cli.verbs import add_model_arguments
from megalight.errors import ConfigurationError
from megalight.imports import require

DESCRIPTION = (
    "score a model on tasks of lm-eval (MMLU, GSM8K ..., or your own)\n\n"
    "Under torchrun, --tensor-parallel and --pipeline-parallel divide the model; further processes are replicas,\n"
    "which share the questions. Scores do not depend on the layout."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        nargs="?",
        help="a checkpoint, a run's folder (its newest one), a folder of transformers, or a name of the Hugging Face "
        "Hub; also s3://...",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tasks, groups, patterns such as mmlu_*, or YAML files; also with commas",
    )
    parser.add_argument("--list-tasks", action="store_true", help="print the names of all tasks and stop")
    parser.add_argument("--include-path", metavar="FOLDER", help="a folder with tasks of your own")
    parser.add_argument(
        "-f", "--num-fewshot", type=int, help="examples before each question (default: as each task says)"
    )
    parser.add_argument("-L", "--limit", type=float, help="questions of each task; below 1: this part of them")
    parser.add_argument("--apply-chat-template", action="store_true", help="ask as a user, with the chat template")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file (default: the tokenizer's template)")
    parser.add_argument("--system-instruction", metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--gen-kwargs",
        metavar="KEY=VALUE,...",
        help="options of generation, which win over those of the tasks: do_sample=true,temperature=0.7,max_gen_toks=64",
    )
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write the results as JSON")
    parser.add_argument("--log-samples", action="store_true", help="of --out: with every question and answer")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a forward pass (default: 4096)")
    parser.add_argument("--max-sequences", type=int, default=64, help="answers generated at a time (default: 64)")
    parser.add_argument("--max-length", type=int, help="tokens the model reads at most (default: its longest sequence)")
    parser.add_argument(
        "--bootstrap-iters",
        type=int,
        default=100_000,
        help="samples for the standard errors of metrics without a formula for them; 0: none (default: 100000)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the choice of examples (default: 1234)")
    add_model_arguments(parser)
    add_layout_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table of scores."""
    require("lm_eval", "megalight evaluate")
    if arguments.list_tasks:
        from megalight.evaluation.lm import Tasks

        print("\n".join(Tasks(include_path=arguments.include_path).all_tasks))
        return 0
    names = [name for word in arguments.tasks for name in word.split(",") if name]
    if arguments.checkpoint is None or not names:
        raise ConfigurationError(
            "a model and its tasks are expected: megalight evaluate CKPT --tasks hellaswag. `megalight evaluate "
            "--list-tasks` lists the tasks."
        )
    if arguments.log_samples and arguments.out is None:
        raise ConfigurationError("--log-samples writes to the file of --out; give --out, too.")
    from megalight.cli.checkpoints import model_paths
    from megalight.data.chat.template import read_template

    path, tokenizer, base = model_paths(arguments)
    template = None if arguments.chat_template is None else read_template(arguments.chat_template)
    if template is not None and not arguments.apply_chat_template:
        raise ConfigurationError("--chat-template is the form of a conversation; add --apply-chat-template.")
    check_ranks(arguments, replicas=True)

    from megalight.evaluation import lm as runs  # after the checks: importing torch takes seconds

    options = runs.EvaluationOptions(
        tasks=names,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        include_path=arguments.include_path,
        gen_kwargs=None if arguments.gen_kwargs is None else runs.parse_gen_kwargs(arguments.gen_kwargs),
        apply_chat_template=arguments.apply_chat_template,
        system_instruction=arguments.system_instruction,
        log_samples=arguments.log_samples,
        bootstrap_iters=arguments.bootstrap_iters,
        seed=arguments.seed,
    )
    # Before the weights: an unknown task then raises at once.
    runs.Tasks.having(names, options.include_path).names(names)
    text, prints = text_generator(arguments, path, tokenizer, base)
    lm = runs.MegalightLM(
        text,
        batch_tokens=arguments.batch_tokens,
        max_sequences=arguments.max_sequences,
        max_length=arguments.max_length,
        chat_template=template,
    )
    results = runs.evaluate(lm, options)
    if prints:
        results["config"]["model_args"] = {"checkpoint": str(path)}
        print(runs.table(results))
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(runs.as_json(results) + "\n", encoding="utf-8")
    return 0
