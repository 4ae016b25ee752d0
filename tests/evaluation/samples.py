"""A tiny folder of ``transformers``, and tasks whose data is beside them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml

from megalight.data.tokenizer import Tokenizer

WORDS = "the cat sat on a mat and looked at the moon while two dogs ran over green hills to find their old red ball"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

TASKS = {
    # Choices of one token and of several; contexts of equal and of different lengths.
    "colors": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "endings": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "passages": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{passage}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["at", "\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def save_tasks(folder: Path) -> Path:
    """Write the tasks, and the group ``all_tiny`` of two of them."""
    folder.mkdir()
    words = WORDS.split()
    rows = [
        {
            "question": " ".join(words[n : n + 2 + n % 4]),
            "choices": [words[n + 1], f"{words[n]} {words[n + 3]}", words[2 * n]],
            "answer": n % 3,
            "passage": " ".join(words[n:] * (1 + n % 3)),
        }
        for n in range(7)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        content = {"task": name, **data, "test_split": "test", **task, "metadata": {"version": 1.0}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    group = {"group": "all_tiny", "task": ["colors", "endings"], "metadata": {"version": 1.0}}
    group["aggregate_metric_list"] = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    (folder / "group.yaml").write_text(yaml.safe_dump(group))
    return folder


def save_model(folder: Path, length: int = 48, *, width: int = 32, double: bool = True, family: str = "gpt2") -> Path:
    """Write a model of four layers with a tokenizer, whose choices are not all alike.

    GPT-2 and StarCoder2: no part of them computes in float32 where the rest is in float64.
    """
    from transformers import AutoModelForCausalLM, GPT2Config, Starcoder2Config

    tokenizer = Tokenizer.train([WORDS] * 3, 280)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(5)
    common = {"vocab_size": 280, "initializer_range": 0.3, "bos_token_id": None}
    common |= {"eos_token_id": tokenizer.eod_id, "pad_token_id": tokenizer.pad_id}
    config: GPT2Config | Starcoder2Config = GPT2Config(
        **common, n_embd=width, n_layer=4, n_head=4, n_positions=length, attn_pdrop=0.1
    )
    if family == "starcoder2":
        sizes = {"hidden_size": width, "intermediate_size": width, "max_position_embeddings": length}
        config = Starcoder2Config(**common, **sizes, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    (model.double() if double else model).save_pretrained(folder)
    tokenizer.save(folder)
    return folder
