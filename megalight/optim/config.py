"""The typed configuration of the optimizer and its schedule, for recipes and the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from megalight.optim.adam import Adam, MomentDtype, check_numbers
from megalight.optim.groups import GroupRule, check_rules, parameter_groups
from megalight.optim.schedules import LRSchedule


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """Adam with parameter groups and a schedule.

    Attributes:
        lr: peak learning rate.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decay coefficient. Norms, biases and other one-dimensional parameters do not decay.
        decoupled_weight_decay: AdamW. If false, the decay is added to the gradient.
        schedule: schedule of the learning rate. None: it is constant.
        rules: exceptions by name pattern.
        decay_all: whether norms and biases decay too.
        exp_avg_dtype: how the first moment is stored: ``float32``, ``bfloat16`` or ``float8``; see
            :class:`~megalight.optim.Adam`.
        exp_avg_sq_dtype: the same for the second moment.
        backend: backend of the op ``adam``. ``auto`` takes the best one that can serve (``megalight doctor --all``).

    Raises:
        ConfigurationError: a number is out of range.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decoupled_weight_decay: bool = True
    schedule: LRSchedule | None = None
    rules: tuple[GroupRule, ...] = ()
    decay_all: bool = False
    exp_avg_dtype: MomentDtype = "float32"
    exp_avg_sq_dtype: MomentDtype = "float32"
    backend: str = "auto"

    def __post_init__(self) -> None:
        # Now, and not when the optimizer is made: processes have started by then.
        check_numbers(self.lr, self.betas, self.eps, self.weight_decay)

    def check(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check that every rule matches a parameter of the whole model.

        Raises:
            ConfigurationError: a pattern matches no trainable parameter.
        """
        check_rules([name for name, parameter in named_parameters if parameter.requires_grad], self.rules)

    def build(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], max_steps: int = -1, part: bool = False
    ) -> tuple[Adam, LambdaLR | None]:
        """Create the optimizer and its scheduler, which must be stepped once per optimizer step.

        Args:
            named_parameters: the result of ``module.named_parameters()``.
            max_steps: optimizer steps of the run; -1: unlimited.
            part: whether these are the parameters of only a part of a model. Rules may then match nothing; call
                :meth:`check` with the whole model.
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
            exp_avg_dtype=self.exp_avg_dtype,
            exp_avg_sq_dtype=self.exp_avg_sq_dtype,
            backend=self.backend,
        )
        # A schedule without a length gets that of the run.
        schedule = self.schedule and self.schedule.for_run(max_steps)
        return optimizer, schedule.build(optimizer) if schedule else None
