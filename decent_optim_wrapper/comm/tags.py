"""The tags of point-to-point messages, by which a rank tells concurrent ones apart.

Tags below `FIRST` are left to the user's own traffic on the same process group, except for one. All
others are added to it.
"""

from __future__ import annotations

FIRST = 1 << 20
# Small messages to all ranks.
ANNOUNCEMENT = -1
# The header of a round.
HEADER = 0
# By the position of a bucket: its values; their mean, if it is coded; and its flag, or the flags of
# the buckets from this one on.
BUCKET = 1
MEAN = 1 << 18
FLAG = 1 << 19
