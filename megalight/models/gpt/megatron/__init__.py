"""Checkpoints of Megatron-core (``torch_dist`` folders) of GPT models.

:mod:`arguments` has the model's configuration, :mod:`param_mapping` which of their tensors hold ours, :mod:`buckets`
those of a distributed optimizer, and :mod:`source` puts them together.
"""

from megalight.models.gpt.megatron.arguments import config_of
from megalight.models.gpt.megatron.source import MegatronFolder, is_folder

__all__ = ["MegatronFolder", "config_of", "is_folder"]
