"""Mixture of experts: each token passes through some of the experts."""

from megalight.nn.aux_losses import Pool as Pool
from megalight.nn.moe.config import BalanceConfig as BalanceConfig
from megalight.nn.moe.config import CapacityConfig as CapacityConfig
from megalight.nn.moe.config import MoEConfig as MoEConfig
from megalight.nn.moe.config import RouterConfig as RouterConfig
from megalight.nn.moe.config import SharedConfig as SharedConfig
from megalight.nn.moe.dispatch import Dispatcher as Dispatcher
from megalight.nn.moe.dispatch import Grouped as Grouped
from megalight.nn.moe.dispatch import LocalDispatcher as LocalDispatcher
from megalight.nn.moe.dispatch import aligned as aligned
from megalight.nn.moe.layer import Experts as Experts
from megalight.nn.moe.layer import MoE as MoE
from megalight.nn.moe.router import Jitter as Jitter
from megalight.nn.moe.router import Router as Router
