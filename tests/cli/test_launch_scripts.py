"""Scripts for several machines: bash accepts them, and the commands in them are whole."""

import shlex
import subprocess

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from megalight.cli.lightning import MegalightCLI
from megalight.cli.main import main
from megalight.cli.trainer import with_slurm


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my recipe.yaml").write_text("trainer: {}")


COMMAND = ["fit", "-c", "my recipe.yaml", "--trainer.max_steps=5"]


def script(*words, capsys):
    assert main(["launch", *words]) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def command(text, start):
    """The words of the command that begins with ``start``, and is continued over lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return shlex.split(next(line for line in lines if line.startswith(start)))


def test_slurm(capsys):
    text = script("--slurm", "--nodes=4", "--gpus=2", "--partition=gpu", "--", *COMMAND, capsys=capsys)
    for option in ("--nodes=4", "--ntasks-per-node=2", "--partition=gpu", "--requeue", "--signal=USR1@300"):
        assert f"#SBATCH {option}\n" in text
    words = command(text, "srun")
    assert words[words.index("megalight") + 1 :] == [
        *COMMAND,
        "--trainer.num_nodes=4",
        "--trainer.devices=2",
        "--ckpt_path=auto",
        "--trainer.callbacks+=megalight.callbacks.Preemption",
    ]
    assert '[ "$code" -eq 75 ]' in text


def test_torchrun(capsys):
    text = script("--torchrun", "--nodes=2", "--", *COMMAND, "--ckpt_path=x", capsys=capsys)
    words = command(text, "exec torchrun")
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=$number"} <= set(words)
    assert words[words.index("-m") + 1 :][:2] == ["megalight", "fit"]
    assert "--ckpt_path=auto" not in words
    assert "--ckpt_path=x" in words


def test_numbers_are_those_of_the_command(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("trainer: {devices: 2, num_nodes: 3}")
    text = script("--slurm", "--", "fit", "-c", str(recipe), capsys=capsys)
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --ntasks-per-node=2\n" in text
    text = script("--slurm", "--", "fit", "-c", str(recipe), "--trainer.devices=4", capsys=capsys)
    assert "#SBATCH --ntasks-per-node=4\n" in text
    assert command(text, "srun").count("--trainer.devices=4") == 1
    # An option of the script wins over a file, which the script overrides.
    text = script("--torchrun", "--gpus=1", "--", "fit", "-c", str(recipe), capsys=capsys)
    assert {"--nproc-per-node=1", "--trainer.devices=1"} <= set(command(text, "exec torchrun"))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--slurm", "--", "prepare", "x"], "'prepare' is not run on several machines"),
        (["--slurm", "--nodes=0", "--", "fit"], "--nodes is 0"),
        (["--slurm", "--gpus=4", "--", "fit", "--trainer.devices=2"], "--gpus is 4, and --trainer.devices of the"),
        (["--", "fit"], "--slurm"),
        (["--slurm", "--", "fit", "-c", "missing.yaml"], "cannot read the configuration file missing.yaml: No such"),
        (["--slurm", "--nodes=two", "--", "fit"], "error: --nodes is 'two'; it must be an integer, such as 8."),
    ],
)
def test_refusals(words, part, capsys):
    assert main(["launch", *words]) == 2
    assert part in capsys.readouterr().err


def test_the_added_options_are_known_to_the_command():
    words = ["--trainer.callbacks+=megalight.callbacks.Preemption", "--trainer.num_nodes=1", "--trainer.devices=1"]
    cli = MegalightCLI(
        args=["--model=tests.cli.samples.SampleModule", "--trainer.accelerator=cpu", "--trainer.logger=false", *words],
        run=False,
    )
    assert "Preemption" in {type(callback).__name__ for callback in cli.trainer.callbacks}


def test_slurms_environment_is_taken_without_requeueing():
    (environment,) = with_slurm(None)
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue
    given = LightningEnvironment()
    assert with_slurm(given) == with_slurm([given]) == [given]
