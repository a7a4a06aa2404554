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

HERE = os.path.abspath(__file__)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of ours."""
    return [sys.executable, HERE, module, *arguments]


def settle() -> None:
    """Take the user's folders off the front of this process's path, before it imports more."""
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        del sys.path[0]  # the current folder, or that of the script
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    theirs = {os.path.abspath(folder): 0 for folder in given.split(os.pathsep) if given}
    theirs.pop(ROOT, None)
    first = [folder for folder in sys.path if os.path.abspath(folder) not in theirs]
    sys.path[:] = dict.fromkeys([*first, ROOT, *theirs])


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
