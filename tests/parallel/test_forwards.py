import pytest
from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.layers import check_own_forwards


def test_a_forward_that_somebody_has_set_is_not_hidden() -> None:
    modules = [("first", nn.Identity()), ("second", nn.Identity())]
    check_own_forwards(modules, "a graph")
    modules[1][1].forward = lambda x: x
    with pytest.raises(ConfigurationError, match=r"second \(Identity\) has a forward .* a graph would hide"):
        check_own_forwards(modules, "a graph")
