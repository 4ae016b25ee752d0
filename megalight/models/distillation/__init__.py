"""Distillation: a model learns from a frozen teacher (https://arxiv.org/abs/1503.02531).

The teacher runs in its own layout and returns its last hidden states ``[T, h]``, not its logits ``[T, V]``. Its output
layer lies beside the student's, split alike, and the loss applies both to a chunk of tokens at a time. Hidden states of
other places are compared on the student's last stage, to which they travel along its pipeline.
"""

from megalight.models.distillation.distiller import OUTPUT as OUTPUT
from megalight.models.distillation.distiller import SAVED as SAVED
from megalight.models.distillation.distiller import TEACHER as TEACHER
from megalight.models.distillation.distiller import Distiller as Distiller
from megalight.models.distillation.distiller import check_tokenizer as check_tokenizer
from megalight.models.distillation.distiller import share_of as share_of
from megalight.models.distillation.loss import DistillationLoss as DistillationLoss
from megalight.models.distillation.loss import LayerPair as LayerPair
from megalight.models.distillation.loss import read_modelopt as read_modelopt
from megalight.models.distillation.teacher import CachedTeacher as CachedTeacher
from megalight.models.distillation.teacher import Teacher as Teacher
