"""The typed configuration of the optimizer and its schedule, for recipes and the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from megalight.errors import ConfigurationError
from megalight.optim.adam import Adam, MomentDtype, check_numbers
from megalight.optim.groups import GroupRule, check_rules, parameter_groups
from megalight.optim.muon import MuonConfig
from megalight.optim.schedules import LRSchedule
from megalight.optim.whole_matrices import WholeMatrixOptimizer
from megalight.optim.whole_matrix_config import WholeMatrixConfig


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
        muon: lets Muon update hidden matrices, and Adam the rest. None: Adam updates everything.
        matrices: lets another optimizer of whole matrices do so, such as :class:`~megalight.optim.ShampooConfig`.

    Raises:
        ConfigurationError: a number is out of range, or Muon cannot have an option.
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
    muon: MuonConfig | None = None
    matrices: WholeMatrixConfig | None = None

    def __post_init__(self) -> None:
        # Now, and not when the optimizer is made: processes have started by then.
        check_numbers(self.lr, self.betas, self.eps, self.weight_decay)
        if (whole := self.whole) is None:
            return
        if self.muon is not None and self.matrices is not None:
            raise ConfigurationError(
                f"both muon and matrices ({type(self.matrices).__name__}) are given; matrices have one optimizer, so "
                "leave one of the two out."
            )
        for name, value, needed in (
            ("decoupled_weight_decay", self.decoupled_weight_decay, True),
            ("exp_avg_dtype", self.exp_avg_dtype, "float32"),
            ("exp_avg_sq_dtype", self.exp_avg_sq_dtype, "float32"),
        ):
            if value != needed:
                raise ConfigurationError(f"{name} is {value!r}; beside {whole.field} it must be {needed!r}.")

    @property
    def whole(self) -> WholeMatrixConfig | None:
        """The configuration of the optimizer of matrices; None: Adam updates everything."""
        return self.muon or self.matrices

    def check(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check that every rule matches a parameter of the whole model.

        Raises:
            ConfigurationError: a pattern matches no trainable parameter.
        """
        trained = [pair for pair in named_parameters if pair[1].requires_grad]
        if (whole := self.whole) is not None:
            whole.check(trained)
            trained = [pair for pair in trained if not whole.takes(*pair)]
        if trained or self.rules or whole is None:
            check_rules([name for name, _ in trained], self.rules)

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
        named = list(named_parameters)
        whole = self.whole
        if whole is not None and not part:
            self.check(named)
        rest = named if whole is None else [pair for pair in named if not whole.takes(*pair)]
        groups = parameter_groups(
            rest,
            lr=self.lr,
            weight_decay=self.weight_decay,
            rules=self.rules,
            decay_all=self.decay_all,
            part=part or whole is not None,
        )
        if whole is not None:
            return self._with_whole(whole, whole.groups(named), groups, max_steps)
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

    def _with_whole(
        self, whole: WholeMatrixConfig, matrices: list[dict[str, Any]], rest: list[dict[str, Any]], max_steps: int
    ) -> tuple[WholeMatrixOptimizer, LambdaLR | None]:
        for group in rest:
            group |= {"whole_matrices": False, "name": f"adam/{group['name']}"}
        optimizer = whole.build(
            [*matrices, *rest],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            backend=self.backend,
        )
        own = self.schedule and self.schedule.for_run(max_steps)
        theirs = whole.schedule.for_run(max_steps) if whole.schedule else own
        if theirs is None and own is None:
            return optimizer, None
        leading = theirs or own
        assert leading is not None
        return optimizer, leading.build(optimizer, [*([theirs] * len(matrices)), *([own] * len(rest))])
