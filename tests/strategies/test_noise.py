"""What Lightning says on every run, and users cannot act on, is dropped; the rest stays."""

import logging
import warnings

from megalight.strategies._lightning import silence

LOG = logging.getLogger("lightning.pytorch.utilities.rank_zero")


def test_advertisements_are_dropped(caplog):
    """Also in Python and notebooks: importing the strategies is enough."""
    with caplog.at_level(logging.INFO):
        LOG.info("💡 Tip: For seamless cloud logging, try ...")
        LOG.info("Trainer already configured with model summary callbacks: [...]. Skipping ...")
        LOG.info("GPU available: False")
    assert caplog.messages == ["GPU available: False"]


def test_only_foreign_warnings_are_dropped():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence()
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use ...", FutureWarning, stacklevel=1)
        warnings.warn("The dirpath has changed from 'a' to 'b'", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else"]
