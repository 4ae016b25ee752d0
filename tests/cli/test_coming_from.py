"""The pages for users of Megatron-LM and NeMo name keys that exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from megalight.cli.config_args import class_in, members
from megalight.cli.lightning import MegalightCLI
from megalight.cli.main import main
from megalight.cli.trainer import MegalightTrainer
from megalight.data.gpt.module import GPTDataModule
from megalight.errors import ConfigurationError
from megalight.migration import MEGATRON, OURS
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from tests.support.source import ROOT


def rows(page: str) -> list[tuple[str, str]]:
    """Return both cells of the rows whose first cell begins with code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", text, re.MULTILINE)


ROWS = {page: rows(page) for page in ("from-megatron.md", "from-nemo.md")}
KEY = re.compile(r"`((?:trainer|model|data)(?:\.[a-z_]+)+|seed_everything|ckpt_path)`")
KEYS = {key for found in ROWS.values() for _, cell in found for key in KEY.findall(cell.partition("(")[0])}
ROOTS: dict[str, Any] = {
    "trainer.strategy": MegatronStrategy,
    "trainer": MegalightTrainer,
    "model.config": GPTConfig,
    "model": GPTModule,
    "data": GPTDataModule,
}
TOP = ("seed_everything", "ckpt_path")
SCRIPTS = """
num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups kv-channels seq-length
max-position-embeddings vocab-size position-embedding-type no-position-embedding rotary-base rotary-percent swiglu
normalization norm-epsilon disable-bias-linear untie-embeddings-and-output-weights init-method-std attention-dropout
hidden-dropout attention-backend use-flash-attn attention-softmax-in-fp32 no-masked-softmax-fusion
num-experts moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff moe-grouped-gemm moe-token-dispatcher-type
moe-permute-fusion micro-batch-size global-batch-size rampup-batch-size train-iters train-samples lr min-lr
lr-decay-style lr-warmup-iters lr-warmup-fraction lr-decay-iters weight-decay adam-beta1 adam-beta2 adam-eps clip-grad
decoupled-lr bf16 fp16 fp8-format fp8-recipe fp8-amax-history-len fp8-param-gather initial-loss-scale
cross-entropy-loss-fusion calculate-per-token-loss manual-gc grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32
no-gradient-accumulation-fusion tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel
num-layers-per-virtual-pipeline-stage context-parallel-size expert-model-parallel-size use-distributed-optimizer
overlap-grad-reduce overlap-param-gather tp-comm-overlap use-mcore-models transformer-impl recompute-activations
recompute-granularity recompute-method recompute-num-layers data-path data-cache-path split tokenizer-type
tokenizer-model vocab-file merge-file mock-data num-workers no-create-attention-mask-in-dataloader reset-position-ids
eod-mask-loss make-vocab-size-divisible-by save load finetune save-interval ckpt-format async-save no-load-optim
no-load-rng use-checkpoint-args eval-interval eval-iters log-interval log-throughput tensorboard-dir wandb-project
wandb-exp-name profile seed distributed-backend distributed-timeout-minutes exit-duration-in-mins exit-signal-handler
"""
"""Flags of pretraining scripts that Megatron-LM publishes for GPT-3, Llama 3 in FP8, and Mixtral, and common ones."""


REPORTS = """
--use-nccl-ub --use-megatron-fsdp --window-size --window-attn-skip-freq --use-precision-aware-optimizer
--use-flashinfer-fused-rope --use-custom-fsdp --teacher-model-config --softmax-type --recompute-modules
--recompute-granularity --overlap-cpu-optimizer-d2h-h2d --optimizer-offload-fraction --optimizer-cpu-offload
--moe-router-padding-for-quantization --moe-router-padding-for-fp8 --moe-router-fusion --moe-permute-fusion
--moe-flex-dispatcher-backend --moe-expert-parallel-a2a-overlap --moe-enable-deepep --external-cuda-graph
--dist-ckpt-optim-fully-reshardable --disable-symmetric-registration --data-parallel-sharding-strategy
--cuda-graph-scope --cross-entropy-loss-fusion --ckpt-format
external_cuda_graph moe_flex_dispatcher_backend softmax_type window_size use_nccl_ub fim_rate fim_spm_rate
fim_split_sample fim_fragment_rate yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast
yarn_beta_slow yarn_mscale yarn_mscale_all_dim correction_range_round_to_int num_experts kv_lora_rank
position_embedding_type squared_relu
"""
"""Flags and options in the reports on Megatron-core of August to November 2025."""


