import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megalight import registry
from megalight.errors import BackendError, MegalightError
from megalight.registry import PLUGIN_GROUP, Backend, BackendRegistry, Registry, load_plugins, remembered


class Entry:
    """What ``importlib.metadata`` finds of an installed plugin."""

    def __init__(self, name: str, load: Callable[[], object]) -> None:
        self.name, self.load, self.value = name, load, f"{name}.module"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install plugins for one test: ``install(Entry(...), ...)``."""

    def use(*entries: Entry) -> None:
        asked = lambda group: entries if group == PLUGIN_GROUP else ()  # noqa: E731
        monkeypatch.setattr(importlib.metadata, "entry_points", asked)
        registry._plugin_entries.cache_clear()

    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "SOURCES", Path("nowhere"))
    yield use
    registry._plugin_entries.cache_clear()


def backends() -> BackendRegistry[int, Callable[[], str]]:
    """A slow backend that serves all, a fast one that serves even numbers, and one that serves nothing."""
    made: BackendRegistry[int, Callable[[], str]] = BackendRegistry("doubling")
    made.register(Backend("reference", lambda: "slow", 0, lambda spec: None))
    made.register(Backend("fast", lambda: "fast", 10, lambda spec: "odd" if spec % 2 else None))
    made.register(Backend("absent", lambda: "never", 20, lambda spec: "package 'swift' is not installed"))
    return made


def test_registry_holds_what_was_registered() -> None:
    kinds: Registry[type] = Registry("dough")

    @kinds.register("rye")
    class Rye:
        pass

    kinds.register("wheat")(int)
    assert kinds["rye"] is Rye
    assert list(kinds) == ["rye", "wheat"]
    assert "rye" in kinds
    assert "spelt" not in kinds


def test_a_second_entry_of_a_name_raises() -> None:
    kinds: Registry[int] = Registry("dough")
    kinds.register("rye")(1)
    with pytest.raises(MegalightError, match="dough 'rye' is already registered"):
        kinds.register("rye")(2)
    assert kinds["rye"] == 1


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    kinds: Registry[int] = Registry("dough")
    with pytest.raises(MegalightError, match=r"unknown dough 'rye'; known: none\."):
        kinds["rye"]
    kinds.register("wheat")(1)
    kinds.register("spelt")(2)
    with pytest.raises(MegalightError, match=r"known: spelt, wheat\. Did you mean 'wheat'\?"):
        kinds["weat"]


def test_auto_takes_the_first_that_can_serve() -> None:
    assert backends().select(2).name == "fast"
    assert backends().select(3).name == "reference"


def test_a_named_backend_serves_or_raises_with_every_reason() -> None:
    made = backends()
    assert made.select(2, "reference").fn() == "slow"
    with pytest.raises(BackendError) as caught:
        made.select(3, "fast")
    assert str(caught.value) == (
        "backend 'fast' of doubling cannot serve 3. Backends: absent: package 'swift' is not installed; fast: odd; "
        "reference: can serve."
    )


def test_an_unknown_backend_is_told_with_the_nearest() -> None:
    with pytest.raises(BackendError, match=r"doubling has no backend 'fasst'.*Did you mean 'fast'\?"):
        backends().select(2, "fasst")


def test_nobody_can_serve() -> None:
    made: BackendRegistry[int, Callable[[], str]] = BackendRegistry("doubling")
    made.register(Backend("fast", lambda: "fast", 10, lambda spec: "odd"))
    with pytest.raises(BackendError, match=r"backend 'auto' of doubling cannot serve 3\. Backends: fast: odd"):
        made.select(3)


def test_a_second_backend_of_a_name_raises() -> None:
    made = backends()
    with pytest.raises(MegalightError, match="backend 'fast' of doubling is already registered"):
        made.register(Backend("fast", lambda: "", 1, lambda spec: None))


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megalight.registry")
    made = backends()
    for spec in (2, 4, 6):
        made.select(spec)
    made.select(2, "fast")
    assert [record.getMessage() for record in caplog.records if "doubling" in record.getMessage()] == [
        "doubling: backend fast (asked for auto)",
        "doubling: backend fast (asked for fast)",
    ]


def test_table_is_ordered_by_priority() -> None:
    assert [(backend.name, reason) for backend, reason in backends().table(3)] == [
        ("absent", "package 'swift' is not installed"),
        ("fast", "odd"),
        ("reference", None),
    ]


@pytest.mark.parametrize("ask", [lambda kinds: kinds["oat"], lambda kinds: "oat" in kinds, list])
def test_plugins_are_loaded_when_a_registry_is_asked(
    ask: Callable[[Registry[str]], object], install: Callable[..., None]
) -> None:
    kinds: Registry[str] = Registry("dough")

    def plugin() -> None:
        assert "wheat" not in kinds  # asking a registry while loading does not load again
        kinds.register("oat")("oats")

    install(Entry("bakery", lambda: plugin))
    assert ask(kinds) in ("oats", True, ["oat"])
    assert kinds["oat"] == "oats"


def test_plugins_add_backends(install: Callable[..., None]) -> None:
    made = backends()
    better = Backend("better", lambda: "better", 50, lambda spec: None)
    asked: list[int] = []
    other = Backend("other", lambda: "other", 60, lambda spec: asked.append(spec) or "no oven")
    install(Entry("bakery", lambda: lambda: [made.register(each) for each in (better, other)]))
    assert made.select(2).name == "fast", "nothing is switched on just by being installed"
    assert not registry._loaded, "nor imported"
    assert not asked, "a plugin that nobody named is not even asked"
    assert made.select(2, "better").plugin == "bakery"
    assert made.select(2, "fast").plugin is None
    with pytest.raises(BackendError, match=r"other: no oven; better: can serve if you ask for it by name; absent: .*"):
        made.select(2, "other")


def test_a_plugin_that_has_the_name_asked_for_is_loaded_alone(install: Callable[..., None]) -> None:
    made = backends()
    oven = Backend("oven", lambda: "oven", 0, lambda spec: None)
    stone = Backend("stone", lambda: "stone", 0, lambda spec: None)
    install(Entry("quarry", lambda: lambda: made.register(stone)), Entry("oven", lambda: lambda: made.register(oven)))
    assert made.select(2, "oven").plugin == "oven"
    assert list(registry._loaded) == ["oven"]
    made.prefer("stone")
    assert made.select(2).plugin == "quarry"


def test_auto_passes_a_built_in_backend_that_says_when_it_is_slower() -> None:
    made = backends()
    made.register(
        Backend("third", lambda: "third", 30, lambda spec: None, slower=lambda spec: "odd" if spec % 3 else None)
    )
    assert [made.select(spec).name for spec in (2, 3)] == ["fast", "third"]
    assert made.select(2, "third").name == "third"


def test_auto_can_be_a_named_backend() -> None:
    made = backends()
    calls: list[tuple[int, str]] = []

    @remembered
    def choose(spec: int, name: str = "auto") -> str:
        calls.append((spec, name))
        return made.select(spec, name).name

    assert [choose(2), choose(2), choose(3)] == ["fast", "fast", "reference"]
    assert calls == [(2, "auto"), (3, "auto")]
    made.prefer("reference")
    assert [choose(2), choose(2, "fast")] == ["reference", "fast"]
    made.prefer("fast")
    with pytest.raises(BackendError, match="backend 'fast' of doubling cannot serve 3"):
        choose(3)
    made.prefer("auto")
    assert choose(2) == "fast"
    with pytest.raises(BackendError, match=r"has no backend 'fasst'; it has absent, fast, reference\. Did you mean"):
        made.prefer("fasst")


def test_a_broken_plugin_is_named_and_harms_nobody(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    kinds: Registry[str] = Registry("dough")

    def broken() -> object:
        raise RuntimeError("no oven")

    install(Entry("cold", broken), Entry("bakery", lambda: lambda: kinds.register("oat")("oats")))
    assert kinds["oat"] == "oats"
    assert load_plugins() == {"cold": "RuntimeError: no oven", "bakery": None}
    assert [record.getMessage() for record in caplog.records] == [
        "plugin cold could not be loaded and is ignored: RuntimeError: no oven"
    ]


def test_a_plugin_is_loaded_once(install: Callable[..., None]) -> None:
    calls: list[int] = []
    install(Entry("bakery", lambda: lambda: calls.append(1)))
    load_plugins()
    load_plugins()
    assert calls == [1]


def test_plugins_of_the_sources_need_no_metadata(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    assert not registry._plugin_entries()
    monkeypatch.undo()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    registry._plugin_entries.cache_clear()
    found = registry._plugin_entries()
    assert {"transformer_engine", "apex", "flash_attn"} <= found.keys()
    assert callable(found["apex"].load())

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: tuple(found.values()))
    registry._plugin_entries.cache_clear()
    assert registry._plugin_entries() == found
    assert not caplog.records, "the same entry twice is no clash"

    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"')
    assert registry._declared(tmp_path / "pyproject.toml") == []


def test_of_two_plugins_with_one_name_the_second_is_left_out_and_named(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Entry("bakery", lambda: None), Entry("bakery", lambda: 1 / 0)
    second.value = "other.module"
    install(first, second)
    assert load_plugins() == {"bakery": None}
    assert "other.module has the same name and is ignored" in caplog.text
