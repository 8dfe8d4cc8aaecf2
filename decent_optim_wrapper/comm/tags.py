"""The tags of point-to-point messages, by which a rank tells concurrent ones apart.

Tags below `FIRST` are left to the user's own traffic on the same process group, except for the few
that are negative here. All of these are added to it.
"""

from __future__ import annotations

FIRST = 1 << 20
# Small messages to all ranks.
ANNOUNCEMENT = -1
# Nothing is ever sent with this one and those below it, one for each interface.
SILENT = -2
# The header of a round.
HEADER = 0
# By the position of a bucket: its values; their mean, if it is coded; and its flag, or the flags of
# the buckets from this one on.
BUCKET = 1
MEAN = 1 << 18
FLAG = 1 << 19
