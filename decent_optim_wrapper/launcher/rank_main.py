"""What the process of a rank runs before its script; a spare process imports torch meanwhile.

It runs as a script, so that nothing of the package is imported before the paths are those of the
rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from importlib import abc, import_module, machinery, util
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

_IMPORTED = "torch", "decent_optim_wrapper"


class _Hidden(abc.MetaPathFinder, abc.Loader):
    """Hides what is imported until the script imports it.

    torch reads many variables when it is imported. If the script has set any by then, or finds
    another installation in `sys.path`, it starts again, without these imports. A child that it has
    forked does not: it is no second rank.
    """

    def __init__(self) -> None:
        self._environ, self._folder, self._pid = dict(os.environ), Path.cwd(), os.getpid()
        names = [name for name in sys.modules if name.partition(".")[0] in _IMPORTED]
        self._modules = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> machinery.ModuleSpec | None:
        """Find what is hidden; see `importlib.abc.MetaPathFinder`."""
        if name not in self._modules:
            return None
        # With its place, for code that asks for that before it imports the package, or never does.
        path = self._modules[name].__file__
        return util.spec_from_file_location(name, path, loader=self, submodule_search_locations=[])

    def exec_module(self, module: ModuleType) -> None:
        """Show all that is hidden, or start the script again; see `importlib.abc.Loader`."""
        spec = machinery.PathFinder.find_spec(module.__name__)
        # None where a finder of an editable installation has found it.
        is_same = spec in (None, self._modules[module.__name__].__spec__)
        if not (is_same and os.environ == self._environ) and os.getpid() == self._pid:
            os.chdir(self._folder)
            os.execve(sys.executable, sys.orig_argv, self._environ)
        # In this order, and without remove(): another thread may import one of them meanwhile.
        sys.modules.update(self._modules)
        sys.meta_path[:] = [each for each in sys.meta_path if each is not self]


def main(launcher: int, descriptor: int, pause: float, *command: str) -> None:
    """Become the rank that comes through a socket; the kernel kills it when the launcher ends.

    Args:
        launcher: the process that has started this one.
        descriptor: the socket, which brings the variables of the rank and the files for its output.
        pause: seconds without a rank after which this process is a spare one, and imports torch.
        command: the script, or "-m" and the module, and its arguments.
    """
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: at the end of the thread that has started this process, the main thread.
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    # Otherwise they would kill a rank that has not come to its own handlers yet.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    script, is_module = command[0], command[0] == "-m"
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if is_module else Path(script).resolve().parent)
    with socket.socket(fileno=descriptor) as connection:
        is_spare = not wait([connection], pause)
        for name in _IMPORTED if is_spare else ():
            # The script will say why, if it needs them.
            with suppress(Exception):
                import_module(name)
        message, files, *_ = socket.recv_fds(connection, 65536, 2)
    if not message or os.getppid() != launcher:
        # The launcher has ended.
        return
    for stream, file in enumerate(files, start=1):
        os.dup2(file, stream)
        os.close(file)
    os.environ.update(json.loads(message))
    # From here on as the interpreter starts a script.
    sys.orig_argv[:] = sys.executable, "-u", *command
    # It starts a folder or an archive in another way.
    if not is_spare or not (is_module or script.endswith(".py")):
        os.execv(sys.executable, sys.orig_argv)
    _Hidden()
    sys.argv[:] = command
    loader = machinery.SourceFileLoader("__main__", str(Path(script).absolute()))
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__file__=loader.path, __loader__=loader, __builtins__=__builtins__)
    if is_module:
        runpy._run_module_as_main(sys.argv.pop(1))  # type: ignore[attr-defined]  # noqa: SLF001
    else:
        exec(loader.source_to_code(loader.get_data(loader.path), loader.path), vars(module))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
