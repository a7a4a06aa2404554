"""Lines, files and floors of each room, and whether each import points down.

    python tests/size.py          fails if an import points up, and for no other reason

A room's floors are the length of its longest chain of imports (aim: 20 files, 8 floors).
tests/test_repo.py takes from here what a module imports and how long its parts are.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = "elastic_trainer"
MOST_LINES = {"module": 450, "class": 250, "function": 60}


def modules_in(code: Path) -> list[Path]:
    """Return the modules of the product in a clone, or where it is installed."""
    rooms = [code / PRODUCT, *sorted((code / PRODUCT).iterdir())]
    return sorted({path for room in rooms if (room / "__init__.py").exists()
                   for path in [*room.glob("*.py"), *room.glob("*/*.py")]})


def name_of(path: Path, root: Path) -> str:
    """Return the name under which a file is imported."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_by(path: Path, root: Path) -> Iterator[str]:
    """Yield the full names of what a module imports, anywhere in it; every relative import is made
    whole."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = path.relative_to(root).parts[: -node.level] if node.level else ()
            yield ".".join([*parents, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call) and ast.unparse(
                node.func).split(".")[-1] in ("__import__", "import_module"):
            yield ast.unparse(node.args[0]).strip("'\"")


def ours_imported_by(path: Path, root: Path, names: set[str]) -> set[str]:
    """Return those of `names` that a module imports, in functions, too, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & names or {node.module}
    return found & names - {name_of(path, root)}


def imports_among(paths: list[Path], root: Path) -> dict[str, set[str]]:
    """Return, for each module, which others of them it imports."""
    names = {name_of(path, root) for path in paths}
    return {name_of(path, root): ours_imported_by(path, root, names) for path in paths}


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the circles among modules: those that import each other, over others or at once."""
    reached = {name: set(direct) for name, direct in imports.items()}
    for middle in reached:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    found = {name: sorted(other for other in targets if name in reached[other])
             for name, targets in reached.items() if name in targets}
    return sorted({tuple(members): members for members in found.values()}.values())


def floors(imports: Mapping[str, set[str]]) -> int:
    """Return the length of the longest chain of imports; a circle counts as one floor."""
    heights = dict.fromkeys(imports, 1)
    for _ in imports:
        for name, others in imports.items():
            heights[name] = max([1, *(heights[other] + 1 for other in others)])
        if circles(imports):
            break
    return max(heights.values(), default=0)


def lines_of(path: Path, root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield kind, name and number of lines of a module, its classes and its functions."""
    text = path.read_text(encoding="utf-8")
    yield "module", name_of(path, root), len(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            assert node.end_lineno is not None
            yield kind, f"{name_of(path, root)}.{node.name}", node.end_lineno - node.lineno + 1


def too_large(paths: list[Path], root: Path) -> list[str]:
    """Return what is longer than MOST_LINES allows."""
    return [f"{kind} {name} has {lines} lines" for path in paths
            for kind, name, lines in lines_of(path, root) if lines > MOST_LINES[kind]]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the package in a folder against the contracts of setup.cfg (import-linter)."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--config", ROOT / "setup.cfg", "--no-cache"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)


def row(room: str, paths: list[Path], root: Path) -> str:
    """Return a line of the table."""
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    paths = [path for path in paths if path.name != "__init__.py"]
    return f"{room:<30}{lines:>8,}{len(paths):>7}{floors(imports_among(paths, root)):>8}"


def main() -> int:
    """Print the table, what is too large, and what import-linter finds."""
    print(f"{'room':<30}{'lines':>8}{'files':>7}{'floors':>8}")
    product = modules_in(ROOT)
    for room in sorted({path.parent for path in product}):
        print(row(str(room.relative_to(ROOT)), [p for p in product if p.parent == room], ROOT))
    product += (ROOT / "deploy").glob("*.py")
    print(row("deploy", sorted((ROOT / "deploy").glob("*.py")), ROOT / "deploy"))
    print(row("together", product, ROOT))
    tests = sorted((ROOT / "tests").rglob("*.py"))
    for folder in sorted({path.parent for path in tests}):
        print(row(str(folder.relative_to(ROOT)), [p for p in tests if p.parent == folder], folder))
    print(row("together", tests, ROOT))
    print("\n".join(too_large(modules_in(ROOT), ROOT)))
    done = lint_imports(ROOT)
    print(done.stdout + done.stderr if done.returncode else "each import points down")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
