"""Several adapters of one base: trained one by one, saved together, switched, and divided like one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight import checkpoint
from megalight.callbacks import Adapters
from megalight.checkpoint.ranks import alone
from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference import generate, load_divided, load_model
from megalight.models.gpt.module import GPTModule
from megalight.models.transforms import activate
from megalight.models.transforms.saved import join_adapters
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.source import Target
from megalight.strategies import DataParallelOptions, MegatronStrategy
from megalight.types import PackedSequences
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData, gathered
from tests.support.environment import trainer
from tests.support.workers import run

CODE = {"rank": 3, "targets": ["layers.*"], "alpha": 6.0, "name": "code"}
CHAT = {"rank": 2, "targets": ["attention.*"], "alpha": 4.0, "name": "chat", "dora": True}
"""It leaves the MLPs of the base as they are."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp": {"pipeline_parallel": 2},
    "cp": {"context_parallel": 2},
    "sharded": {"data_parallel": DataParallelOptions(level="optim_grads")},
}


def train(folder: str, layout: str, adapters: dict[str, Any], base: str, steps: int = 2) -> tuple[list[float], Any]:
    """Some steps that begin with ``base``, and the weights after them."""
    strategy = MegatronStrategy(micro_batch_size=2, **LAYOUTS[layout])
    losses = Losses()
    save = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=steps)
    module = WithData(CONFIGS["gqa"], optimizer=ADAM, seed=SEED + 1, weights=base)
    module.steps = 6
    runner = trainer(
        strategy,
        callbacks=[losses, save, Adapters(save_base=False, **adapters)],
        enable_checkpointing=True,
        max_steps=steps,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module)
    return losses.losses, gathered(strategy, module)


