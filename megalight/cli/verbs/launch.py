"""``megalight launch --slurm|--torchrun -- fit ...``: print a script that starts a run on several machines."""

from __future__ import annotations

import argparse
import re
import shlex

from megalight.cli.report import PREEMPTED

TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
"""The forms of a time limit that ``sbatch`` takes."""


DESCRIPTION = "print a SLURM or torchrun script: megalight launch --slurm -- fit -c mine.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--slurm", action="store_true", help="a job script for sbatch, which is requeued and resumes")
    which.add_argument("--torchrun", action="store_true", help="a script to run on every machine")
    parser.add_argument("--nodes", type=int, help="machines (default: trainer.num_nodes, or 1)")
    parser.add_argument("--gpus", type=int, help="GPUs of each machine (default: trainer.devices, or 8)")
    parser.add_argument("--time", default="24:00:00", help="time limit of the job (default: 24:00:00)")
    parser.add_argument("--grace", type=int, default=300, help="seconds from the signal to the end (default: 300)")
    parser.add_argument("--partition", help="partition of the cluster")
    parser.add_argument("--name", default="megalight", help="name of the job (default: megalight)")
    parser.add_argument("command", nargs="+", metavar="-- fit ...", help="the command, after --")
    # argparse names what comes several times twice.
    parser.usage = parser.format_usage().removeprefix("usage: ").replace(" [-- fit ... ...]", "")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from megalight.cli.config_args import check_files
    from megalight.cli.verbs import TRAINER_VERBS
    from megalight.errors import ConfigurationError, integer, nearest

    verb = arguments.command[0]
    if "--" in arguments.command:
        raise ConfigurationError("there are several commands after --, and a script runs one; make a script for each.")
    if verb not in TRAINER_VERBS:
        raise ConfigurationError(
            f"{verb!r} is not run on several machines.{nearest(verb, TRAINER_VERBS)} After --, give "
            f"{', '.join(TRAINER_VERBS)} and its options."
        )
    # Here, and not when the job has waited for its machines.
    check_files(arguments.command)
    _count(arguments)
    for name in ("nodes", "gpus", "grace"):
        integer(f"--{name}", getattr(arguments, name))
    if not TIME.fullmatch(arguments.time):
        raise ConfigurationError(
            f"--time is {arguments.time!r}; SLURM takes minutes, hours:minutes:seconds or days-hours, such as 90, "
            "24:00:00 or 2-12."
        )
    own = ("--slurm", "--torchrun", "--nodes", "--gpus", "--time", "--grace", "--partition", "--name")
    if misplaced := [word for word in arguments.command if word.partition("=")[0] in own]:
        raise ConfigurationError(
            f"{misplaced[0]!r} comes after --, among the options of {verb}, which has no such one. Put it before --."
        )
    print((slurm if arguments.slurm else torchrun)(arguments), end="")
    return 0


def _count(arguments: argparse.Namespace) -> None:
    """Take the numbers of machines and GPUs from the command, where they are not given.

    Raises:
        ConfigurationError: an option of the command gives another number.
    """
    from megalight.cli.config_args import ConfigArgs
    from megalight.errors import ConfigurationError

    words = arguments.command[1:]
    values = ConfigArgs.read(words).values
    for name, key, usual in (("nodes", "trainer.num_nodes", 1), ("gpus", "trainer.devices", 8)):
        given, value = getattr(arguments, name), str(values.get(key))
        # "auto", -1 and lists say nothing about another machine.
        counted = value.isdecimal() and int(value) > 0
        typed = any(word.partition("=")[0] == f"--{key}" for word in words)
        if given is not None and typed and counted and int(value) != given:
            raise ConfigurationError(f"--{name} is {given}, and --{key} of the command is {value}; leave one out.")
        if given is None:
            setattr(arguments, name, int(value) if counted else usual)


def slurm(arguments: argparse.Namespace) -> str:
    """Return a job script. SLURM signals it before the time limit; it saves, is requeued, and goes on from there."""
    partition = f"#SBATCH --partition={arguments.partition}\n" if arguments.partition else ""
    return f"""#!/bin/bash
# Start it with: sbatch THIS_FILE. The run is stopped in time, saved, requeued and resumed until it is complete.
#SBATCH --job-name={arguments.name}
#SBATCH --nodes={arguments.nodes}
#SBATCH --ntasks-per-node={arguments.gpus}
#SBATCH --gpus-per-node={arguments.gpus}
#SBATCH --time={arguments.time}
{partition}#SBATCH --signal=USR1@{arguments.grace}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"

srun --kill-on-bad-exit=1 {_command("python -m megalight", arguments, preemption=True)}
code=$?

if [ "$code" -eq {PREEMPTED} ]; then  # it saved because of the signal, and is not complete
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def torchrun(arguments: argparse.Namespace) -> str:
    """Return a script for every machine. The first argument is its number, the second the address of machine 0."""
    return f"""#!/bin/bash
# Run it on each of {arguments.nodes} machines: bash THIS_FILE NUMBER ADDRESS
#   NUMBER: 0 to {arguments.nodes - 1}, a different one on each machine; ADDRESS: name or address of machine 0.
# If the run stops, start the script again on all machines: it goes on from the newest checkpoint.
set -eu
number="${{1:-0}}"
address="${{2:-localhost}}"
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"

exec torchrun --nnodes={arguments.nodes} --nproc-per-node={arguments.gpus} --node-rank="$number" \\
  --rdzv-backend=c10d --rdzv-id={shlex.quote(arguments.name)} --rdzv-endpoint="$address:29500" \\
  -m {_command("megalight", arguments, preemption=False)}
"""


def _command(program: str, arguments: argparse.Namespace, *, preemption: bool) -> str:
    """Return the command with what the launch decides, unless the user has said it."""
    words = list(arguments.command)
    added = {"--trainer.num_nodes": str(arguments.nodes), "--trainer.devices": str(arguments.gpus)}
    # Only training resumes from a checkpoint of its own.
    if words[0] == "fit":
        # The newest checkpoint, or none in the first run: the same script serves both.
        added["--ckpt_path"] = "auto"
        if preemption:
            added["--trainer.callbacks+"] = "megalight.callbacks.Preemption"
    # What the user says wins.
    said = {word.partition("=")[0] for word in words}
    options = [f"{name}={value}" for name, value in added.items() if name not in said]
    return " \\\n  ".join([f"{program} {shlex.join(words)}", *options])
