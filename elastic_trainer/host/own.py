"""Run a module of ours without the user's folders in front of Python's own.

    python elastic_trainer/host/own.py elastic_trainer run -- python my_train.py …

horovodrun_elastic.sh, supervisor, standbys, doctor → here → a module of ours

What always holds:
1. `python -m` puts the current folder first on sys.path, and PYTHONPATH stands before the standard
   library: a csv.py of the user's would be imported by our processes. Here the current folder is
   not on the path, and the folders of PYTHONPATH come last.
2. The environment is as it was: what these processes start, the user's programs among it, imports
   as Python does. So this is no `python -P` (3.11) and no PYTHONSAFEPATH, which is inherited.
3. The package is the one that this file lies in.

It imports only what Python has loaded before it runs the first line.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

HERE = os.path.abspath(__file__)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of ours."""
    return [sys.executable, HERE, module, *arguments]


def listing(file: str) -> str:
    """Return the command of the discovery that prints a hosts file, for horovodrun's shell."""
    import shlex

    discovery = os.path.join(ROOT, "elastic_trainer", "discovery", "__main__.py")
    return shlex.join([sys.executable, "-S", "-I", discovery, "hosts-file", file])


def settle() -> None:
    """Take the user's folders off the front of this process's path, before it imports more."""
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        del sys.path[0]  # the current folder, or that of the script
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    theirs = {os.path.abspath(folder): 0 for folder in given.split(os.pathsep) if given}
    theirs.pop(ROOT, None)
    first = [folder for folder in sys.path if os.path.abspath(folder) not in theirs]
    sys.path[:] = dict.fromkeys([*first, ROOT, *theirs])


class OursFirst:
    """Within the block, imports pass over the folder of the user's script: it stands first on the
    path, and a secrets.py in it is for the script.

    Modules of the user's with the name of one that is imported in the block come back after it.
    Where the script's file has the name of a library that is new, the next import finds the file.
    """

    _is_entered = False

    def __enter__(self) -> None:
        self.path, self.folder = sys.path[:], os.path.abspath(sys.path[0] if sys.path else "")
        self.theirs: dict[str, ModuleType] = {}
        self.is_first = not OursFirst._is_entered and self.folder != ROOT
        if not self.is_first:
            return
        OursFirst._is_entered = True
        inside = self.folder + os.sep
        self.theirs = {
            name: module for name, module in list(sys.modules.items()) if name != "__main__"
            and str(getattr(module, "__file__", None) or "").startswith(inside)
            and "-packages" + os.sep not in str(module.__file__)}
        for name in self.theirs:
            del sys.modules[name]
        self.before = set(sys.modules)
        sys.path[:] = [*sys.path[1:], sys.path[0]]

    def __exit__(self, *_: object) -> None:
        if not self.is_first:
            return
        OursFirst._is_entered = False
        if sys.path == [*self.path[1:], *self.path[:1]]:
            sys.path[:] = self.path
            for name in set(sys.modules) - self.before:
                if self._has(name.partition(".")[0]):
                    del sys.modules[name]
        sys.modules.update(self.theirs)

    def _has(self, name: str) -> bool:
        """True if the script's folder has a module of this name."""
        found = os.path.join(self.folder, name)
        return os.path.exists(f"{found}.py") or os.path.exists(os.path.join(found, "__init__.py"))


def main() -> None:
    """Run the module that the command line names, as `python -m` does."""
    settle()
    path = sys.path[:]
    sys.path.insert(0, ROOT)
    __import__("elastic_trainer")  # before another one on the path; it imports nothing
    sys.path[:] = path
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
