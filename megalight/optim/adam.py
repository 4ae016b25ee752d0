"""Adam and AdamW on flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from megalight.errors import ConfigurationError
from megalight.ops.adam import (
    MOMENT_BLOCK,
    QuantizedOutput,
    adam_step,
    decode_moment,
    exponents_like,
    piece,
    read_moment,
    write_moment,
)
from megalight.ops.common import wide

MomentDtype: TypeAlias = Literal["float32", "bfloat16", "float8"]
MOMENTS = ("exp_avg", "exp_avg_sq")
EXPONENTS = "_exponents"
"""Ending of the name of the state with the exponents of a moment in 8 bits."""


def check_numbers(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuse hyperparameters with which no step makes sense.

    Raises:
        ConfigurationError: one is out of range.
    """
    for name, value, good in (
        ("lr", lr, lr >= 0),
        ("betas", betas, 0 <= betas[0] < 1 and 0 <= betas[1] < 1),
        ("eps", eps, eps >= 0),
        ("weight_decay", weight_decay, weight_decay >= 0),
    ):
        if not good:
            raise ConfigurationError(f"{name} of Adam is {value}; it must be at least 0, and betas below 1.")


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), by default with decoupled weight decay (AdamW, Loshchilov and Hutter 2019).

    It equals ``torch.optim.AdamW`` (without decoupling: ``torch.optim.Adam``) and reads their state dicts. It is made
    for a few large tensors, such as the master weights of the data-parallel engine.

    Args:
        params: tensors or parameter groups.
        lr: learning rate.
        betas: decay of the first and the second moment per step.
        eps: added to the root of the second moment.
        weight_decay: decay coefficient.
        decoupled_weight_decay: whether the decay scales the parameter (AdamW). If not, it is added to the gradient.
        capturable: whether to keep step counts on the device, so that a CUDA graph can capture a step.
        exp_avg_dtype: how the first moment is stored. ``float32``: 4 bytes per element (8 for float64 parameters).
            ``bfloat16``: 2 bytes. ``float8``: 1 byte, and one for the exponent of 64 elements. The last two are rounded
            at random (:mod:`megalight.ops.adam`). The update itself is computed in float32.
        exp_avg_sq_dtype: the same for the second moment.
        backend: backend of the op ``adam``.

    Attributes:
        elementwise: each element is updated from its own gradient only, so the optimizer can step on flat shards.
        grad_scale: 0-dim device tensor that multiplies the gradients of the next step. None: no scaling.
        host_scale: the same number in host memory, for parameters there; ``before`` waits for it, too.
        copies: tensor -> flat low-precision tensor that receives its new values in the same kernel.
        quantized_out: tensor -> function to call just before it is updated. It returns
            ``(start, stop, quantized values)`` of all parts whose quantized values the same kernel then writes; None:
            somebody else casts them.
        before: tensor -> function to call just before it is updated, which waits for its gradient.
        after: tensor -> function to call when it is updated.
        turns: tensor -> number; lower ones are updated first. Those without a number have 0.

    Raises:
        ConfigurationError: a hyperparameter is out of range.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decoupled_weight_decay: bool = True,
        capturable: bool = False,
        exp_avg_dtype: MomentDtype = "float32",
        exp_avg_sq_dtype: MomentDtype = "float32",
        backend: str = "auto",
    ) -> None:
        check_numbers(lr, betas, eps, weight_decay)
        for name, kind in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
            if kind not in get_args(MomentDtype):
                raise ConfigurationError(
                    f"{name} of Adam is {kind!r}; it must be one of {', '.join(map(repr, get_args(MomentDtype)))}."
                )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "capturable": capturable,
        }
        # Not options of groups: a run may resume with others than it was saved with.
        self.moment_dtypes: tuple[MomentDtype, MomentDtype] = exp_avg_dtype, exp_avg_sq_dtype
        self.backend = backend
        self.grad_scale: Tensor | None = None
        self.host_scale: Tensor | None = None
        self.copies: dict[Tensor, Tensor] = {}
        self.quantized_out: dict[Tensor, Callable[[], Sequence[tuple[int, int, QuantizedOutput]] | None]] = {}
        self.before: dict[Tensor, Callable[[], None]] = {}
        self.after: dict[Tensor, Callable[[], None]] = {}
        self.turns: dict[Tensor, int] = {}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. If ``closure`` is given, it is called first and its result is returned."""
        loss = None
        # The closure runs backward, and `step` itself runs without gradients.
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, group in self._in_turn():
            if parameter in self.before:
                self.before[parameter]()
            self._update(parameter, group)
            if parameter in self.after:
                self.after[parameter]()
        # The factor is that of this step's clipping.
        self.grad_scale = self.host_scale = None
        return loss

    def _in_turn(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Return the parameters to update, each with its group: by their turns, else as they stand in the groups."""
        # No gradient: the batch was skipped, or the parameter is not used. Moments then stay as they are, as in torch.
        pairs = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        return sorted(pairs, key=lambda pair: self.turns.get(pair[0], 0))

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # A step count on the host needs no kernel and no wait; a graph needs it on the device to count its replays.
            device = parameter.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self._fit(parameter, state)
        # Counted before the update: bias correction divides by 1 - beta^step, which is 0 for step 0.
        state["step"] += 1
        beta1, beta2 = group["betas"]
        gradient, scale, lr = parameter.grad, self.grad_scale, group["lr"]
        assert gradient is not None
        if parameter.device.type == "cpu":
            # Masters in host memory. The fused kernel for CPUs needs gradients in the masters' dtype.
            gradient = gradient.to(wide(parameter.dtype))
            # Not `scale.to("cpu")`: the host would wait for all updates that the device has queued before these.
            scale = scale if self.host_scale is None else self.host_scale
            lr = lr.to(parameter.device) if isinstance(lr, Tensor) else lr
        options: dict[str, Any] = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            # `.item()` of a host tensor does not wait for the device.
            "step": state["step"] if group["capturable"] else state["step"].item(),
            "decoupled": group["decoupled_weight_decay"],
            "grad_scale": scale,
            "backend": self.backend,
        }
        tensors = (parameter, gradient, *(state[name] for name in MOMENTS))
        exponents = [state.get(name + EXPONENTS) for name in MOMENTS]
        if not parameter.numel():
            return  # its steps are counted all the same
        parts = self.quantized_out[parameter]() if parameter in self.quantized_out else None
        if parts is None:
            # Written while the new values are in registers, instead of by a second pass over the masters.
            adam_step(*tensors, out=self.copies.get(parameter), exponents=(exponents[0], exponents[1]), **options)
            return
        # So are quantized. Each weight has a scale of its own; what lies between weights is zero, and stays so.
        for start, stop, quantized_out in parts:
            blocks = slice(start // MOMENT_BLOCK, -(-stop // MOMENT_BLOCK))
            first, second = (None if each is None else each[blocks] for each in exponents)
            adam_step(
                *(each[start:stop] for each in tensors),
                exponents=(first, second),
                quantized_out=quantized_out,
                **options,
            )

    def readable_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state as others read it: moments in 8 bits become bfloat16 ones in host memory.

        bfloat16 holds the values of such quantized values exactly. The rest is the state itself.
        """
        return _readable(self.state.get(parameter, {}))

    def room_dtype(self, name: str, parameter: Tensor) -> torch.dtype | None:
        """Return the dtype in which saved moments of a parameter are read; None: it is no moment.

        The next step rounds them to quantized values, if this optimizer stores quantized values.
        """
        if name not in MOMENTS:
            return None
        kind = self.moment_dtypes[MOMENTS.index(name)]
        return wide(parameter.dtype) if kind == "float32" else torch.bfloat16

    def widen_moments(self) -> None:
        """Replace all moments in 8 bits by bfloat16 ones, on their device: others may then cut and join them.

        The next step rounds them to quantized values again, which changes none of them.
        """
        for state in self.state.values():
            for second, name in enumerate(MOMENTS):
                if (exponents := state.pop(name + EXPONENTS, None)) is not None:
                    state[name] = decode_moment(state[name], exponents, bool(second)).to(torch.bfloat16)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's own optimizers have it; moments in 8 bits are bfloat16 there."""
        saved = super().state_dict()
        saved["state"] = {key: _readable(state) for key, state in saved["state"].items()}
        return saved

    def _fit(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Make moments, or bring those of a checkpoint or of torch's optimizer into the dtypes of this one."""
        for second, (name, kind) in enumerate(zip(MOMENTS, self.moment_dtypes, strict=True)):
            stored, exponents = state.get(name), state.get(name + EXPONENTS)
            # Moments in the dtype of the masters, but never in half precision unless asked: there, 0.999 of a second
            # moment rounds back to all of it, and it would never fall.
            dtype = {"float32": wide(parameter.dtype), "bfloat16": torch.bfloat16, "float8": torch.uint8}[kind]
            if stored is not None and stored.dtype == dtype:
                continue
            room = torch.zeros_like(parameter, dtype=dtype)
            own = exponents_like(room) if kind == "float8" else None
            if stored is not None:
                values = read_moment(stored, exponents, bool(second))
                write_moment(room, own, values.to(parameter.device), bool(second))
            state.pop(name + EXPONENTS, None)
            state[name] = room
            if own is not None:
                state[name + EXPONENTS] = own


def _readable(state: dict[str, Any]) -> dict[str, Any]:
    read = {name: value for name, value in state.items() if not name.endswith(EXPONENTS)}
    for second, name in enumerate(MOMENTS):
        if (exponents := state.get(name + EXPONENTS)) is not None:
            read[name] = _decoded(state[name], exponents, bool(second))
    return read


def _decoded(data: Tensor, exponents: Tensor, second: bool) -> Tensor:
    """Return a quantized moment as bfloat16 in host memory, piece by piece, to take little memory of its device."""
    found = torch.empty(data.shape, dtype=torch.bfloat16)
    flat, room = data.view(-1), found.view(-1)
    size = piece()
    for start in range(0, data.numel(), size):
        blocks = slice(start // MOMENT_BLOCK, (start + size) // MOMENT_BLOCK)
        room[start : start + size] = decode_moment(flat[start : start + size], exponents[blocks], second)
    return found
