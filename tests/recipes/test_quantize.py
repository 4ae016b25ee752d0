"""The recipe of quantization: trains, rounds, tells perplexity, exports, and transformers computes the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.errors import CheckpointError
from megalight.inference import load_model
from megalight.plugins.modelopt.export import plain_weights
from megalight.types import PackedSequences
from tests.recipes.test_layouts import RECIPES, SHORT, _data, megalight

pytest.importorskip("modelopt")
transformers = pytest.importorskip("transformers")
__all__ = ["_data"]  # the corpus, made before each test

CONFIG = ["-c", str(RECIPES / "quantize.yaml"), "--trainer.accelerator=cpu", "--trainer.limit_val_batches=2"]
DATA = ["--data.data=runs/demo/data/stdlib", "--data.tokenizer=runs/demo/data/stdlib.tokenizer.json"]
SMALL = [*DATA, "--data.sequence_length=64", "--model.config.num_layers=1", "--model.config.vocab_size=280"]


@pytest.mark.full
def test_the_recipe_of_quantization(tmp_path: Path) -> None:
    short = [word for word in SHORT if "callbacks" not in word]
    megalight(tmp_path, "fit", *CONFIG, *short, *SMALL)
    weights = "--model.init_args.weights=runs/quantize/checkpoints/last.ckpt"
    split = ["--trainer.devices=2", "--trainer.strategy.tensor_parallel=2"]
    for name, options, layout in (("fp8", ["--kv=FP8_KV_CFG"], split), ("int4", ["--preset=INT4_AWQ_CFG"], [])):
        said = megalight(tmp_path, "quantize", f"runs/{name}", *options, "--", *CONFIG, *SMALL, weights, *layout)
        ((before, after),) = re.findall(r"perplexity (\S+) before, (\S+) quantized", said)
        assert float(before) != float(after)
        assert float(after) == pytest.approx(float(before), rel=0.05)
        megalight(tmp_path, "convert", f"runs/{name}", f"{name}", "--to", "modelopt")
        same_in_transformers(tmp_path / "runs" / name, tmp_path / name)


def same_in_transformers(checkpoint: Path, folder: Path) -> None:
    ours: Any = load_model(str(checkpoint))
    for path, module in ours.named_modules():
        if path.endswith(("input_quantizer", "bmm_quantizer")):
            module.disable()  # transformers rounds no activations
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    theirs.load_state_dict(plain_weights(folder))
    tokens = torch.arange(3, 19)
    with torch.no_grad():
        found = ours.float().eval()(tokens, PackedSequences.of_uniform(1, len(tokens)))
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(getattr(found, "logits", found)[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-4)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors"):
        plain_weights(tmp_path)
