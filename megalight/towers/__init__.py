"""Two towers of one model, each in a layout of its own: on ranks of their own, or on the same ranks."""

from megalight.towers.apart import TowersApart as TowersApart
from megalight.towers.beside import TowersBeside as TowersBeside
from megalight.towers.side import Side as Side
