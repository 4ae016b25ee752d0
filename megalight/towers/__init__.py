"""Two towers of one model, each in a layout of its own: on ranks of their own, or on the same ranks."""

from megalight.towers.colocated import TowersBeside as TowersBeside
from megalight.towers.disjoint import TowersApart as TowersApart
