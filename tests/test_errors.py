import pytest

from megalight import errors
from megalight.errors import MegalightError, MissingPackageError, hub_hint, nearest, nearest_pattern


def test_every_error_is_of_one_family() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(found) > 5
    assert all(issubclass(value, MegalightError) for value in found)


@pytest.mark.parametrize("name", ["LayoutError", "BackendError", "DataError", "ConfigurationError"])
def test_errors_about_arguments_are_value_errors(name: str) -> None:
    assert issubclass(getattr(errors, name), ValueError)


def test_a_missing_package_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="flour"):
        raise MissingPackageError("flour")


def test_nearest_names_the_closest() -> None:
    assert nearest("tensor_paralel", ["pipeline_parallel", "tensor_parallel"]) == " Did you mean 'tensor_parallel'?"
    assert nearest("zzz", ["tensor_parallel"]) == ""
    assert nearest("x", []) == ""
    assert nearest("silo", (name for name in ["silu", "gelu"])) == " Did you mean 'silu'?"


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("images", ["messages", "conversations"], None),
        ("image", ["messages", "conversations"], None),
        ("window_pattern", ["mixer_pattern", "layer_norm"], None),
        ("hidden", ["hidden_act", "hidden_size", "size"], "hidden_act"),
        ("epsilon", ["eps", "silu"], "eps"),
        ("gtp", ["bert", "gpt"], "gpt"),
        ("tq", ["dp", "tp", "cp"], "tp"),
        ("", ["dp"], None),
        ("adamw", ["Adam", "AdamW"], "AdamW"),
        ("a", ["alpha", "beta"], None),
    ],
)
def test_only_names_that_are_spelled_alike_are_suggested(name: str, known: list[str], meant: str | None) -> None:
    assert nearest(name, known) == ("" if meant is None else f" Did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*.projecter.*", "*.projector.*"),
        ("model.layers.*.atention.qvk.*", "model.layers.*.attention.qkv.*"),
        ("model.embed.projecter.weight", "model.embed.projector.weight"),
        ("*.projector.wieght", "*.projector.weight"),
        ("*.zzz.*", ""),
    ],
)
def test_a_misspelled_word_of_a_pattern_is_corrected(pattern: str, meant: str) -> None:
    names = ["model.embed.projector.weight", "model.layers.0.attention.qkv.weight"]
    assert nearest_pattern(pattern, iter(names)) == (f" Did you mean {meant!r}?" if meant else "")


def test_a_path_that_may_be_a_name_of_the_hub_gets_a_hint() -> None:
    assert hub_hint("Qwen/Qwen2.5-0.5B").endswith(" write hf://Qwen/Qwen2.5-0.5B.")
    assert [hub_hint(path) for path in ("runs", "a/b/c", "./a", "/a/b", "../a", "s3://a/b", "~/a")] == [""] * 7
