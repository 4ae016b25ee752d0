"""Two towers of one model on ranks of their own: images are read on some ranks, and text on others."""

from megalight.towers.apart import TowersApart as TowersApart
from megalight.towers.side import Side as Side
