"""BERT: bidirectional encoders trained on masked tokens and the order of sentences."""

from importlib import import_module

from megalight.imports import lazy_members
from megalight.models.bert.config import BertBackendConfig as BertBackendConfig
from megalight.models.bert.config import BertConfig as BertConfig
from megalight.models.bert.hugging_face import (
    READERS,
    config_from_transformers,
    config_to_transformers,
    weight_map,
    without_pooler,
)
from megalight.models.bert.model import Bert as Bert
from megalight.models.bert.model import BertOutput as BertOutput
from megalight.models.bert.plan import bert_plan as bert_plan
from megalight.models.bert.presets import PRESETS
from megalight.models.config import DropoutConfig as DropoutConfig
from megalight.models.config import InitConfig as InitConfig
from megalight.models.family import Family, WeightConversion, register

register(
    Family(
        name="bert",
        config=BertConfig,
        model=Bert,
        plan=bert_plan,
        presets=PRESETS,
        module=lambda: import_module("megalight.models.bert.module").BertModule,
        weights=WeightConversion(
            tuple(READERS), config_from_transformers, weight_map, config_to_transformers, without_pooler
        ),
    )
)

# Late: it imports Lightning, which the model itself does not need.
__getattr__ = lazy_members(__name__, {"BertModule": "megalight.models.bert.module"})
