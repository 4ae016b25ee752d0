"""The typed configuration of optimizer and schedule, for recipes and command lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from megalight.optim.adam import Adam
from megalight.optim.groups import GroupRule, check_rules, parameter_groups
from megalight.optim.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """Adam with parameter groups and a schedule.

    Attributes:
        lr: peak learning rate.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: of weights; norms, biases and other one-dimensional parameters do not decay.
        decoupled_weight_decay: AdamW; otherwise the decay is added to the gradient.
        schedule: None: the learning rate is constant.
        rules: exceptions by name pattern.
        decay_all: let norms and biases decay as well.
        backend: which implementation steps; ``auto`` takes the best that can serve (``megalight doctor`` lists them).
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decoupled_weight_decay: bool = True
    schedule: Schedule | None = None
    rules: tuple[GroupRule, ...] = ()
    decay_all: bool = False
    backend: str = "auto"

    def check(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Refuse rules for parameters that a whole model does not have.

        Raises:
            ConfigurationError: a pattern that matches no trainable parameter.
        """
        check_rules([name for name, parameter in named_parameters if parameter.requires_grad], self.rules)

    def build(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], max_steps: int = -1, part: bool = False
    ) -> tuple[Adam, LambdaLR | None]:
        """The optimizer and its scheduler, to be stepped once per optimizer step.

        Args:
            named_parameters: as ``module.named_parameters()`` gives them.
            max_steps: optimizer steps of the run; -1: unlimited.
            part: these are parameters of a part of a model; :meth:`check` looks at the whole.
        """
        groups = parameter_groups(
            named_parameters,
            lr=self.lr,
            weight_decay=self.weight_decay,
            rules=self.rules,
            decay_all=self.decay_all,
            part=part,
        )
        optimizer = Adam(
            groups,
            self.lr,
            self.betas,
            self.eps,
            self.weight_decay,
            self.decoupled_weight_decay,
            backend=self.backend,
        )
        schedule = self.schedule and self.schedule.for_run(max_steps)
        return optimizer, schedule.build(optimizer) if schedule else None
