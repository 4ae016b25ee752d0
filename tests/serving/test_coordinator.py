"""A coordinator: requests are answered once and right, whatever dies meanwhile; states are those of all engines."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, ConfigurationError, DataError, MegalightError
from megalight.inference import SamplingParams
from megalight.serving import LLM, EngineLoop, EngineOutput, EngineRequest
from tests.serving.fake_engine import FakeEngine
from tests.support.workers import free_port

zmq = pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from megalight.serving import coordinator as coordinating  # noqa: E402
from megalight.serving import engine_worker, inference_client  # noqa: E402
from megalight.serving.coordinator import DataParallelInferenceCoordinator  # noqa: E402
from megalight.serving.curve_keys import CurveKeys  # noqa: E402
from megalight.serving.engine_worker import EngineWorker  # noqa: E402
from megalight.serving.inference_client import InferenceClient  # noqa: E402
from megalight.serving.messages import (  # noqa: E402
    LARGEST,
    Connect,
    Control,
    EngineReply,
    Hello,
    Output,
    RequestFields,
    SubmitRequest,
    decode_for_client,
    encode,
)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is silent for 0.4 seconds is gone."""
    for module in (coordinating, inference_client):
        monkeypatch.setattr(module, "SILENCE", 0.4)
    for module in (coordinating, inference_client, engine_worker):
        monkeypatch.setattr(module, "BEAT", 0.05)


