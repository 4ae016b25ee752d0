"""Rewards that data modules of prompts can be given by name; any function of an answer and a row is one, too."""

from megalight.rl.rewards.countdown import Countdown as Countdown
from megalight.rl.rewards.final_answer import FinalAnswer as FinalAnswer
from megalight.rl.rewards.shaping import Pattern as Pattern
from megalight.rl.rewards.shaping import RowFilter as RowFilter
from megalight.rl.rewards.shaping import SoftOverlong as SoftOverlong
