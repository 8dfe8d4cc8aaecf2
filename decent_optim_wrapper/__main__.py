"""``python -m decent_optim_wrapper``."""

import os
import sys
from contextlib import suppress

from decent_optim_wrapper.cli import main

code = main()
# Not sys.exit: a thread of a launcher may still wait for a store that has lost its majority, and
# would abort the process while Python is finalised.
for stream in (sys.stdout, sys.stderr):
    if stream is not None:
        with suppress(BrokenPipeError):
            stream.flush()
os._exit(code)