class Cluster:
    """A coordinator in a thread, and engines in tasks, which may die."""

    def __init__(self, endpoint: str, tokenizer: Tokenizer, **options: Any) -> None:
        self.endpoint, self.tokenizer, self.options = endpoint, tokenizer, options
        self.workers: list[asyncio.Task[None]] = []
        self.loops: list[EngineLoop] = []
        self.start()

    def start(self) -> None:
        self.coordinator = DataParallelInferenceCoordinator(self.endpoint, **self.options)
        self.thread = threading.Thread(target=self.coordinator.run, daemon=True)
        self.thread.start()

    async def kill_coordinator(self) -> None:
        self.coordinator.close()
        await asyncio.to_thread(self.thread.join)

    def engine(self, engine: Any = None, seconds: float = 0.002, group: str | None = None) -> EngineLoop:
        loop = EngineLoop(engine or FakeEngine(seconds), self.tokenizer)
        self.loops.append(loop)
        self.workers.append(asyncio.create_task(EngineWorker(loop, self.endpoint, group=group).run()))
        return loop

    async def kill_engine(self, place: int) -> None:
        self.loops.pop(place)
        worker = self.workers.pop(place)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)

    async def ready(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.coordinator.engines != count:
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        while self.workers:
            await self.kill_engine(0)
        await self.kill_coordinator()


def run(
    tmp_path: Path,
    tokenizer: Tokenizer,
    test: Callable[[Cluster, InferenceClient], Coroutine[Any, Any, None]],
    engines: int = 2,
    seconds: float = 60,
    **options: Any,
) -> None:
    async def main() -> None:
        cluster = Cluster(f"ipc://{tmp_path}/socket", tokenizer, **options)
        try:
            for _ in range(engines):
                cluster.engine()
            await cluster.ready(engines)
            async with InferenceClient(cluster.endpoint, retry=options.get("retry", True)) as client:
                await asyncio.wait_for(test(cluster, client), seconds)
        finally:
            await cluster.end()

    asyncio.run(main())


def request(number: int, *, tokens: int = 40, **more: Any) -> EngineRequest:
    prompt = [token % 250 for token in range(number, number + 5 + number % 7)]
    return EngineRequest(id=f"r{number}", prompt=prompt, max_new_tokens=tokens, seed=1000 + number, **more)


def alone(requested: EngineRequest, tokenizer: Tokenizer) -> tuple[str, list[int], Any, Any]:
    """What a single engine gives."""
    loop = EngineLoop(FakeEngine(), tokenizer)  # type: ignore[arg-type]
    loop.add(requested)
    outputs = []
    while not loop.idle:
        outputs += loop.step()
    return joined(outputs)


def joined(outputs: list[EngineOutput]) -> tuple[str, list[int], Any, Any]:
    assert not any(output.last for output in outputs[:-1])
    last = outputs[-1]
    tokens = [token for output in outputs for token in output.tokens]
    log_probs = [each for output in outputs for each in output.log_probs or []]
    return "".join(output.text for output in outputs), tokens, last.reason, log_probs


async def answer(client: InferenceClient, requested: EngineRequest) -> tuple[str, list[int], Any, Any]:
    return joined([output async for output in client.submit(requested)])


def mixed(count: int, tokens: int = 40) -> list[EngineRequest]:
    """Plain ones, some with stop texts, end tokens or log-probabilities."""
    more: list[dict[str, Any]] = [{}, {"stop": ["a", "東"]}, {"ends": [5, 80]}, {"log_probs": True}]
    return [request(number, tokens=tokens, **more[number % 4]) for number in range(count)]


def test_answers_are_those_of_a_single_engine(tmp_path: Path, tokenizer: Tokenizer) -> None:
    requests = mixed(40)

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        found = await asyncio.gather(*(answer(client, each) for each in requests))
        assert found == [alone(each, tokenizer) for each in requests]
        counts = [len(loop.engine.prompts) for loop in cluster.loops]  # type: ignore[attr-defined]
        assert sum(counts) == 40
        assert min(counts) >= 8, "load is shared"
        assert client.unfinished == 0

    run(tmp_path, tokenizer, test, engines=3)


@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.full)])
def test_engines_that_die_lose_nothing(tmp_path: Path, tokenizer: Tokenizer, kills: int) -> None:
    requests = mixed(24, tokens=15 * kills)

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        answers = asyncio.gather(*(answer(client, each) for each in requests))
        chosen = random.Random(3)
        for _ in range(kills):
            await asyncio.sleep(0.08)
            await cluster.kill_engine(chosen.randrange(len(cluster.loops)))
            cluster.engine()
        assert await answers == [alone(each, tokenizer) for each in requests]

    run(tmp_path, tokenizer, test, engines=3)


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.full)])
def test_a_coordinator_that_dies_loses_nothing(tmp_path: Path, tokenizer: Tokenizer, kills: int) -> None:
    requests = mixed(16, tokens=50 * kills)

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        answers = asyncio.gather(*(answer(client, each) for each in requests))
        for _ in range(kills):
            await asyncio.sleep(0.1)
            await cluster.kill_coordinator()
            await asyncio.sleep(0.05)
            cluster.start()
        assert await answers == [alone(each, tokenizer) for each in requests]
        await cluster.ready(2)

    run(tmp_path, tokenizer, test)


