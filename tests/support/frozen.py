"""Import this last in a process that others are forked from: what is there now stays, and no collection looks at it.

Imports leave nearly a million objects. In a rank, a full collection of them takes twice as long as training of a small
model, and copies the memory that it shares with other ranks.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
