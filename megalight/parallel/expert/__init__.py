"""Experts divided over the ``ep`` and ``etp`` axes."""

from megalight.parallel.expert.all_to_all import AllToAllDispatcher as AllToAllDispatcher
from megalight.parallel.expert.copy_engine import SymmetricDispatcher as SymmetricDispatcher
from megalight.parallel.expert.dispatch import DISPATCHERS as DISPATCHERS
from megalight.parallel.expert.dispatch import AllGatherDispatcher as AllGatherDispatcher
from megalight.parallel.expert.dispatch import ExpertOptions as ExpertOptions
