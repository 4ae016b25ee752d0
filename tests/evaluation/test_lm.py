"""``lm-eval`` with our model class: log-likelihoods, answers and scores are those of its own ``hf`` backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight.errors import ConfigurationError, DataError
from megalight.inference import TextGenerator
from megalight.parallel.mesh import ParallelMesh
from tests.evaluation.samples import save_model
from tests.support.workers import run

pytest.importorskip("lm_eval")
NAMES = ["all_tiny", "passages", "answers"]
ALL = ["colors", "endings", "passages", "answers"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def options(folders: tuple[Path, Path], **given: Any) -> Any:
    from megalight.evaluation.lm import EvaluationOptions

    plain = {"tasks": NAMES, "include_path": folders[1], "log_samples": True, "bootstrap_iters": 0}
    return EvaluationOptions(**{**plain, **given})


def ours(folders: tuple[Path, Path], mesh: Any = None, given: Any = None, **how: Any) -> dict[str, Any]:
    from megalight.evaluation.lm import MegalightLM, evaluate

    text = TextGenerator.from_checkpoint(folders[0], dtype=torch.float64, mesh=mesh)
    return evaluate(MegalightLM(text, **how), options(folders, **(given or {})))


def theirs(folders: tuple[Path, Path], given: Any = None) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from megalight.evaluation.lm import Tasks

    # Its cache of logits reads the wrong rows where two continuations of different lengths end in the same tokens.
    model = HFLM(str(folders[0]), device="cpu", dtype="float64", batch_size=4, logits_cache=False)
    asked = options(folders, **(given or {}))
    manager = Tasks.having(asked.tasks, asked.include_path)
    multiturn = asked.apply_chat_template
    found = simple_evaluate(
        model,
        tasks=list(asked.tasks),
        task_manager=manager,
        bootstrap_iters=0,
        num_fewshot=asked.num_fewshot,
        apply_chat_template=asked.apply_chat_template,
        fewshot_as_multiturn=multiturn,
        system_instruction=asked.system_instruction,
        limit=asked.limit,
    )
    assert found is not None
    return dict(found)


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """What the model has answered to each question."""
    return [answer for sample in results["samples"][task] for answers in sample["resps"] for answer in answers]


def check_same(found: dict[str, Any], expected: dict[str, Any], tasks: list[str]) -> None:
    from megalight.evaluation.lm import scores

    assert scores(found) == pytest.approx(scores(expected), rel=1e-6)
    for task in tasks:
        mine, others = responses(found, task), responses(expected, task)
        assert len(mine) == len(others) > 0
        if task == "answers":
            assert mine == others
            continue
        for one, other in zip(mine, others, strict=True):
            # A pair: the log-likelihood, and whether the tokens are the most likely ones; a number for whole texts.
            assert one == pytest.approx(other, abs=1e-6), task


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> dict[str, Any]:
    return theirs(folders)


def test_equals_the_backend_of_transformers(folders: tuple[Path, Path], reference: dict[str, Any]) -> None:
    state = torch.get_rng_state()
    check_same(ours(folders), reference, ALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({*responses(reference, "answers")}) > 3, "all answers are alike"


@pytest.mark.full
def test_a_family_that_has_its_own_code_alone(folders: tuple[Path, Path], tmp_path: Path) -> None:
    starcoder = (save_model(tmp_path / "model", family="starcoder2"), folders[1])
    given = {"tasks": ["colors", "answers"], "limit": 4}
    check_same(ours(starcoder, given=given, batch_tokens=7), theirs(starcoder, given), ["colors", "answers"])


@pytest.mark.full
def test_batches_and_parts_change_nothing(folders: tuple[Path, Path], reference: dict[str, Any]) -> None:
    # Sequences longer than 7 tokens run in parts, through a cache.
    check_same(ours(folders, batch_tokens=7, max_sequences=2), reference, ALL)


def test_examples_and_chat_templates(folders: tuple[Path, Path]) -> None:
    given = {
        "tasks": ["colors", "answers"],
        "num_fewshot": 2,
        "apply_chat_template": True,
        "system_instruction": "be short",
        "limit": 4,
    }
    expected = theirs(folders, given)
    found = ours(folders, given=given)
    check_same(found, expected, ["colors", "answers"])
    arguments = found["samples"]["answers"][0]["arguments"]
    assert arguments == expected["samples"]["answers"][0]["arguments"]
    assert arguments[0][0].startswith("<system>be short\n<user>")
    assert len(found["samples"]["answers"]) == 4


def _ranks(folders: tuple[Path, Path], degrees: dict[str, int]) -> dict[str, Any]:
    return ours(folders, ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees))


@pytest.mark.parametrize(
    "degrees",
    [pytest.param({"tp": 2}, marks=pytest.mark.full), {"pp": 2}, pytest.param({}, marks=pytest.mark.full)],
    ids=str,
)
def test_layouts_agree(folders: tuple[Path, Path], reference: dict[str, Any], degrees: dict[str, int]) -> None:
    for found in run(_ranks, 2, folders, degrees):
        check_same(found, reference, ALL)


def test_mistakes(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megalight.evaluation import lm as runs
    from megalight.evaluation.lm import MegalightLM

    # The folder alone: to read the index of all tasks takes long.
    monkeypatch.setattr(runs, "_indexed", lambda folder, **_: runs.Tasks(include_path=folder, include_defaults=False))
    with pytest.raises(ConfigurationError, match=r"there is no task 'color'.*colors"):
        ours(folders, given={"tasks": ["color"]})
    assert runs.Tasks.having(["*s"], folders[1]).names(["*s"]) == ["answers", "colors", "endings", "passages"]
    with pytest.raises(ConfigurationError, match="asks for 64 new tokens, and the model reads 48"):
        ours(folders, given={"tasks": ["answers"], "gen_kwargs": {"max_gen_toks": 64}})
    for given, message in (
        ({"tasks": []}, "must be a list"),
        ({"limit": 0}, "above 0"),
        ({"include_path": folders[1] / "no"}, "is no folder"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            options(folders, **given)
    content = (folders[1] / "colors.yaml").read_text()
    (tmp_path / "lost.yaml").write_text(
        content.replace("rows.jsonl", "lost.jsonl").replace("task: colors", "task: lost")
    )
    with pytest.raises(DataError, match="tasks lost cannot be loaded: FileNotFoundError"):
        ours(folders, given={"tasks": ["lost"], "include_path": tmp_path})
    text = TextGenerator.from_checkpoint(folders[0])
    assert MegalightLM(text, max_length=9).max_length == 9
