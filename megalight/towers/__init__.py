"""A vision tower and a language model in layouts of their own: colocated on the same ranks, or on disjoint ones."""

from megalight.towers.training import TowersTraining as TowersTraining
