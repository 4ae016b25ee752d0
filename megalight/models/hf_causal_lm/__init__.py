"""Any causal language model of ``transformers``, with the modules, names and weights that it has there."""

from importlib import import_module

from megalight.imports import lazy_members
from megalight.models.family import Family, register
from megalight.models.hf_causal_lm.config import HFConfig as HFConfig
from megalight.models.hf_causal_lm.model import HFModel as HFModel
from megalight.models.hf_causal_lm.model import HFOutput as HFOutput
from megalight.models.hf_causal_lm.plan import hf_plan
from megalight.models.hf_causal_lm.weights import HFConversion, weight_map, write_config
from megalight.registry import Registry

PRESETS: Registry[HFConfig] = Registry("preset of hf")
"""None: models are named by their folder, or a name of the Hugging Face Hub."""

register(
    Family(
        name="hf",
        config=HFConfig,
        model=HFModel,
        plan=hf_plan,
        presets=PRESETS,
        module=lambda: import_module("megalight.models.hf_causal_lm.module").HFCausalLM,
        # No type: those that another family reads are read by that one where no family is named.
        generates=True,
        weights=HFConversion((), lambda values: HFConfig(dict(values)), weight_map, write_config),
    )
)

# Late: it imports Lightning, which the model itself does not need.
__getattr__ = lazy_members(__name__, {"HFCausalLM": "megalight.models.hf_causal_lm.module"})
