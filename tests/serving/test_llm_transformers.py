"""Folders and modules with a model of ``transformers``, whose code stays: served, scored, and drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megalight.cli.main import main
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError
from megalight.inference import SamplingParams, TextGenerator
from megalight.models.hf_causal_lm import HFCausalLM, HFModel
from megalight.rl.environment import PromptBatch
from megalight.rl.rollouts import Policy, roll_out
from megalight.serving import LLM
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from tests.rl.helpers import ROLLOUTS, environment, prompts_of
from tests.serving.conftest import TEMPLATE
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(temperature=0)
PROMPTS = ["user: hello", "naïve", "東京 🙂"]
NEW = 6


@pytest.fixture(scope="module")
def starcoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its norms compute in float64, too, and we have no code of our own for it."""
    path = tmp_path_factory.mktemp("starcoder") / "model"
    tokenizer = Tokenizer.train(["user: hello\nassistant: naïve 東京 🙂"] * 9, 270)
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Starcoder2Config(
        **sizes, vocab_size=272, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4,
        sliding_window=5, residual_dropout=0.0, embedding_dropout=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(2)
    transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(path)
    tokenizer.save(path)
    return path


class Plain(pl.LightningModule):
    """What a user writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(ids, labels=ids).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(3, 67).view(8, 8), batch_size=4)


def expected(net: Any, ids: list[list[int]]) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [net.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in ids]


@pytest.fixture(scope="module")
def net(starcoder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(starcoder, dtype=torch.float64)


def test_a_folder_is_served(starcoder: Path, net: Any) -> None:
    llm = LLM(starcoder, device="cpu")
    assert isinstance(llm.served.model, HFModel)
    llm.served.ends = frozenset()
    ids = [llm.served.ids_of(prompt) for prompt in PROMPTS]
    wanted = expected(net, ids)
    assert [each.tokens for each in llm.generate(PROMPTS, GREEDY, max_new_tokens=NEW)] == wanted
    assert len({*map(tuple, wanted)}) == 3
    scores = llm.score(PROMPTS, wanted)
    for prompt, tokens, score in zip(ids, wanted, scores, strict=True):
        with torch.no_grad():
            logits = net(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        each = logits[torch.arange(len(prompt) - 1, len(prompt) + NEW - 1), torch.tensor(tokens)]
        assert score.greedy
        assert score.total == pytest.approx(float(each.sum()))

    with pytest.raises(ConfigurationError, match="Starcoder2ForCausalLM is a model of transformers"):
        _ = TextGenerator(llm.served.model, llm.served.words).whole


def test_frequencies_of_angles_stay_in_float32(starcoder: Path, net: Any) -> None:
    found: Any = LLM(starcoder, device="cpu", dtype=torch.bfloat16).served.model
    assert found.net.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(found.net.model.rotary_emb.inv_freq, net.model.rotary_emb.inv_freq.float())


def divided(folder: Path) -> list[list[int]]:
    llm = LLM(folder, tensor_parallel=2, device="cpu")
    llm.served.ends = frozenset()
    return [each.tokens for each in llm.generate(PROMPTS, GREEDY, max_new_tokens=NEW)]


@pytest.mark.full
def test_a_folder_is_served_by_two_ranks(starcoder: Path, net: Any) -> None:
    ids = [LLM(starcoder, device="cpu").served.ids_of(prompt) for prompt in PROMPTS]
    for found in run(divided, 2, starcoder):
        assert found == expected(net, ids)


def test_the_command_completes_texts(starcoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", str(starcoder), "--prompt", "user: hello", "-t", "0", "-n", "4", "--device", "cpu"])
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("kind", ["plain", "ours"])
def test_a_module_generates_with_the_weights_it_has_then(starcoder: Path, net: Any, kind: str) -> None:
    module: Any = Plain(starcoder) if kind == "plain" else HFCausalLM(weights=starcoder)
    if kind == "ours":
        with pytest.raises(ConfigurationError, match="not built"):
            LLM.from_module(module)
        module.configure_model()
        module.model.double().load_state_dict({f"net.{name}": each for name, each in net.state_dict().items()})
    llm = LLM.from_module(module)
    assert [each.tokens for each in llm.generate(IDS, GREEDY, max_new_tokens=NEW)] == expected(net, IDS)


IDS = [[5, 6, 7], [9]]
LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tp2": (MegatronStrategy, {"tensor_parallel": 2}),
    "full2": (MegatronFSDPStrategy, {}),
    "pp2": (MegatronStrategy, {"pipeline_parallel": 2, "micro_batch_size": 2}),
}


def between_steps(layout: str, folder: Path) -> tuple[list[list[int]], list[list[int]] | str]:
    """Train a plain module, and return completions by the engine, and by the trained model itself where it is whole."""
    module, (kind, options) = Plain(folder), LAYOUTS[layout]
    strategy = kind(**options)
    runner = trainer(strategy, max_steps=2)
    runner.fit(module)
    try:
        llm = LLM.from_module(module)
    except ConfigurationError as error:
        return [], str(error)
    found = [each.tokens for each in llm.generate(IDS, GREEDY, max_new_tokens=NEW)]
    assert strategy.parallel_model is not None
    with strategy.parallel_model.full_parameters():
        return found, expected(module.net, IDS)


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(each, marks=pytest.mark.full) for each in ("full2", "pp2"))])
def test_a_module_generates_in_the_layout_of_its_training(starcoder: Path, net: Any, layout: str) -> None:
    for found, wanted in run(between_steps, 2, layout, starcoder):
        if layout == "pp2":
            assert "Starcoder2ForCausalLM is cut into 2 stages" in wanted
        else:
            assert found == wanted != expected(net, IDS)


def test_a_policy_of_transformers_draws_answers(starcoder: Path, net: Any) -> None:
    policy = Policy(Plain(starcoder))
    prompts = PromptBatch(prompts_of(0), environment())
    groups = roll_out(policy, prompts, ROLLOUTS, 3, "seed")
    for group in groups:
        for answer in group:
            tokens, log_probs = answer.completion.tokens, answer.completion.log_probs
            whole = torch.tensor([[*answer.task.prompt, *tokens]])
            with torch.no_grad():
                logits = net(whole).logits[0].log_softmax(-1)
            places = torch.arange(len(tokens)) + len(answer.task.prompt) - 1
            assert log_probs == pytest.approx(logits[places, torch.tensor(tokens)].tolist())
