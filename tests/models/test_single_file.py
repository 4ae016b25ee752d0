"""Single-file checkpoints of Lightning's own strategies: the same model as in memory, and clear refusals."""

import zipfile

import lightning.pytorch as pl
import pytest
import torch

from megalight.checkpoint.foreign.single_file import describe, read
from megalight.errors import CheckpointError
from megalight.inference.text import TextGenerator, load_model
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.loading import single_file_model
from megalight.types import TokenBatch

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=30, max_sequence_length=8)


@pytest.fixture
def saved(tmp_path):
    """A module that was trained for a step under Lightning's own strategy, and its checkpoint."""
    ids = torch.randint(30, (2, 9))
    batch = TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(2, 8))
    module = GPTModule(CONFIG)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, enable_checkpointing=False, **quiet)
    loader = torch.utils.data.DataLoader([batch], batch_size=None)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return module, tmp_path / "a.ckpt"


def test_the_model_is_the_trained_one(saved):
    module, path = saved
    model = load_model(path)
    assert not model.training
    for (name, ours), (other, theirs) in zip(
        model.state_dict().items(), module.model.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs)
    assert load_model(path, dtype=torch.bfloat16).embed.word.weight.dtype is torch.bfloat16
    assert single_file_model(path)[0].name == "gpt"


def test_the_report_lists_its_tensors(saved):
    module, path = saved
    report = describe(path, norms=True)
    weight = module.model.embed.word.weight
    assert report.tensors["model.embed.word.weight"].shape == tuple(weight.shape)
    assert report.norms["model.embed.word.weight"] == pytest.approx(weight.detach().norm().item(), rel=1e-6)
    assert report.progress["global_step"] == 1
    assert report.numel == sum(parameter.numel() for parameter in module.model.parameters())


def test_refusals(saved, tmp_path):
    _, path = saved
    with pytest.raises(CheckpointError, match=r"a\.ckpt is a single file, .* no tokenizer. Name .*--tokenizer"):
        TextGenerator.from_checkpoint(path)
    (tmp_path / "b").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        read(tmp_path / "b")
    torch.save({"weights": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match="it has no 'state_dict'"):
        read(tmp_path / "c")
    entries = torch.load(path, weights_only=True)
    torch.save({key: value for key, value in entries.items() if key != "model"}, tmp_path / "d")
    with pytest.raises(CheckpointError, match="does not say which model"):
        single_file_model(tmp_path / "d")
    entries["state_dict"].popitem()
    torch.save(entries, tmp_path / "e")
    with pytest.raises(CheckpointError, match="does not hold the model that it describes"):
        single_file_model(tmp_path / "e")


def test_a_compressed_file_is_refused(saved, tmp_path):
    """It could unpack to any size, and torch writes none."""
    _, path = saved
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "b", "w", zipfile.ZIP_DEFLATED) as other:
        for info in archive.infolist():
            other.writestr(info.filename, archive.read(info))
    with pytest.raises(CheckpointError, match="b cannot be read as a single-file checkpoint: it is compressed"):
        read(tmp_path / "b")
