"""``python -m decent_optim_wrapper``."""

import sys

from decent_optim_wrapper.cli import main

sys.exit(main())