def test_without_retry_the_client_is_told_soon(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def test(cluster: Cluster, client: InferenceClient) -> None:
        lost = asyncio.create_task(answer(client, request(1, tokens=10_000)))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await cluster.kill_engine(0)
        with pytest.raises(MegalightError, match="engine of the request is gone"):
            await lost
        assert time.monotonic() - start < 2
        cluster.engine()
        await cluster.ready(1)
        lost = asyncio.create_task(answer(client, request(2, tokens=10_000)))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await cluster.kill_coordinator()
        with pytest.raises(MegalightError, match="coordinator is gone"):
            await lost
        assert time.monotonic() - start < 2

    run(tmp_path, tokenizer, test, engines=1, retry=False)


def test_states_in_any_order_under_load_never_hang(tmp_path: Path, tokenizer: Tokenizer) -> None:
    requests = mixed(16, tokens=60)
    after = {"pause": {"PAUSED", "SUSPENDED"}, "suspend": {"SUSPENDED"}, "resume": {"RUNNING"}}

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        answers = asyncio.gather(*(answer(client, each) for each in requests))
        chosen = random.Random(5)
        for step in range(30):
            name = chosen.choice(["pause", "unpause", "suspend", "resume"])
            state = await getattr(client, name)()
            assert state in after.get(name, {"RUNNING", "SUSPENDED"})
            if state in ("PAUSED", "SUSPENDED"):
                steps = [loop.engine.steps for loop in cluster.loops]  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
                assert steps == [loop.engine.steps for loop in cluster.loops], "no engine steps"  # type: ignore[attr-defined]
                assert all(loop.engine.suspended == (state == "SUSPENDED") for loop in cluster.loops)
            if step == 15:
                await cluster.kill_engine(0)
                cluster.engine()
        # Several at once, of which each is answered.
        many = await asyncio.gather(client.pause(), client.suspend(), client.resume(), client.resume())
        assert many == ["PAUSED", "SUSPENDED", "RUNNING", "RUNNING"]
        assert await answers == [alone(each, tokenizer) for each in requests]
        endless = asyncio.create_task(answer(client, request(99, tokens=100_000)))
        await asyncio.sleep(0.05)
        assert await client.stop() == "STOPPED"
        with pytest.raises(MegalightError, match="stopped"):
            await endless
        await asyncio.gather(*cluster.workers)

    run(tmp_path, tokenizer, test)


def test_a_new_engine_comes_into_the_state_of_the_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def test(cluster: Cluster, client: InferenceClient) -> None:
        assert await client.suspend() == "SUSPENDED"
        loop = cluster.engine()
        await cluster.ready(3)
        task = asyncio.create_task(answer(client, request(1)))
        await asyncio.sleep(0.1)
        assert (loop.paused, loop.engine.suspended, task.done()) == (True, True, False)
        assert await client.resume() == "RUNNING"
        assert await task == alone(request(1), tokenizer)
        assert not loop.paused

    run(tmp_path, tokenizer, test)


class FakeWeights:
    """Weights that are read by their name; ``bad`` ones are refused."""

    def __init__(self) -> None:
        self.read_from: list[str] = []

    def check(self, weights: str) -> None:
        if weights == "bad":
            raise CheckpointError("bad is of another model")

    def read(self, weights: str) -> None:
        self.check(weights)
        self.read_from.append(weights)


def test_all_engines_have_new_weights_or_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    requests = mixed(16, tokens=200)

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        weights = [FakeWeights() for _ in range(3)]
        for loop, each in zip(cluster.loops, weights, strict=False):
            loop._weights = each  # type: ignore[assignment]
        answers = asyncio.gather(*(answer(client, each) for each in requests))
        await asyncio.sleep(0.05)
        with pytest.raises(CheckpointError, match="bad is of another model"):
            await client.update_weights("bad")
        assert await client.update_weights("first") == 1
        assert [each.read_from for each in weights] == [["first"], ["first"], []]
        assert [loop.engine.resets for loop in cluster.loops] == [1, 1]  # type: ignore[attr-defined]
        # One that comes later reads them first, also from a coordinator that has come after the engines.
        await cluster.kill_coordinator()
        cluster.start()
        await cluster.ready(2)
        cluster.engine()._weights = weights[2]  # type: ignore[assignment]
        await cluster.ready(3)
        assert await client.pause() == "PAUSED"
        assert weights[2].read_from == ["first"]
        waits = asyncio.create_task(answer(client, request(77)))
        with pytest.raises(ConfigurationError, match="wait for a resume"):
            await client.update_weights("second", wait=True)
        assert await client.update_weights("second") == 2
        assert (cluster.coordinator.state, waits.done()) == ("PAUSED", False)
        assert await client.resume() == "RUNNING"
        assert await answers == [alone(each, tokenizer) for each in requests]
        assert await waits == alone(request(77), tokenizer)
        # Those that run end with the old ones, and others wait.
        epochs: dict[int, set[int]] = {}

        async def one(number: int) -> None:
            outputs = [output async for output in client.submit(request(number, tokens=60))]
            epochs[number] = {output.weights_epoch for output in outputs}

        engines: list[Any] = [loop.engine for loop in cluster.loops]
        for engine in engines:
            engine._seconds = 0.2
        before = [asyncio.create_task(one(number)) for number in range(100, 106)]
        async with asyncio.timeout(20):
            while sum(len(engine.unfinished) for engine in engines) < 6:
                await asyncio.sleep(0.001)
        update = asyncio.create_task(client.update_weights("third", wait=True))
        async with asyncio.timeout(20):
            while not cluster.coordinator._draining:
                await asyncio.sleep(0.001)
        for engine in engines:
            engine._seconds = 0.001
        after = [asyncio.create_task(one(number)) for number in range(106, 112)]
        assert await update == 3
        await asyncio.gather(*before, *after)
        assert [epochs[number] for number in range(100, 112)] == [{2}] * 6 + [{3}] * 6
        assert [each.read_from[-1] for each in weights] == ["third"] * 3

    run(tmp_path, tokenizer, test)


def test_whoever_leaves_or_is_gone_frees_its_requests(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def test(cluster: Cluster, client: InferenceClient) -> None:
        async def idle() -> None:
            async with asyncio.timeout(2):
                while any(loop.engine.unfinished for loop in cluster.loops):
                    await asyncio.sleep(0.005)

        stream = client.submit(request(1, tokens=100_000))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await idle()
        other = InferenceClient(cluster.endpoint)
        await other.__aenter__()
        tasks = [asyncio.create_task(answer(other, request(number, tokens=100_000))) for number in range(6)]
        await asyncio.sleep(0.1)
        assert sum(len(loop.engine.unfinished) for loop in cluster.loops) == 6
        await other.__aexit__()
        assert all(isinstance(each, MegalightError) for each in await asyncio.gather(*tasks, return_exceptions=True))
        await idle()

    run(tmp_path, tokenizer, test)


@asynccontextmanager
async def dealer(cluster: Cluster) -> AsyncIterator[Any]:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(cluster.endpoint)
    yield socket
    socket.close()


def test_an_id_that_comes_twice_is_answered_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def test(cluster: Cluster, client: InferenceClient) -> None:
        async with dealer(cluster) as socket:
            for _ in range(3):
                await socket.send(encode(SubmitRequest(RequestFields.of(request(1, tokens=10)))))
            tokens = list[int]()
            while len(tokens) < 10:
                tokens += decode_for_client(await asyncio.wait_for(socket.recv(), 5)).outputs[0].tokens  # type: ignore[union-attr]
            # Once more, after it has ended.
            await socket.send(encode(SubmitRequest(RequestFields.of(request(1, tokens=10)))))
            assert await socket.poll(200) == 0
        assert tokens == alone(request(1, tokens=10), tokenizer)[1]
        assert cluster.coordinator.duplicates == 3

    run(tmp_path, tokenizer, test)


@pytest.mark.parametrize("count", [3000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_frames_that_are_none_are_dropped(tmp_path: Path, tokenizer: Tokenizer, count: int) -> None:
    requests = mixed(8, tokens=100)

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        answers = asyncio.gather(*(answer(client, each) for each in requests))
        chosen = random.Random(7)
        good = [
            encode(each)
            for each in (
                SubmitRequest(RequestFields.of(request(1))),
                Connect(),
                Control("PAUSE", 1),
                Hello(1),
                EngineReply(1, [Output("x", "text", [1, 2])]),
            )
        ]
        async with dealer(cluster) as socket:
            sent = 0
            for number in range(count):
                frame = bytearray(chosen.choice(good[:3] if number % 2 else good[4:]))
                for _ in range(chosen.randrange(1, 8)):
                    frame[chosen.randrange(len(frame))] = chosen.randrange(256)
                try:
                    message = coordinating.decode_for_coordinator(bytes(frame))
                except (ValueError, RecursionError):
                    await socket.send(bytes(frame))
                    sent += 1
                else:
                    if isinstance(message, EngineReply):
                        await socket.send(bytes(frame))  # of an engine that nobody knows
            await socket.send(b"\x91" * 100_000)
            await socket.send_multipart([b"a", b"b", b"c"])
            await socket.send(b"")
            async with asyncio.timeout(5 + count / 1000):
                while cluster.coordinator.dropped["malformed"] < sent + 3:
                    await asyncio.sleep(0.01)
        assert sent > count // 3
        async with dealer(cluster) as socket:
            await socket.send(bytes(LARGEST + 1))  # its connection ends
        assert await answers == [alone(each, tokenizer) for each in requests]
        assert await client.pause() == "PAUSED"
        assert cluster.coordinator.dropped["malformed"] == sent + 3

    run(tmp_path, tokenizer, test, seconds=60 + count / 500)


def test_requests_go_where_their_beginning_was_unless_that_is_busy(tmp_path: Path, tokenizer: Tokenizer) -> None:
    system = [[(7 * place + k) % 250 for k in range(256)] for place in range(4)]

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        def ask(number: int, prompt: list[int], tokens: int = 2) -> Any:
            return answer(client, EngineRequest(id=str(number), prompt=prompt, max_new_tokens=tokens, seed=number))

        def had(place: int, first: list[int]) -> int:
            prompts = cluster.loops[place].engine.prompts  # type: ignore[attr-defined]
            return sum(prompt[: len(first)] == first for prompt in prompts)

        for number in range(24):
            await ask(number, [*system[number % 4], number])
        spread = [[had(place, each) for place in range(2)] for each in system]
        assert all(sorted(each) == [0, 6] for each in spread), "all with the same beginning on one engine"
        assert sum(each[0] for each in spread) == 12, "and as many beginnings on each"
        # One beginning for all: after a while the other engine takes some, too.
        await asyncio.gather(*(ask(100 + number, [*system[0], number], 30) for number in range(16)))
        assert min(had(place, system[0]) for place in range(2)) > 0

    run(tmp_path, tokenizer, test)


def test_two_replicas_of_a_model_answer_as_one(tmp_path: Path, tokenizer: Tokenizer, folder: Path) -> None:
    texts = ["user: hello", "naïve", "東京 🙂", "assistant: "]
    greedy = SamplingParams(temperature=0)
    llm = LLM(folder, device="cpu")
    expected = llm.generate(texts, greedy, max_new_tokens=20, log_probs=True)

    async def test(cluster: Cluster, client: InferenceClient) -> None:
        replicas = [LLM(folder, device="cpu").served.loop for _ in range(2)]
        for loop in replicas:
            cluster.engine(loop.engine)
        await cluster.ready(2)
        ids = [llm.served.ids_of(text) for text in texts]
        requests = [
            EngineRequest(
                id=f"{number}",
                prompt=ids[number % 4],
                max_new_tokens=20,
                sampling_params=greedy,
                ends=llm.served.ends,
                log_probs=number % 2 == 0,
            )
            for number in range(12)
        ]
        answers = asyncio.gather(*(answer(client, each) for each in requests))
        await asyncio.sleep(0.02)
        assert await client.suspend() == "SUSPENDED"
        assert await client.resume() == "RUNNING"
        for number, (text, tokens, reason, log_probs) in enumerate(await answers):
            known = expected[number % 4]
            assert (text, tokens, reason) == (known.text, known.tokens, known.reason)
            if number % 2 == 0:
                assert log_probs == pytest.approx(known.log_probs, abs=1e-5)
        with pytest.raises(DataError, match="max_sequence_length"):
            await answer(client, EngineRequest(id="long", prompt=[1] * 500, max_new_tokens=5))
        assert all(loop.engine.blocks.free == loop.engine.blocks.count for loop in cluster.loops)

    run(tmp_path, tokenizer, test, engines=0)


def test_over_tcp_only_those_with_the_keys_get_in(tmp_path: Path, tokenizer: Tokenizer) -> None:
    keys, others = CurveKeys.create(tmp_path / "keys"), CurveKeys.create(tmp_path / "others")
    assert CurveKeys.load(tmp_path / "keys") == keys
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    (tmp_path / "mixed").write_bytes(keys.public + b" " + others.secret)
    for path, message in (("keys", "cannot be written"), ("none", "cannot be read"), ("mixed", "holds no keys")):
        with pytest.raises(ConfigurationError, match=message):
            (CurveKeys.create if path == "keys" else CurveKeys.load)(tmp_path / path)
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def main() -> None:
        coordinator = DataParallelInferenceCoordinator(endpoint, keys=keys)
        thread = threading.Thread(target=coordinator.run, daemon=True)
        thread.start()
        loop = EngineLoop(FakeEngine(), tokenizer)  # type: ignore[arg-type]
        worker = asyncio.create_task(EngineWorker(loop, endpoint, keys=keys).run())
        # One knows the public key alone, as if it had been told; one has other keys; one has none.
        strangers = [CurveKeys(keys.public, others.secret), others]
        sockets = [zmq.asyncio.Context.instance().socket(zmq.DEALER) for _ in range(3)]
        for socket, stranger in zip(sockets, strangers, strict=False):
            stranger.credentials(socket)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(stranger.secret))
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        for socket in sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            await socket.send(encode(Control("STOP", 1)))
        async with InferenceClient(endpoint, keys=keys) as client:
            assert await answer(client, request(1)) == alone(request(1), tokenizer)
            await asyncio.sleep(0.2)
            assert await client.pause() == "PAUSED", "nobody has stopped it"
            assert await client.stop() == "STOPPED"
        assert [await socket.poll(0) for socket in sockets] == [0, 0, 0]
        for socket in sockets:
            socket.close()
        await worker
        await asyncio.to_thread(thread.join)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_half_handshakes_and_replays_over_tcp_reach_nobody(
    tmp_path: Path, tokenizer: Tokenizer, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (coordinating, inference_client):
        monkeypatch.setattr(module, "SILENCE", 20.0)  # nobody is gone: all that is dropped is of strangers
    keys, recorded, chosen = CurveKeys.create(tmp_path / "keys"), bytearray(), random.Random(11)
    port, way = free_port(), free_port()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            if kept is not None:
                kept += data
        writer.close()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back, recorded), copy(there, writer, None))

    def strange() -> bytes:
        data = bytearray(recorded)
        kind = chosen.randrange(5)
        if kind == 0:  # half a handshake
            return bytes(data[: chosen.randrange(1, 600)])
        if kind == 1:  # all that a client with the keys has sent
            return bytes(data)
        if kind == 2:
            for _ in range(chosen.randrange(1, 8)):
                data[chosen.randrange(600)] = chosen.randrange(256)
            return bytes(data)
        if kind == 3:  # the greeting, and a frame of 2 ** 62 bytes
            return bytes(data[:64]) + b"\x06" + (2**62).to_bytes(8) + chosen.randbytes(1000)
        return chosen.randbytes(chosen.randrange(1, 2000))

    async def stranger() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(strange())
        with contextlib.suppress(ConnectionError, TimeoutError):
            await writer.drain()
            while await asyncio.wait_for(reader.read(4096), 0.1):
                pass  # what it answers, until it ends or says no more
        writer.close()

    async def main() -> None:
        endpoint = f"tcp://127.0.0.1:{port}"
        coordinator = DataParallelInferenceCoordinator(endpoint, keys=keys)
        thread = threading.Thread(target=coordinator.run, daemon=True)
        thread.start()
        loop = EngineLoop(FakeEngine(0.001), tokenizer)  # type: ignore[arg-type]
        worker = asyncio.create_task(EngineWorker(loop, endpoint, keys=keys).run())
        recorder = await asyncio.start_server(record, "127.0.0.1", way)
        async with InferenceClient(f"tcp://127.0.0.1:{way}", keys=keys) as client:
            assert await answer(client, request(1)) == alone(request(1), tokenizer)
        recorder.close()
        assert len(recorded) > 600
        requests = mixed(8, tokens=100)
        async with InferenceClient(endpoint, keys=keys) as client:
            answers = asyncio.gather(*(answer(client, each) for each in requests))
            for _ in range(count // 20):
                await asyncio.gather(*(stranger() for _ in range(20)))
            assert await answers == [alone(each, tokenizer) for each in requests]
            assert await answer(client, request(99)) == alone(request(99), tokenizer)
            assert len(loop.engine.prompts) == 10  # type: ignore[attr-defined]
            assert not coordinator.dropped
            assert not coordinator.duplicates
            assert await client.stop() == "STOPPED"
        await worker
        await asyncio.to_thread(thread.join)

    asyncio.run(asyncio.wait_for(main(), 60 + count / 5))


def test_what_an_engine_cannot_read_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def test(cluster: Cluster, client: InferenceClient) -> None:
        for params in ({"heat": 1}, {"temperature": "hot"}):
            fields = RequestFields("bad", [1], 3, params)
            async with dealer(cluster) as socket:
                await socket.send(encode(SubmitRequest(fields)))
                reply = decode_for_client(await asyncio.wait_for(socket.recv(), 5))
                assert reply.outputs[0].error[0] == "configuration"  # type: ignore[union-attr, index]
        hot = request(1, sampling_params=SamplingParams(temperature=2.0, logit_bias={3: -math.inf}))
        assert await answer(client, hot) == alone(hot, tokenizer)

    run(tmp_path, tokenizer, test)


def test_a_coordinator_starts_without_torch_and_an_engine_without_lightning(folder: Path) -> None:
    code = (
        "import sys, megalight.serving.coordinator\n"
        "assert 'torch' not in sys.modules\n"
        "import megalight.serving.replicas, megalight.serving.server\n"
        "megalight.serving.ServedModel.from_checkpoint(sys.argv[1], device='cpu').loop\n"
        "assert 'lightning' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_an_endpoint_that_others_reach_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be ipc"):
        DataParallelInferenceCoordinator("pgm://0.0.0.0:5000")
    with pytest.raises(ConfigurationError, match="needs keys"):
        DataParallelInferenceCoordinator("tcp://0.0.0.0:5000")
    with pytest.raises(ConfigurationError, match="needs keys"):
        InferenceClient("tcp://127.0.0.1:5000")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        DataParallelInferenceCoordinator("ipc:///nonexistent/folder/socket")


def test_engines_that_were_suspended_run_for_a_new_coordinator(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def test(cluster: Cluster, client: InferenceClient) -> None:
        assert await client.suspend() == "SUSPENDED"
        await cluster.kill_coordinator()
        cluster.start()
        await cluster.ready(2)
        for number in range(4):
            outputs = [output async for output in client.submit(request(number))]
            assert [token for output in outputs for token in output.tokens] == alone(request(number), tokenizer)[1]

    run(tmp_path, tokenizer, test)


def test_engines_that_share_experts_are_gone_together(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async def test(cluster: Cluster, client: InferenceClient) -> None:
        for _ in range(2):
            cluster.engine(group="experts")
        await cluster.ready(3)

        async def tokens(number: int) -> list[int]:
            return [token async for output in client.submit(request(number)) for token in output.tokens]

        tasks = [asyncio.create_task(tokens(number)) for number in range(9)]
        await asyncio.sleep(0.02)
        await cluster.kill_engine(1)
        found = await asyncio.gather(*tasks)
        assert found == [alone(request(number), tokenizer)[1] for number in range(9)]
        await cluster.ready(2)
        assert cluster.coordinator.dropped["unknown engine"], "the other one has come again"

    run(tmp_path, tokenizer, test, engines=1)
