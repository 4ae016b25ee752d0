"""The queue of Python 3.13, also in older ones; and the event loop of code that has none."""

from __future__ import annotations

import asyncio
import threading

import pytest

from megalight.serving.asynchronous import Queue, QueueShutDown, get_asyncio_loop


def run(test: object) -> None:
    asyncio.run(asyncio.wait_for(test(), 5))  # type: ignore[operator]


def test_items_come_in_order_and_a_full_queue_waits() -> None:
    async def test() -> None:
        queue = Queue[int](2)
        got = list[int]()

        async def take() -> None:
            got.extend([await queue.get() for _ in range(20)])

        async def give(first: int) -> None:
            for item in range(first, first + 10):
                await queue.put(item)

        await asyncio.gather(take(), give(0), give(100))
        assert sorted(got) == [*range(10), *range(100, 110)]
        assert [item for item in got if item < 100] == [*range(10)]
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()
        queue.put_nowait(1)
        queue.put_nowait(2)
        with pytest.raises(asyncio.QueueFull):
            queue.put_nowait(3)

    run(test)


def test_a_graceful_shutdown_lets_all_take_what_is_left() -> None:
    async def test() -> None:
        queue = Queue[int](2)
        for item in (1, 2):
            await queue.put(item)
        blocked = asyncio.create_task(queue.put(3))
        await asyncio.sleep(0)
        queue.shutdown()
        queue.shutdown()
        with pytest.raises(QueueShutDown):
            await blocked
        with pytest.raises(QueueShutDown):
            queue.put_nowait(4)
        assert (await queue.get(), queue.get_nowait()) == (1, 2)
        for _ in range(2):
            with pytest.raises(QueueShutDown):
                await queue.get()
            with pytest.raises(QueueShutDown):
                queue.get_nowait()
        queue.task_done()
        queue.task_done()
        await queue.join()

    run(test)


def test_an_immediate_shutdown_drops_all_and_wakes_everyone() -> None:
    async def test() -> None:
        waiting = Queue[int]()
        getters = [asyncio.create_task(waiting.get()) for _ in range(3)]
        full = Queue[int](1)
        await full.put(1)
        putters = [asyncio.create_task(full.put(item)) for item in range(3)]
        joined = asyncio.create_task(full.join())
        await asyncio.sleep(0)
        waiting.shutdown(immediate=True)
        full.shutdown(immediate=True)
        found = await asyncio.gather(*getters, *putters, return_exceptions=True)
        assert [type(each) for each in found] == [QueueShutDown] * 6
        await joined
        with pytest.raises(QueueShutDown):
            full.get_nowait()

    run(test)


def test_a_cancelled_getter_leaves_its_item_to_another() -> None:
    async def test() -> None:
        queue = Queue[int]()
        first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put_nowait(1)
        first.cancel()
        assert await second == 1

    run(test)


def test_the_event_loop_is_the_running_one_or_a_new_one_that_stays() -> None:
    async def inside() -> None:
        assert get_asyncio_loop() is asyncio.get_running_loop()

    run(inside)
    found = list[object]()

    def outside() -> None:
        loop = get_asyncio_loop()
        found.extend([get_asyncio_loop() is loop, get_asyncio_loop(loop) is loop])
        assert loop.run_until_complete(asyncio.sleep(0, 3)) == 3
        loop.close()
        new = get_asyncio_loop()
        found.append(new is not loop and not new.is_closed())
        new.close()

    thread = threading.Thread(target=outside)
    thread.start()
    thread.join()
    assert found == [True, True, True]
