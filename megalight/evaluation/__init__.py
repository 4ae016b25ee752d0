"""Evaluation: log-likelihoods of continuations, and the tasks of ``lm-eval``."""

from megalight.evaluation.likelihood import Continuation as Continuation
from megalight.evaluation.likelihood import LogLikelihood as LogLikelihood
from megalight.evaluation.likelihood import Replicas as Replicas
from megalight.evaluation.likelihood import log_likelihoods as log_likelihoods
