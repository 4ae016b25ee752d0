"""``peft``'s LoRA on ``transformers``' Llama in a plain loop: frozen bf16 weights, fused AdamW, optionally compiled."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.meter import Meter
from benchmarks.peers import world_size
from benchmarks.peers.huggingface import finish, llama, loss_of
from benchmarks.step import Step, only_of
from megalight.imports import has

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Runner:
    """Trains adapters on one device.

    Args:
        compiled: whether to apply ``torch.compile`` to each layer.
        half: keep adapters in bf16, without autocast. Otherwise they are float32, which is ``peft``'s default.
    """

    def __init__(self, compiled: bool, half: bool = False) -> None:
        self.compiled, self.half = compiled, half

    def why_not(self, step: Step) -> str | None:
        missing = [name for name in ("transformers", "peft") if not has(name)]
        if missing:
            return f"{missing[0]} is not installed"
        if world_size() > 1:
            return "this runner is of one device"
        if not step.rank:
            return "this runner trains adapters alone: rank=0"
        if step.precision == "fp8" or (self.half and step.precision != "bf16"):
            return f"this runner has no {step.precision}"
        return only_of(step, ("rank",))

    def check(self, step: Step) -> dict[str, Any]:
        return {}

    def run(self, step: Step, meter: Meter) -> None:
        model = adapted(step, self.half)
        if self.compiled:
            for layer in model.base_model.model.model.layers:
                layer.compile()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if (count := sum(parameter.numel() for parameter in trained)) != step.adapter_weights:
            raise RuntimeError(f"peft trains {count} numbers, and the step has {step.adapter_weights}")
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        autocast = step.precision == "bf16" and not self.half
        meter.start()
        for index in range(meter.total):
            for micro in range(step.micro):
                with torch.autocast(step.device, torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, step, index * step.micro + micro)
                (loss / step.micro).backward()
            finish(model, optimizer)
            meter.tick()


def adapted(step: Step, half: bool) -> Any:
    """Make the step's Llama, frozen and in the step's dtype, with adapters."""
    import peft

    dtype = torch.float32 if step.precision == "fp32" else torch.bfloat16
    config = peft.LoraConfig(r=step.rank, lora_alpha=16, target_modules=MODULES, task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(step, dtype), config, autocast_adapter_dtype=not half)
