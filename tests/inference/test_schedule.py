"""What runs in a step, for any requests and any pool."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalight.inference import BlockPool, Cache
from megalight.inference.scheduler import Request, Scheduler


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=8),
    st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.integers(0, 6)),
    st.booleans(),
)
# The second gives its block back for a second one, finds that the first has an equal one, and goes on at once.
@example([(1, 2, 0), (1, 3, 0)], (2, 2, 1, 0), False)
def test_every_request_ends_whoever_comes_when(requests, sizes, states):
    """Requests: length of the prompt, new tokens, the step in which it comes. All of their tokens are equal."""
    slots, step_tokens, block_size, spare = sizes
    count = max(-(-(prompt + new - 1) // block_size) for prompt, new, _ in requests) + spare
    blocks = BlockPool(slots, count, block_size, snapshots=2)
    kept: dict[int, int] = {}
    schedule = Scheduler(Cache({}, slots, 100, blocks), step_tokens, states)
    arrivals = sorted(enumerate(requests), key=lambda each: each[1][2])
    number, step, left = 0, 0, len(requests)
    while left:
        for _, (prompt, new, when) in arrivals:
            if when == step:
                schedule.waiting.append(Request(number, [0] * prompt, prompt, new))
                number += 1
        step += 1
        assert step < 1000, "the requests never end"
        idle = not schedule.running and not schedule.waiting
        before = {request: schedule.unread(request) for request in (*schedule.running, *schedule.waiting)}
        plan = schedule.plan()
        assert bool(plan.counts) != idle
        if idle:
            continue
        assert sum(plan.counts.values()) <= step_tokens
        # The oldest are those that run, and each is in one place.
        order = [request.number for request in (*schedule.running, *schedule.waiting)]
        assert order == sorted({*order})
        assert not {*plan.preempted} & {*plan.counts}
        assert {*plan.counts} <= {*schedule.running}
        # Older texts run their newest token in every step that has room for it: a long prompt stops no one.
        # Texts go on from what they share: with states, from one that was kept at its end.
        assert [kept[source] for source, _ in plan.restored] == ([*plan.shared.values()] if states else [])
        assert [target for _, target in plan.restored] == ([request.slot for request in plan.shared] if states else [])
        before |= {request: len(request.tokens) - count for request, count in plan.shared.items()}
        assert min(before.values()) > 0, "a text without a token to run"
        parts = [request for request, count in plan.counts.items() if count < before[request]]
        assert parts in ([], schedule.running[-1:])
        assert [*plan.counts] == schedule.running[: len(plan.counts)]
        assert len(plan.counts) == min(len(schedule.running), step_tokens)
        schedule.cache.extend([request.slot for request in plan.counts], list(plan.counts.values()), "cpu")
        kept |= {target: schedule.cache.lengths[source] for source, target in plan.kept}
        for request in plan.counts:
            if not schedule.unread(request):
                request.take(0, None)
                if request.ended():
                    schedule.end(request)
                    left -= 1
    assert blocks.free == count
    assert schedule.cache.lengths == [0] * slots
