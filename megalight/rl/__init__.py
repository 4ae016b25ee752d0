"""Reinforcement learning: environments, rewards, rollouts, and GRPO."""

from megalight.rl.answer_log import AnswerLog as AnswerLog
from megalight.rl.countdown import CountdownPuzzles as CountdownPuzzles
from megalight.rl.data import PromptDataModule as PromptDataModule
from megalight.rl.environment import Answer as Answer
from megalight.rl.environment import Environment as Environment
from megalight.rl.environment import PromptBatch as PromptBatch
from megalight.rl.environment import RLTask as RLTask
from megalight.rl.loss import PolicyLoss as PolicyLoss
from megalight.rl.module import GRPOModule as GRPOModule
from megalight.rl.module import HFGRPOModule as HFGRPOModule
from megalight.rl.rollouts import Rollouts as Rollouts
from megalight.rl.rollouts import Trajectory as Trajectory
