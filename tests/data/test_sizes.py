import pytest

from megalight.data.sampler import check_sizes
from megalight.errors import DataError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be at least 1"),
        ({"sequence_length": -1}, "sequence_length is -1; it must be at least 1"),
        ({"num_workers": -1}, "num_workers is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296; it must be from 0"),
        ({"train_samples": 0}, "train_samples is 0; it must be at least 1, or left out"),
        ({"train_samples": -3}, "train_samples is -3"),
        ({"val_samples": -1}, "val_samples is -1; it must be at least 0, which reads none"),
        ({"test_samples": -1}, "test_samples is -1"),
    ],
)
def test_sizes_that_no_data_can_have(given: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_sizes(**given)


def test_sizes_that_data_can_have() -> None:
    check_sizes(global_batch_size=1, sequence_length=1, seed=2**32 - 1, train_samples=1, val_samples=0, test_samples=0)
