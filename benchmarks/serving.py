"""Throughput through HTTP beside the engine's own, for streams that come at random.

    python benchmarks/serving.py http RESULT.json      # Llama-3-8B shape, 64 and 256 streams; a pause
    python benchmarks/serving.py replicas RESULT.json  # one and two replicas, on two GPUs
    python benchmarks/serving.py peers RESULT.json     # `transformers serve` with continuous batching
    python benchmarks/serving.py fake RESULT.json      # an engine without a model: CPU time of the server

``--tiny`` runs the same on a CPU in seconds. Clients are a process of their own, which reads what sockets give. Prompts
have 64 to 192 tokens and completions ``--tokens``; arrivals are a Poisson process with a mean of one second for all.
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

Row = dict[str, Any]
CONTROL = "control"
WORDS = 128_256
"""Tokens of the Llama-3 vocabulary."""


def arrivals(streams: int, seed: int = 0) -> list[float]:
    """Return the seconds at which streams come."""
    draw = random.Random(seed)
    gaps = [draw.expovariate(streams) for _ in range(streams)]
    return [sum(gaps[:place]) for place in range(streams)]


def prompts(streams: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    """Return prompts, which all differ."""
    draw = random.Random(seed)
    return [[draw.randrange(300, vocabulary) for _ in range(draw.randrange(64, 193))] for _ in range(streams)]


# The load, in a process of its own


async def _stream(port: int, path: str, body: Row, at: float) -> Row:
    """Send one request at a time of this clock; return when parts of its answer came."""
    await asyncio.sleep(at - time.monotonic())
    data = json.dumps(body).encode()
    start = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    times, whole = list[float](), bytearray()
    while part := await reader.read(1 << 16):
        events = part.count(b"data: {")
        times += [time.monotonic()] * events
        whole += part
    writer.close()
    if b" 200 " not in whole[:20]:
        raise SystemExit(f"the server answers {bytes(whole[:300])!r}")
    usage = [json.loads(line[6:]) for line in whole.split(b"\n") if b'"completion_tokens"' in line]
    tokens = usage[-1]["usage"]["completion_tokens"] if usage else len(times) - 1
    return {"start": start, "times": times, "tokens": tokens}


async def _load(settings: Row) -> Row:
    begin = time.monotonic() + 0.2
    spread = arrivals(len(settings["bodies"]))
    tasks = [
        asyncio.create_task(_stream(settings["port"], settings["path"], body, begin + at))
        for body, at in zip(settings["bodies"], spread, strict=True)
    ]
    pauses = [await _paused(settings["port"], begin + at) for at in settings.get("pauses", ())]
    found = await asyncio.gather(*tasks)
    end = max(each["times"][-1] for each in found)
    first = sorted(each["times"][0] - each["start"] for each in found)
    between = sorted(b - a for each in found for a, b in zip(each["times"], each["times"][1:], strict=False))
    tokens = sum(each["tokens"] for each in found)

    def at(values: Sequence[float], share: float) -> float:
        return 1e3 * values[min(len(values) - 1, int(share * len(values)))]

    return {
        "tokens": tokens,
        "tokens/s": tokens / (end - begin),
        "events": sum(len(each["times"]) for each in found),
        "first ms p50": at(first, 0.5),
        "first ms p99": at(first, 0.99),
        "between ms p50": at(between, 0.5),
        "between ms p99": at(between, 0.99),
        **({"pause ms": [1e3 * each for each in pauses]} if pauses else {}),
    }


async def _paused(port: int, at: float) -> float:
    """Pause and resume the server; return the seconds until the pause was acknowledged."""
    await asyncio.sleep(at - time.monotonic())
    start = time.monotonic()
    await _control(port, "/pause")
    found = time.monotonic() - start
    await _control(port, "/resume")
    return found


async def _control(port: int, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CONTROL}\r\nContent-Length: 0\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n")
    answer = await reader.read()
    if b" 200 " not in answer[:20]:
        raise SystemExit(f"{path} answers {answer[:300]!r}")


def load(port: int, bodies: Sequence[Row], path: str = "/v1/completions", pauses: Sequence[float] = ()) -> Row:
    """Send requests from another process; return what they got."""
    settings = {"port": port, "path": path, "bodies": bodies, "pauses": pauses}
    done = subprocess.run(
        [sys.executable, "-S", os.path.abspath(__file__), "load"],
        input=json.dumps(settings),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found: Row = json.loads(done.stdout)
    return found


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
    from megalight.serving.server import serve

    failed: list[BaseException] = []

    def ready(port: int) -> None:
        def run() -> None:
            try:
                measure(port)
            except BaseException as error:
                failed.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=run, daemon=True).start()

    serve(llm, "model", port=0, control_keys=[CONTROL], ready=ready)
    if failed:
        raise failed[0]


def http(arguments: argparse.Namespace) -> Row:
    """Measure the engine, and then the server around it."""
    from megalight.serving.engine_loop import EngineOptions
    from megalight.serving.llm import AsyncLLM, ServedModel

    model = model_of(arguments.tiny, arguments.layers)
    vocabulary = model.config.vocab_size
    options = EngineOptions(max_sequences=max(arguments.streams), cache_tokens=max(arguments.streams) * 512)
    start = time.monotonic()
    found = ServedModel.of(model, words_of(vocabulary), frozenset(), options=options)
    engine = found.loop.engine
    rows: Row = {"ready seconds": time.monotonic() - start, "streams": {}}
    own(engine, prompts(4, vocabulary, 9), 8)
    for streams in arguments.streams:
        rows["streams"][streams] = {"own": own(engine, prompts(streams, vocabulary), arguments.tokens)}
        say(streams, "own", rows["streams"][streams]["own"])

    def measure(port: int) -> None:
        load(port, bodies_of(prompts(4, vocabulary, 8), 8))
        for streams in arguments.streams:
            row = rows["streams"][streams]
            row["http"] = load(port, bodies_of(prompts(streams, vocabulary, 2), arguments.tokens))
            row["share"] = row["http"]["tokens/s"] / row["own"]["tokens/s"]
            say(streams, "http", row["http"] | {"share": row["share"]})
        bodies = bodies_of(prompts(arguments.streams[0], vocabulary, 3), arguments.tokens)
        rows["pause"] = load(port, bodies, pauses=[0.6, 0.9, 1.2])["pause ms"]
        print("pause ms", rows["pause"], flush=True)

    before = time.process_time()
    served(AsyncLLM.of(found), measure)
    rows["CPU seconds"] = time.process_time() - before
    return rows


def fake(arguments: argparse.Namespace) -> Row:
    """Measure the server around an engine without a model, whose steps take 5 ms."""
    from benchmarks.coordinator import TimedEngine
    from megalight.serving.engine_loop import EngineLoop, EngineOptions
    from megalight.serving.llm import AsyncLLM, ServedModel

    tokenizer = words_of(2048)
    model = ServedModel.of(model_of(True), tokenizer, frozenset(), options=EngineOptions())
    engine = TimedEngine([*range(300, 900)], 0.005, 0.0, 0)
    model.__dict__["loop"] = EngineLoop(engine, tokenizer)  # type: ignore[arg-type]
    rows: Row = {"streams": {}}

    def measure(port: int) -> None:
        for streams in arguments.streams:
            before = time.process_time()
            row = load(port, bodies_of(prompts(streams, 500), arguments.tokens))
            row["server us/token"] = (time.process_time() - before) / row["tokens"] * 1e6
            rows["streams"][streams] = row
            say(streams, "http", row)

    served(AsyncLLM.of(model), measure)
    return rows


def folder_of(place: Path, tiny: bool, layers: int | None) -> int:
    """Write a model in the form of `transformers`; return its number of tokens."""
    from megalight.models.hugging_face.export import export
    from megalight.models.stored import held_model

    model = model_of(tiny, layers)
    tokenizer = words_of(model.config.vocab_size)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    export(held_model("gpt", model.config, model), place)
    tokenizer.save(place)
    vocabulary: int = model.config.vocab_size
    return vocabulary


def replicas(arguments: argparse.Namespace) -> Row:
    """Measure one replica and two, each on a GPU, behind a coordinator."""
    from megalight.serving.engine_loop import EngineOptions
    from megalight.serving.replicas import ReplicatedLLM

    rows: Row = {"replicas": {}}
    streams = arguments.streams[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        vocabulary = folder_of(Path(place) / "model", arguments.tiny, arguments.layers)
        if not arguments.tiny:
            import torch

            torch.cuda.empty_cache()
        options = EngineOptions(max_sequences=streams, cache_tokens=streams * 512)
        for count in (1, 2):

            def measure(port: int, count: int = count) -> None:
                load(port, bodies_of(prompts(8, vocabulary, 8), 8))
                row = load(port, bodies_of(prompts(streams * count, vocabulary), arguments.tokens))
                rows["replicas"][count] = row
                say(streams * count, f"{count} replicas", row)

            start = time.monotonic()
            llm = ReplicatedLLM(Path(place) / "model", replicas=count, options=options)
            print(f"{count} replicas are ready after {time.monotonic() - start:.1f} s", flush=True)
            served(llm, measure)
    rows["share"] = rows["replicas"][2]["tokens/s"] / rows["replicas"][1]["tokens/s"]
    print("two of one:", rows["share"], flush=True)
    return rows


def peers(arguments: argparse.Namespace) -> Row:
    """Measure `transformers serve` with continuous batching on the same shape."""
    rows: Row = {"streams": {}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder_of(Path(place) / "model", arguments.tiny, arguments.layers)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["transformers", "serve", "--port", str(port), "--continuous-batching", "--dtype", "bfloat16"]
        with subprocess.Popen(words) as server:
            try:
                _wait(port, server)
                draw = random.Random(5)
                for streams in (2, *arguments.streams):
                    texts = [" ".join(draw.choices("abcdefgh", k=draw.randrange(32, 97))) for _ in range(streams)]
                    common = {"model": f"{place}/model", "stream": True, "max_tokens": arguments.tokens}
                    asked = [{**common, "messages": [{"role": "user", "content": text}]} for text in texts]
                    row = load(port, asked, "/v1/chat/completions")
                    rows["streams"][streams] = row
                    say(streams, "transformers", row)
            finally:
                server.terminate()
    return rows


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end and server.poll() is None:
        with socket.socket() as link:
            if link.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit("transformers serve does not start")


def say(streams: int, name: str, row: Row) -> None:
    """Print a line."""
    text = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, int | float))
    print(f"{streams:4} streams, {name}: {text}", flush=True)


def main(words: list[str] | None = None) -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("http", "replicas", "peers", "fake"))
    parser.add_argument("result", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, help="of the model (default: 32)")
    parser.add_argument("--folder", help="where models are written (default: that of temporary files)")
    arguments = parser.parse_args(words)
    run = {"http": http, "replicas": replicas, "peers": peers, "fake": fake}[arguments.mode]
    result = {"command": " ".join(sys.argv), **run(arguments)}
    arguments.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["load"]:
        print(json.dumps(asyncio.run(_load(json.load(sys.stdin)))))
        sys.exit()
    sys.exit(main())
