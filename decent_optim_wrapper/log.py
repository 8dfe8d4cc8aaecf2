"""What is logged: a line at the start and one after 100 steps, or what DECENT_LOG asks for."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from loguru import logger

_PACKAGE = "decent_optim_wrapper"
_SUMMARY = f"{_PACKAGE}.start.summary"


def configure() -> None:
    """Configure logging by the variable DECENT_LOG: "off", "info", "debug" or unset for two lines.

    Call `logger.enable` or `logger.disable` with the name of the package to change it afterwards.
    """
    level = os.environ.get("DECENT_LOG", "").lower()
    logger.disable(_PACKAGE)
    if level in ("info", "debug"):
        logger.enable(_PACKAGE)
    elif level != "off":
        logger.enable(_SUMMARY)
    if level == "info":
        # If there are only sinks of the user's own, their levels apply.
        with suppress(ValueError):
            # The sink that loguru adds when it is imported.
            logger.remove(0)
            logger.add(sys.stderr, filter={_PACKAGE: "INFO"})
