from megalight.cli.classes import find_class, members
from tests.cli.samples import SampleModule, SampleStrategy


def test_members_follow_kwargs_to_base_classes():
    class Below(SampleModule):
        def __init__(self, extra: int, **kwargs):
            super().__init__(**kwargs)

    assert list(members(Below)) == ["extra", "config", "learning_rate"]
    assert list(members(SampleStrategy)) == ["tensor_parallel", "sequence_parallel"]


def test_a_value_that_begins_with_a_dot_is_no_class():
    assert find_class(".2") is None
