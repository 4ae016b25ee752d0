"""``megalight serve CKPT``: answer requests over HTTP, in OpenAI's form."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megalight.cli.verbs import add_model_arguments, dtype_of
from megalight.errors import ConfigurationError

KEY = "MEGALIGHT_API_KEY"
CONTROL_KEY = "MEGALIGHT_CONTROL_KEY"
COORDINATOR = "USE_COORDINATOR"
"""Environment variable: whether also a single engine is in a process of its own, behind a coordinator: 1 or 0."""


DESCRIPTION = "answer requests over HTTP, in the form of OpenAI's API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        help="a checkpoint, a run's folder (its newest one), a folder of transformers, or a name: Qwen/Qwen3-0.6B",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="0 is any that is free (default: 8000)")
    parser.add_argument("--name", help="the model's name in the API (default: the folder's)")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help=f"a key that clients send; repeat for several (default: {KEY}). Other machines need one",
    )
    parser.add_argument(
        "--control-key",
        action="append",
        default=[],
        help=f"a key for /pause, /suspend, /resume, /weights (default: {CONTROL_KEY}). Without it there are none",
    )
    parser.add_argument("--events", help="a file to which a line of JSON is added for each event of a request")
    for option, kind, what in (
        ("max-choices", int, "completions of a request: its prompts times n (default: 64)"),
        ("max-queue", int, "completions that run and wait; more get 429 (default: 1024)"),
        ("max-body-bytes", int, "bytes of a body; more get 413 (default: 4 MiB)"),
        ("max-concurrency", int, "requests of a key at a time (default: any)"),
        ("max-per-minute", int, "requests of a key in a minute (default: any)"),
        ("first-token-timeout", float, "seconds until a first token; then 503 (default: any)"),
        ("idle-timeout", float, "seconds in which a client reads a part of a stream (default: 60)"),
        ("drain-timeout", int, "seconds for requests that run when the server ends (default: 60)"),
        ("cache-tokens", int, "tokens for which the cache has room (default: 65536)"),
        ("max-sequences", int, "sequences that run at once (default: 64)"),
        ("step-tokens", int, "tokens of a step; longer prompts run in parts (default: 512)"),
        ("kv-cache-dtype", str, "auto: keys and values are stored in the weights' dtype; fp8: in half the bytes"),
        ("draft", str, "a draft model's checkpoint, which proposes tokens: faster, with the same completions"),
        ("num_speculative_tokens", int, "tokens that the draft proposes at a time (default: 4)"),
    ):
        parser.add_argument(f"--{option}", type=kind, help=what)
    parser.add_argument(
        "--batch-invariant",
        action="store_const",
        const=True,
        help="log-probabilities do not depend on other requests, in any bit; slower",
    )
    for option, what in (
        ("tensor-parallel", "processes that share each layer, on GPUs of their own (default: 1)"),
        ("expert-parallel", "processes that share the experts: those of a replica, or of several (default: 1)"),
        ("replicas", "engines with a model each, on GPUs of their own, behind a coordinator (default: 1)"),
    ):
        parser.add_argument(f"--{option}", type=int, default=1, help=what)
    add_model_arguments(parser)
    parser.add_argument(
        "--quantization",
        choices=("auto", "fp8", "none"),
        default="auto",
        help="fp8: weights take a byte each; auto: those that were published so (default); none: all are widened",
    )


LIMITS = {
    "max_choices": "choices",
    "max_queue": "queue",
    "max_body_bytes": "body_bytes",
    "max_concurrency": "concurrency",
    "max_per_minute": "per_minute",
    "first_token_timeout": "first_token_seconds",
    "idle_timeout": "idle_seconds",
}
"""Options -> fields of ``Limits``."""


def uses_coordinator(replicas: int, on_gpu: bool) -> bool:
    """Return whether engines are in other processes, behind a coordinator.

    By default those on GPUs are, and several replicas: in one process, Python would run either the engine or the
    server, and a GPU would wait for events to be written.

    Raises:
        ConfigurationError: the choice is none, or there are several engines without a coordinator.
    """
    chosen = os.environ.get(COORDINATOR, "")
    if chosen not in ("", "0", "1") or (chosen == "0" and replicas > 1):
        raise ConfigurationError(
            f"{COORDINATOR} is {chosen!r} and --replicas {replicas}; it must be 0 or 1, and 1 for several replicas."
        )
    return replicas > 1 or chosen == "1" or (on_gpu and not chosen)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from megalight.cli.checkpoints import model_paths
    from megalight.imports import require

    path, tokenizer, base = model_paths(arguments)
    for name in (*LIMITS, "drain_timeout"):
        if (value := getattr(arguments, name)) is not None and not value >= 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    require("fastapi", "megalight serve")
    require("uvicorn", "megalight serve")
    require("prometheus_client", "megalight serve")
    require("zmq", "megalight serve")
    require("msgspec", "megalight serve")

    import torch  # after the checks: importing it takes seconds

    from megalight.serving.async_llm import AsyncClient, AsyncLLM
    from megalight.serving.embeddings import EmbeddingModel, has_embeddings
    from megalight.serving.encoder_client import AsyncEncoder
    from megalight.serving.engine_loop import EngineOptions
    from megalight.serving.processes import freeze_objects
    from megalight.serving.rank_processes import ReplicaRanks, replicas_sharing_experts
    from megalight.serving.served_model import ServedModel
    from megalight.serving.server import Limits, check_host, serve

    keys = arguments.api_key or [key for key in [os.environ.get(KEY)] if key]
    control_keys = arguments.control_key or [key for key in [os.environ.get(CONTROL_KEY)] if key]
    check_host(arguments.host, keys)
    names = (
        "cache_tokens",
        "max_sequences",
        "step_tokens",
        "kv_cache_dtype",
        "batch_invariant",
        "draft",
        "num_speculative_tokens",
    )
    sizes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    model = {
        "tensor_parallel": arguments.tensor_parallel,
        "device": arguments.device,
        "options": EngineOptions(**sizes),
        "tokenizer": tokenizer,
        "base": base,
        "dtype": dtype_of(arguments),
        "keys": arguments.weights_keys,
        "adapter": arguments.adapter,
        "quantization": arguments.quantization,
    }
    llm: AsyncClient
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    experts = arguments.expert_parallel
    if has_embeddings(path):
        if max(arguments.replicas, arguments.tensor_parallel, experts) > 1:
            raise ConfigurationError(f"{path} is an encoder, which one process serves; leave the layout out.")
        dtype = dtype_of(arguments)
        llm = AsyncEncoder(EmbeddingModel(path, tokenizer=tokenizer, device=arguments.device, dtype=dtype))
    elif uses_coordinator(arguments.replicas, torch.device(device).type == "cuda"):
        from megalight.serving.replicas import ReplicatedLLM

        llm = ReplicatedLLM(path, replicas=arguments.replicas, expert_parallel=experts, **model)
    else:
        replicas_sharing_experts(1, arguments.tensor_parallel, experts)
        ranks = ReplicaRanks(tensor_parallel=arguments.tensor_parallel, expert_parallel=experts)
        llm = AsyncLLM.of(ServedModel.from_checkpoint(path, replica=ranks if experts > 1 else None, **model))
    limits = {field: value for name, field in LIMITS.items() if (value := getattr(arguments, name)) is not None}
    name = arguments.name or Path(os.fspath(arguments.checkpoint)).name
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host

    def ready(port: int) -> None:
        print(f"megalight serve: {name} at http://{host}:{port}", file=sys.stderr, flush=True)

    events = None
    if arguments.events is not None:
        try:
            events = open(arguments.events, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 it is open till the end
        except OSError as error:
            raise ConfigurationError(f"events (--events) {arguments.events!r} cannot be written: {error}.") from error
    freeze_objects()
    serve(
        llm,
        name,
        host=arguments.host,
        port=arguments.port,
        keys=keys,
        control_keys=control_keys,
        limits=Limits(**limits),
        events=events,
        drain_seconds=arguments.drain_timeout or 60,
        ready=ready,
    )
    return 0