@pytest.fixture(scope="module")
def both(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """``code`` alone, ``chat`` trained beside it in one process, and ``chat`` that was trained without it."""
    folder = tmp_path_factory.mktemp("both")
    run(train, 1, str(folder / "code"), "one", CODE, base)
    code = str(folder / "code" / "step=2.ckpt")
    run(train, 1, str(folder / "both"), "one", {**CHAT, "weights": code}, base)
    run(train, 1, str(folder / "chat"), "one", CHAT, base)
    return code, str(folder / "both" / "step=2.ckpt"), str(folder / "chat" / "step=2.ckpt")


TOKENS, SEQUENCES = torch.arange(9), PackedSequences.of_lengths([4, 5])


def logits(path: str, base: str, adapter: str | None = None) -> torch.Tensor:
    return load_model(path, base=base, adapter=adapter)(TOKENS, SEQUENCES).logits


def test_each_computes_as_if_it_were_alone(both: tuple[str, str, str], base: str) -> None:
    code, together, chat = both
    model = load_model(together, base=base)
    alone = {"code": logits(code, base), "chat": logits(chat, base), None: load_model(base)(TOKENS, SEQUENCES).logits}
    assert torch.equal(model(TOKENS, SEQUENCES).logits, alone["chat"])  # the one that was trained last
    for name in ("code", None, "chat", "code"):
        activate(model, name)
        assert torch.equal(model(TOKENS, SEQUENCES).logits, alone[name])
    assert not torch.allclose(alone["code"], alone["chat"], atol=1e-4)
    assert not torch.allclose(alone["chat"], alone[None], atol=1e-4)
    assert torch.equal(logits(together, base, "code"), alone["code"])
    with pytest.raises(ConfigurationError, match=r"no adapter 'cod'.*Did you mean 'code'\? It has code, chat"):
        load_model(together, base=base, adapter="cod")
    with pytest.raises(ConfigurationError, match=r"no adapter 'code'\..*It has none"):
        activate(load_model(base), "code")


@pytest.mark.parametrize(
    "layout", ["sp", "sharded", *(pytest.param(name, marks=pytest.mark.full) for name in ("pp", "cp"))]
)
def test_one_is_trained_beside_the_other_in_any_layout(
    layout: str, both: tuple[str, str, str], base: str, tmp_path: Path
) -> None:
    together = both[1]
    expected, weights = run(train, 1, str(tmp_path / "one"), "one", {"name": "code", "weights": together}, base)[0]
    (losses, found), _ = run(train, 2, str(tmp_path / "two"), layout, {"name": "code", "weights": together}, base)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert np.linalg.norm(found[name] - value) <= 1e-9 * max(float(np.linalg.norm(value)), 1e-3), name
    # Four steps of `code` in all, and none more of `chat`.
    before, after = (checkpoint.open(path) for path in (together, tmp_path / "two" / "step=2.ckpt"))
    assert [each["values"]["adapter"] for each in after.common["model"]["transforms"]] == ["chat", "code"]
    old, new = gathered_tensors(before), gathered_tensors(after)
    assert old.keys() == new.keys()
    assert {name for name in old if torch.equal(old[name], new[name])} == {n for n in old if ".chat." in n}
    states = [name for name in after.tensors if name.startswith("optimizer.")]
    assert states
    assert all(".code." in name for name in states)


def gathered_tensors(opened: checkpoint.Checkpoint) -> dict[str, torch.Tensor]:
    found = {}
    with alone() as group:
        for name, stored in opened.tensors.items():
            if name.startswith("model."):
                found[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
                target = Target(name, stored.shape, (0,) * len(stored.shape), found[name])
                opened.fill([target], strict=False, process_group=group)
    return found


def divided(path: str, base: str, tp: int, pp: int) -> list[list[list[int]]]:
    mesh = ParallelMesh(2, dist.get_rank(), tp=tp, pp=pp)
    model = load_divided(path, mesh, base=base, adapter="code")
    first = generate(model, [[1, 2, 3]], max_new_tokens=6, temperature=0)
    activate(model, "chat")
    return [first, generate(model, [[1, 2, 3]], max_new_tokens=6, temperature=0)]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_divided_models_switch(tp: int, pp: int, both: tuple[str, str, str], base: str) -> None:
    model = load_model(both[1], base=base, adapter="code")
    expected = [generate(model, [[1, 2, 3]], max_new_tokens=6, temperature=0)]
    activate(model, "chat")
    expected.append(generate(model, [[1, 2, 3]], max_new_tokens=6, temperature=0))
    assert expected[0] != expected[1]
    for found in run(divided, 2, both[1], base, tp, pp):
        assert found == expected


def test_checkpoints_are_joined(both: tuple[str, str, str], base: str, tmp_path: Path, capsys: Any) -> None:
    code, together, chat = both
    out = tmp_path / "joined"
    assert main(["adapters", code, chat, "--names", "a", "b", "-o", str(out)]) == 0
    assert "the adapters a, b" in capsys.readouterr().out
    for name, path in (("a", code), ("b", chat)):
        assert torch.equal(logits(str(out), base, name), logits(path, base))
    assert join_adapters([code, chat], tmp_path / "again") == ["code", "chat"]
    assert main(["adapters", together, code, "-o", str(tmp_path / "c")]) == 2
    assert "two adapters have the name 'code'; name each by --names" in " ".join(capsys.readouterr().err.split())
    assert main(["adapters", code, base, "-o", str(tmp_path / "c")]) == 2
    assert "has no adapters" in " ".join(capsys.readouterr().err.split())
    assert main(["adapters", code, chat, "--names", "a", "-o", str(tmp_path / "c")]) == 2
    assert "1 names for the adapters of 2 checkpoints" in " ".join(capsys.readouterr().err.split())


def test_one_is_merged(both: tuple[str, str, str], base: str, tmp_path: Path, capsys: Any) -> None:
    together = both[1]
    words = ["merge", together, "--base", base, "-o", str(tmp_path / "merged")]
    assert main(words) == 2
    assert "has the adapters code, chat; name one by --adapter" in " ".join(capsys.readouterr().err.split())
    for name, count in (("code", 8), ("chat", 4)):
        out = tmp_path / name
        assert main([*words[:-1], str(out), "--adapter", name]) == 0
        assert f"merged the adapters of {count} linear layers" in capsys.readouterr().out
        found = load_model(out)(TOKENS, SEQUENCES).logits
        torch.testing.assert_close(found, logits(together, base, name), rtol=1e-11, atol=1e-11)


def test_what_does_not_fit(both: tuple[str, str, str], base: str) -> None:
    together = both[1]

    def attach(config: str = "gqa", **values: Any) -> GPTModule:
        module = GPTModule(CONFIGS[config], weights=base if config == "gqa" else None)
        Adapters(**{"weights": together, **values}).attach(module)
        return module

    names = [transform.adapter for transform in attach(name="new", rank=2).transforms]  # type: ignore[attr-defined]
    assert names == ["code", "chat", "new"]
    with pytest.raises(ConfigurationError, match="the adapter 'default' has no rank; give one, or weights"):
        Adapters()
    with pytest.raises(ConfigurationError, match=r"has no adapter 'cod'.*Did you mean 'code'.*give a rank for a new"):
        attach(name="cod")
    with pytest.raises(ConfigurationError, match=r"the adapter 'code' in .* is LoRA.*Leave its settings out"):
        attach(name="code", rank=2)
    with pytest.raises(CheckpointError, match="are of another base: "):
        attach("mha", name="code")
    with pytest.raises(CheckpointError, match="has no adapters"):
        attach(weights=base, rank=2)
    for name in ("", "a.b", "train", "values"):
        with pytest.raises(ConfigurationError, match="cannot be the name of an adapter"):
            Adapters(rank=2, name=name)
    module = GPTModule(CONFIGS["gqa"])
    Adapters(name="code", weights=together).attach(module)
    with pytest.raises(CheckpointError, match="holds only adapters; give the module their base"):
        module.initial_weights()
