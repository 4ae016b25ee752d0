"""What clients, the coordinator and engines send each other: MessagePack, typed by ``msgspec``. Never pickle.

A frame is one message: its header, which is the name of its class, and its fields. A frame that is none of those that
its reader expects is counted and dropped.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from megalight.errors import CheckpointError, ConfigurationError, DataError, MegalightError
from megalight.serving.engine_status import EngineStatus

if TYPE_CHECKING:
    from megalight.serving.engine_loop import EngineOutput, EngineRequest

Reason: TypeAlias = Literal["end", "stop", "length", "error"]
"""Why a completion ended; see :class:`~megalight.serving.engine_loop.EngineOutput`."""
Header = Literal["PAUSE", "UNPAUSE", "SUSPEND", "RESUME", "STOP", "CHECK_WEIGHTS", "UPDATE_WEIGHTS"]
"""What engines can be told. Clients ask for all but the check, which comes before each update."""
State = Literal[
    "RUNNING", "PAUSING", "PAUSED", "SUSPENDING", "SUSPENDED", "RESUMING", "STOPPING", "STOPPED", "UPDATING"
]
"""What all engines do."""
LARGEST = 64 * 2**20
"""Bytes of the largest frame. Who sends more is disconnected."""
ERRORS: dict[str, type[MegalightError]] = {
    "data": DataError,
    "configuration": ConfigurationError,
    "checkpoint": CheckpointError,
}
"""Errors that keep their class on the way; others become a ``MegalightError``."""
Fault = tuple[str, str]
"""An error in a message: its kind and its text."""


def fault_of(error: Exception) -> Fault:
    """Return an error as it is sent."""
    return next((name for name, known in ERRORS.items() if isinstance(error, known)), ""), str(error)


def error_of(fault: Fault) -> MegalightError:
    """Return an error that was sent."""
    return ERRORS.get(fault[0], MegalightError)(fault[1])


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message."""


class Output(msgspec.Struct, array_like=True, gc=False):
    """An :class:`~megalight.serving.engine_loop.EngineOutput` in a message. ``error`` is its kind and its text."""

    id: str
    text: str = ""
    tokens: list[int] = []
    reason: Reason | None = None
    log_probs: list[float] | None = None
    top_log_probs: list[dict[int, float]] | None = None
    prompt_log_probs: list[float] | None = None
    cached_tokens: int = 0
    error: Fault | None = None

    @classmethod
    def of(cls, output: EngineOutput) -> Output:
        """Return an output as a message."""
        return cls(
            output.id,
            output.text,
            output.tokens,
            output.reason,
            output.log_probs,
            output.top_log_probs,
            output.prompt_log_probs,
            output.cached_tokens,
            None if output.error is None else fault_of(output.error),
        )


class RequestFields(msgspec.Struct, array_like=True):
    """An :class:`~megalight.serving.engine_loop.EngineRequest` in a message. ``sampling_params`` are those with values
    of their own, ``grammar`` is its kind and its text.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int
    sampling_params: dict[str, Any] = {}
    ends: list[int] = []
    stop: list[str] = []
    seed: int | None = None
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    grammar: tuple[Literal["json_schema", "regex", "lark"], str] | None = None
    special_text: list[int] = []
    generated: list[int] = []

    @classmethod
    def of(cls, request: EngineRequest) -> RequestFields:
        """Return a request as a message."""
        params, grammar = request.sampling_params, request.grammar
        return cls(
            request.id,
            [*request.prompt],
            request.max_new_tokens,
            {each.name: value for each in fields(params) if (value := getattr(params, each.name)) != each.default},
            [*request.ends],
            [*request.stop],
            request.seed,
            request.log_probs,
            request.top_log_probs,
            request.prompt_log_probs,
            None if grammar is None else (grammar.kind, grammar.text),
            [*request.special_text],
            [*request.generated],
        )


class Connect(Frame, frozen=True):
    """A client is there. It says so every half second."""


class ConnectAck(Frame, frozen=True):
    """The coordinator is there: its epoch, which a new one changes, the state, and the engines by their names."""

    epoch: str
    state: State
    engines: dict[str, EngineStatus] = {}


class SubmitRequest(Frame, frozen=True):
    """A request, from a client, or to an engine in one of its epochs.

    What the coordinator adds for an engine are fields of their own, as it copies no request: another id, a seed, and
    the tokens so far.
    """

    request: RequestFields
    epoch: int = 0
    id: str = ""
    seed: int | None = None
    generated: list[int] = []


class AbortRequest(Frame, frozen=True):
    """A request is to be taken out."""

    id: str


class Control(Frame, frozen=True):
    """A client wants all engines to change their state, or their weights. The ticket is in the answer.

    ``wait``: requests that run end with the old weights first.
    """

    header: Header
    ticket: int
    weights: str = ""
    wait: bool = False


class ControlAck(Frame, frozen=True):
    """All engines have acknowledged, or the state was such before. Or an engine refuses the weights."""

    ticket: int
    state: State
    weights_epoch: int = 0
    error: Fault | None = None


class Reply(Frame, frozen=True):
    """What a step gave the requests of a client."""

    outputs: list[Output]
    weights_epoch: int = 0


class Hello(Frame, frozen=True):
    """An engine is there, and has no requests. Each hello has a new epoch. ``weights`` are those that it was given.

    Engines of a ``group`` share experts: none steps without the others.
    """

    epoch: int
    name: str = ""
    weights_epoch: int = 0
    weights: str = ""
    group: str = ""


class Rejoin(Frame, frozen=True):
    """The coordinator does not know the engine: it must drop its requests, and say hello."""


class EngineReply(Frame, frozen=True):
    """What a step gave all requests of an engine."""

    epoch: int
    outputs: list[Output]
    weights_epoch: int = 0


class Heartbeat(Frame, frozen=True):
    """An engine is there."""

    epoch: int
    status: EngineStatus | None = None


class Command(Frame, frozen=True):
    """An engine is to change its state or weights in one of its epochs, and acknowledge the number."""

    header: Header
    number: int
    epoch: int
    weights: str = ""
    weights_epoch: int = 0


class Ack(Frame, frozen=True):
    """An engine has done what it was told, or refuses the weights."""

    epoch: int
    number: int
    error: Fault | None = None


ToCoordinator = Connect | SubmitRequest | AbortRequest | Control | Hello | EngineReply | Heartbeat | Ack
ToClient = ConnectAck | ControlAck | Reply
ToEngine = Rejoin | SubmitRequest | AbortRequest | Command

encode = msgspec.msgpack.Encoder().encode
decode_for_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode
decode_for_client = msgspec.msgpack.Decoder(ToClient).decode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
