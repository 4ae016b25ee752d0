"""What the ops share: backends that find magnitudes on their way."""

from __future__ import annotations

from megalight.ops.common import choose_measured, measuring, serve_all
from megalight.registry import Backend, BackendRegistry


def test_a_name_asks_for_magnitudes_and_a_backend_that_can_finds_them() -> None:
    registry: BackendRegistry = BackendRegistry("negate")

    def finds(x: int, measure: bool = False) -> tuple[int, bool]:
        return -x, measure

    def cannot(x: int) -> tuple[int, None]:
        return -x, None

    finds.measures = True  # type: ignore[attr-defined]
    registry.register(Backend("finds", finds, 1, serve_all))
    registry.register(Backend("cannot", cannot, 0, serve_all))
    for name, expected in (("auto", False), ("auto+amax", True), ("finds+amax", True), ("cannot+amax", None)):
        assert choose_measured(registry, None, name)(3) == (-3, expected)
    assert [measuring("auto"), measuring("auto+amax"), measuring("auto+amax", wanted=False)] == [
        "auto+amax",
        "auto+amax",
        "auto",
    ]
