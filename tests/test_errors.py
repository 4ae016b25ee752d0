import pytest

from megalight import errors
from megalight.errors import MegalightError, MissingPackageError, nearest


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