Answer = Callable[[list[str]], str]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Return what the command line says to words, in one line."""

    def ask(words: list[str]) -> str:
        assert main(["fit", *words]) == 2
        return " ".join(capsys.readouterr().err.split())

    return ask


def exists(key: str) -> bool:
    """Whether the key is an argument of the class that its beginning names, or of a class in its annotation."""
    if key in TOP:
        return True
    root = next((root for root in ROOTS if key.startswith(root + ".")), None)
    if root is None:
        return False
    cls: Any = ROOTS[root]
    for part in key[len(root) + 1 :].split("."):
        known = members(cls) if cls is not None else {}
        if part not in known:
            return False
        cls = class_in(known[part])
    return True


def test_the_tables_are_found() -> None:
    assert len(ROWS["from-megatron.md"]) > 80
    assert len(ROWS["from-nemo.md"]) > 35
    assert len(KEYS) > 80


def test_every_flag_of_typical_scripts_is_on_the_page() -> None:
    text = (ROOT / "docs" / "from-megatron.md").read_text(encoding="utf-8")
    assert [flag for flag in SCRIPTS.split() if not re.search(rf"`--{flag}[` ]", text)] == []


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_exists(key: str) -> None:
    assert exists(key)
    assert not exists(key + "x")


def test_top_keys_are_the_commands() -> None:
    class Parsed(MegalightCLI):
        def instantiate_classes(self) -> None:
            self.known = {action.dest for action in self._subcommand_parsers["fit"]._actions}
            raise SystemExit(0)

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**options)
            except SystemExit:
                return

    assert set(TOP) <= Parsed(args=["fit", "--model=tests.cli.samples.SampleModule"]).known


def test_each_seed_is_an_argument_of_what_it_seeds() -> None:
    """The order of data and the initial weights do not depend on ``seed_everything``."""
    (cell,) = [right for left, right in ROWS["from-megatron.md"] if left == "`--seed`"]
    keys = {what: key for key, what in re.findall(r"`([\w.]+)` \(([^)]*)\)", cell)}
    assert keys.pop("dropout") == "seed_everything"
    assert {what: key.partition(".")[0] for what, key in keys.items()} == {
        "order of data": "data",
        "initial weights": "model",
    }


def test_the_command_line_knows_the_flags_of_the_page() -> None:
    shown: dict[str, str] = {}
    for left, right in ROWS["from-megatron.md"]:
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", right).replace("`", "")  # links read as their text
        shown |= {flag.replace("-", "_"): text for flag in re.findall(r"`--([\w-]+)`", left)}
    assert shown == MEGATRON


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_name_of_another_program_stands_for_a_key_that_exists(name: str) -> None:
    assert exists(OURS[name].split()[0].strip(","))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--train-iters", "5"], "trainer.max_steps"),
        (["--bf16"], "trainer.precision"),
        (["--load=a"], "ckpt_path"),
        (["--num-attention-heads", "5"], "model.config.num_heads"),
        (["--model=GPTModule", "--model.config.num_attention_heads=8"], "model.config.num_heads"),
        (["--model=GPTModule", "--learning_rate=1e-3"], "model.optimizer.lr"),
        (["--trainer.strategy.tensor_model_parallel_size=2"], "trainer.strategy.tensor_parallel"),
    ],
)
def test_a_flag_of_another_program_is_answered_with_our_key(words: list[str], key: str, answer: Answer) -> None:
    assert re.search(rf"has no such argument\. Here it is {re.escape(key)}\b", answer(words))


def test_a_flag_is_not_answered_with_a_key_that_the_model_does_not_have(answer: Answer) -> None:
    text = answer(["--model=BertModule", "--num-experts=8"])
    assert "unknown key 'num-experts'" in text
    assert "Here it is" not in text


@pytest.mark.parametrize("flag", sorted({*REPORTS.split()}))
def test_every_flag_of_the_reports_has_an_answer(flag: str) -> None:
    name = flag.strip("-").replace("-", "_")
    assert exists(OURS[name].split()[0].strip(","))


def test_a_strategy_answers_flags_of_megatron() -> None:
    with pytest.raises(ConfigurationError, match=r"Instead: data_parallel\.advanced\.nccl_ub"):
        MegatronStrategy(use_nccl_ub=True)  # type: ignore[call-arg]
