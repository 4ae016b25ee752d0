"""Throughput through HTTP beside the engine's own, for streams that come at random.

    python benchmarks/serving.py http RESULT.json      # Llama-3-8B shape, 64 and 256 streams; a pause
    python benchmarks/serving.py replicas RESULT.json  # one and two replicas, on two GPUs
    python benchmarks/serving.py http peers RESULT.json  # and `transformers serve` with continuous batching
    python benchmarks/serving.py fake RESULT.json      # an engine without a model: CPU time of the server

Each stage says when it has ended. ``--tiny`` runs the same on a CPU in seconds. Clients are processes of their own,
which read what sockets give. Prompts have 64 to 192 tokens and completions ``--tokens``; arrivals are a Poisson process
with a mean of one second for all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import serving_load
from benchmarks.coordinator import TimedEngine
from megalight.serving.async_llm import AsyncClient, AsyncLLM
from megalight.serving.engine_loop import EngineLoop, EngineOptions
from megalight.serving.engine_worker import EngineWorker
from megalight.serving.inference_client import InferenceClient
from megalight.serving.processes import end_process, freeze_objects, say, settings_of, start_process
from megalight.serving.replicas import ReplicatedLLM
from megalight.serving.served_model import ModelText, ServedModel
from megalight.serving.server import serve

Row = dict[str, Any]
STARTED = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
"""When this process began, in seconds since the machine did."""
CONTROL = "control"
WORDS = 128_256
"""Tokens of the Llama-3 vocabulary."""


def note(text: str) -> None:
    """Print what has ended, and when: in seconds since this process began."""
    print(f"{time.clock_gettime(time.CLOCK_BOOTTIME) - STARTED:6.1f} s  {text}", flush=True)


def arrivals(streams: int, seed: int = 0) -> list[float]:
    """Return the seconds at which streams come."""
    draw = random.Random(seed)
    gaps = [draw.expovariate(streams) for _ in range(streams)]
    return [sum(gaps[:place]) for place in range(streams)]


def prompts(streams: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    """Return prompts, which all differ."""
    draw = random.Random(seed)
    return [[draw.randrange(300, vocabulary) for _ in range(draw.randrange(64, 193))] for _ in range(streams)]


def load(port: int, bodies: Sequence[Row], path: str = "/v1/completions", pauses: Sequence[float] = ()) -> Row:
    """Send requests from other processes; return what they got. One process would read more slowly than these write."""
    count = max(1, min(len(bodies) // 16, 8, (os.cpu_count() or 1) // 2))
    begin = time.monotonic() + 0.5  # all processes have one clock
    at = [begin + each for each in arrivals(len(bodies))]
    clients = []
    for number in range(count):
        share = slice(number, None, count)
        settings: Row = {"port": port, "path": path, "bodies": bodies[share], "at": at[share], "key": CONTROL}
        settings["pauses"] = [begin + each for each in pauses] if number == 0 else []
        settings["tells"] = number == 0
        words = [sys.executable, "-S", serving_load.__file__]
        client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert client.stdin is not None
        client.stdin.write(json.dumps(settings))
        client.stdin.close()
        clients.append(client)
    found = list[Row]()
    for client in clients:
        assert client.stdout is not None
        with client:
            said = client.stdout.read()
        if client.returncode:
            raise SystemExit("a client has ended early; its output says why")
        found += json.loads(said)
    measured = [seconds for each in found for seconds in each.pop("pauses", ())]
    found = [each for each in found if each]
    first = sorted(each["times"][0] - each["start"] for each in found)
    between = sorted(b - a for each in found for a, b in zip(each["times"], each["times"][1:], strict=False))
    tokens = sum(each["tokens"] for each in found)
    row: Row = {
        "tokens": tokens,
        "tokens/s": tokens / (max(each["times"][-1] for each in found) - begin),
        "events": sum(len(each["times"]) for each in found),
    }
    for name, values in (("first", first), ("between", between)):
        for part in (0.5, 0.99):
            row[f"{name} ms p{100 * part:g}"] = 1e3 * values[min(len(values) - 1, int(part * len(values)))]
    return row | ({"pause ms": [1e3 * each for each in measured]} if pauses else {})


# The engine and the server


def words_of(vocabulary: int) -> Any:
    """Return a tokenizer with so many tokens, whose texts are words."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    from megalight.data.tokenizer import Tokenizer

    draw = random.Random(2)
    letters = [chr(number) for number in range(33, 127)] + ["Ġ", "Ċ"]
    known = dict.fromkeys(letters)
    while len(known) < vocabulary:
        known["Ġ" + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(2, 7)))] = None
    inner = Inner(models.BPE({word: number for number, word in enumerate(known)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(inner)


def model_of(tiny: bool, layers: int | None = None) -> Any:
    """Return the Llama-3-8B shape with random weights; or a tiny one on the CPU."""
    import torch

    from megalight.models.gpt import GPT, GPTConfig
    from megalight.models.gpt.presets import preset

    if tiny:
        config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=512, max_sequence_length=512)
    else:
        config = replace(preset("llama3_8b"), max_sequence_length=2048)
        config = config if layers is None else replace(config, num_layers=layers)
    with torch.device("cpu" if tiny else "cuda"), torch.no_grad():
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
        model = GPT(config)
        torch.set_default_dtype(previous)
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1)
    return model.eval()


def own(engine: Any, asked: Sequence[Sequence[int]], tokens: int) -> Row:
    """Run the same requests on the engine alone, as they come; return its throughput."""
    waiting = sorted(zip(arrivals(len(asked)), asked, strict=True), reverse=True)
    begin, count, spans = time.monotonic(), 0, list[float]()
    while waiting or engine.unfinished:
        while waiting and begin + waiting[-1][0] <= time.monotonic():
            engine.add(waiting.pop()[1], max_new_tokens=tokens, seed=1)
        before = time.monotonic()
        if (step := engine.step()) is not None:
            count += len(step.tokens)
            spans.append(time.monotonic() - before)
    return {"tokens/s": count / (time.monotonic() - begin), "step ms p50": 1e3 * statistics.median(spans)}


def bodies_of(asked: Sequence[Sequence[int]], tokens: int) -> list[Row]:
    """Return requests for the prompts."""
    common = {
        "model": "model",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [{"prompt": [*prompt], "seed": 1, **common} for prompt in asked]


def served(llm: Any, measure: Callable[[int], None]) -> None:
    """Serve a model in this process while another thread measures."""
    failed: list[BaseException] = []

    def ready(port: int) -> None:
        def run() -> None:
            try:
                measure(port)
            except BaseException as error:
                failed.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=run, daemon=True).start()

    freeze_objects()  # as `megalight serve` does
    serve(llm, "model", port=0, control_keys=[CONTROL], ready=ready)
    if failed:
        raise failed[0]


class OneEngine(ReplicatedLLM):
    """A coordinator and an engine in processes of their own, as ``megalight serve`` has them; its weights are random.

    Args:
        arguments: of this program. The engine's process measures the engine alone first, as ``own``.
        vocabulary: number of tokens of its texts.
        without_model: whether it is an engine without a model.
    """

    def __init__(self, arguments: argparse.Namespace, vocabulary: int, *, without_model: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory()
        endpoint = f"ipc://{self._folder.name}/socket"
        self._children, pipes = [], []
        for function in ("megalight.serving.coordinator:coordinate", "benchmarks.serving:be_engine"):
            read, write = os.pipe()
            settings = {**vars(arguments), "result": "", "fake": without_model, "endpoint": endpoint, "ready": write}
            environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
            self._children.append(start_process(function, settings, environment, passed=[write]))
            os.close(write)
            pipes.append(os.fdopen(read))
        note("the processes are started")
        tokenizer = words_of(vocabulary)  # while they start
        _, self.own = [json.loads(pipe.readline()) for pipe in pipes]
        AsyncClient.__init__(self, ModelText(tokenizer=tokenizer, vocab_size=1 << 20, **self.own.pop("text")))
        self._client, self._closed = InferenceClient(endpoint), False
        self._replicas: Any = self

    def watch(self, failed: Callable[[BaseException], None]) -> None:
        """Children that end are seen by the load."""

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            end_process(child)
        self._folder.cleanup()


def be_engine() -> None:
    """Be the engine of :class:`OneEngine`."""
    settings = settings_of()
    arguments = argparse.Namespace(**settings)
    streams = arguments.streams
    options = EngineOptions(max_sequences=max(streams), cache_tokens=max(streams) * 512)
    found: Row = {}
    if settings["fake"]:
        tokenizer, text = words_of(2048), {"max_sequence_length": 2048, "num_blocks": 1 << 20}
        loop = EngineLoop(TimedEngine([*range(300, 900)], arguments.step_ms / 1e3, 0.0, 0), tokenizer)  # type: ignore[arg-type]
    else:
        note("engine: modules are imported")
        model = model_of(arguments.tiny, arguments.layers)
        start = time.monotonic()
        note("engine: the model is there")
        served = ServedModel.of(model, words_of(model.config.vocab_size), frozenset(), options=options)
        text = {"max_sequence_length": served.max_sequence_length, "num_blocks": served.num_blocks}
        loop = served.loop
        found = {"ready seconds": time.monotonic() - start, "own": {}}
        note(f"engine: ready, {found['ready seconds']:.1f} s after the model")
        own(loop.engine, prompts(4, model.config.vocab_size, 9), 8)
        for each in streams:
            found["own"][each] = own(loop.engine, prompts(each, model.config.vocab_size), arguments.tokens)
            tell(each, "own", found["own"][each])
    freeze_objects()
    say(settings, text=text, **found)
    asyncio.run(EngineWorker(loop, settings["endpoint"], name="0").run())


def http(arguments: argparse.Namespace) -> Row:
    """Measure the engine, and then the server around it."""
    vocabulary = 512 if arguments.tiny else WORDS
    llm = OneEngine(arguments, vocabulary)
    rows: Row = {"ready seconds": llm.own["ready seconds"], "streams": {}}

    def measure(port: int) -> None:
        load(port, bodies_of(prompts(4, vocabulary, 8), 8))
        for streams in arguments.streams:
            row = rows["streams"][streams] = {"own": llm.own["own"][str(streams)]}
            before = time.process_time()
            row["http"] = load(port, bodies_of(prompts(streams, vocabulary, 2), arguments.tokens))
            row["http"]["server us/token"] = (time.process_time() - before) / row["http"]["tokens"] * 1e6
            row["share"] = row["http"]["tokens/s"] / row["own"]["tokens/s"]
            tell(streams, "http", row["http"] | {"share": row["share"]})
        bodies = bodies_of(prompts(arguments.streams[0], vocabulary, 3), arguments.tokens)
        rows["pause"] = load(port, bodies, pauses=[0.6, 0.9, 1.2])["pause ms"]
        note(f"pause ms: {rows['pause']}")

    served(llm, measure)
    return rows


def fake(arguments: argparse.Namespace) -> Row:
    """Measure the server around an engine without a model: in a thread of the server, and in a process of its own."""
    tokenizer = words_of(2048)
    model = ServedModel.of(model_of(True), tokenizer, frozenset(), options=EngineOptions())
    engine = TimedEngine([*range(300, 900)], arguments.step_ms / 1e3, 0.0, 0)
    model.__dict__["loop"] = EngineLoop(engine, tokenizer)  # type: ignore[arg-type]
    rows: Row = {}
    for where in ("thread", "process"):
        llm = AsyncLLM.of(model) if where == "thread" else OneEngine(arguments, 2048, without_model=True)
        rows[where] = {}

        def measure(port: int, where: str = where) -> None:
            load(port, bodies_of(prompts(4, 500, 8), 8))
            for streams in arguments.streams:
                before = time.process_time()
                row = load(port, bodies_of(prompts(streams, 500), arguments.tokens))
                row["server us/token"] = (time.process_time() - before) / row["tokens"] * 1e6
                rows[where][streams] = row
                tell(streams, where, row)

        served(llm, measure)
    return rows


def folder_of(place: Path, tiny: bool, layers: int | None) -> int:
    """Write a model in the form of `transformers`; return its number of tokens."""
    import torch

    from megalight.models.hugging_face.export import export
    from megalight.models.stored import held_model

    model = model_of(tiny, layers)
    tokenizer = words_of(model.config.vocab_size)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    export(held_model("gpt", model.config, model), place)
    tokenizer.save(place)
    vocabulary: int = model.config.vocab_size
    del model
    torch.cuda.empty_cache()
    note("the model's folder is written")
    return vocabulary


def replicas(arguments: argparse.Namespace) -> Row:
    """Measure one replica and two, each on a GPU, behind a coordinator."""
    rows: Row = {"replicas": {}}
    streams = arguments.streams[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        vocabulary = folder_of(Path(place) / "model", arguments.tiny, arguments.layers)
        options = EngineOptions(max_sequences=streams, cache_tokens=streams * 512)
        for count in (1, 2):

            def measure(port: int, count: int = count) -> None:
                load(port, bodies_of(prompts(8, vocabulary, 8), 8))
                row = load(port, bodies_of(prompts(streams * count, vocabulary), arguments.tokens))
                rows["replicas"][count] = row
                tell(streams * count, f"{count} replicas", row)

            llm = ReplicatedLLM(Path(place) / "model", replicas=count, options=options)
            note(f"{count} replicas are ready")
            served(llm, measure)
    rows["share"] = rows["replicas"][2]["tokens/s"] / rows["replicas"][1]["tokens/s"]
    note(f"two of one: {rows['share']:.3f}")
    return rows


def peers(arguments: argparse.Namespace) -> Row:
    """Measure `transformers serve` with continuous batching on the same shape, for at most ``--peer-seconds``."""
    import transformers

    rows: Row = {"transformers": transformers.__version__, "streams": {}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder_of(Path(place) / "model", arguments.tiny, arguments.layers)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start = "from transformers.cli.transformers import main; main()"
        words = [sys.executable, "-c", start, "serve", f"{place}/model", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--continuous-batching", "--log-level", "error"]
        # On a CPU its cache would otherwise take all memory.
        tiny = ["--device", "cpu", "--dtype", "float32", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "512"]
        words += tiny if arguments.tiny else ["--dtype", "bfloat16"]
        with subprocess.Popen(words) as server:
            limit = threading.Timer(arguments.peer_seconds, server.kill)
            limit.start()
            try:
                while not listens(port):
                    if server.poll() is not None:
                        raise SystemExit("transformers serve does not start")
                    time.sleep(0.2)
                note("transformers serve listens")
                draw = random.Random(5)
                for streams in (2, *arguments.streams):
                    texts = [" ".join(draw.choices("abcdefgh", k=draw.randrange(32, 97))) for _ in range(streams)]
                    common = {"model": f"{place}/model", "stream": True, "max_tokens": arguments.tokens}
                    asked = [{**common, "messages": [{"role": "user", "content": text}]} for text in texts]
                    row = load(port, asked, "/v1/chat/completions")
                    if server.poll() is not None:
                        raise SystemExit("transformers serve has ended")
                    rows["streams"][streams] = row
                    tell(streams, "transformers", row)
            except SystemExit:
                if limit.is_alive():
                    raise
                rows["cut after seconds"] = arguments.peer_seconds
                note(f"transformers serve is cut after {arguments.peer_seconds:g} s")
            finally:
                limit.cancel()
                server.kill()
    return rows


def listens(port: int) -> bool:
    """Return whether a port accepts connections."""
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


def tell(streams: int, name: str, row: Row) -> None:
    """Print a line."""
    text = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, int | float))
    note(f"{streams} streams, {name}: {text}")


def main(words: list[str] | None = None) -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", choices=("http", "replicas", "peers", "fake"))
    parser.add_argument("result", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of an engine without a model (default: 10)")
    parser.add_argument("--layers", type=int, help="of the model (default: 32)")
    parser.add_argument("--folder", help="where models are written (default: that of temporary files)")
    parser.add_argument("--peer-seconds", type=float, default=240, help="time of a peer, with its start (default: 240)")
    arguments = parser.parse_args(words)
    every = {"http": http, "replicas": replicas, "peers": peers, "fake": fake}
    result: Row = {"command": " ".join(sys.argv)}
    note("modules are imported")
    for mode in arguments.modes:
        result[mode] = every[mode](arguments)
        arguments.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
