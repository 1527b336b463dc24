"""The architecture as tests: which package may import which, and what `import gpubloat` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpubloat

PACKAGE = Path(__file__).parents[1] / "gpubloat"
INSTRUMENTS = {"libraries", "tensors", "memory", "energy"}
HEAVY = {"torch", "cuda", "pynvml", "jax", "dask", "distributed", "cupy"}
# what each part may import from gpubloat, beside itself
ALLOWED = {
    "errors": set(),
    "tables": {"errors"},
    "run": {"errors", "tables"},
    "published": {"errors", "tables"},
    "analysis": {"errors", "tables"},
    "plots": {"errors", "tables", "analysis"},
    "report": {"errors", "tables", "run", "analysis", "plots"},
    "reproduce": {"errors"},
    "doctor": {"errors", "native"},
    "native": {"errors"},
    "optional": {"errors"},
    **{name: {"errors", "tables", "run", "native", "optional"} for name in INSTRUMENTS},
}


def imports(path: Path) -> set[tuple[str, bool]]:
    """(module, is at the top of the file) of everything that a file imports."""
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "gpubloat":
                names = [f"gpubloat.{alias.name}" for alias in node.names]
        found |= {(name, node in tree.body) for name in names}
    return found


def part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    name = part(path)
    if name in ("__init__", "__main__", "cli"):
        pytest.skip("may import everything")
    allowed = ALLOWED[name] | {name, "__version__"}
    inside = {module.split(".")[1] for module, _ in imports(path) if module.startswith("gpubloat.")}
    assert inside <= allowed, f"{name} imports {inside - allowed}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_gpu_libraries_are_imported_only_where_they_are_used(path: Path) -> None:
    at_top = {module.split(".")[0] for module, top in imports(path) if top}
    assert not at_top & HEAVY
    if part(path) in ("analysis", "plots", "tables", "run"):
        assert not {module.split(".")[0] for module, _ in imports(path)} & HEAVY


@pytest.mark.parametrize("name", ["analysis", "plots"])
def test_modules_of_analysis_and_plots_are_there_without_an_import(name: str) -> None:
    code = f"import gpubloat; part = gpubloat.{name}; print(*dir(part)); print(*(getattr(part, n) for n in dir(part)))"
    listed, loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    there = {p.stem for p in (PACKAGE / name).glob("*.py")} - {"__init__"}
    assert set(listed.split()) == there
    assert loaded.count("<module 'gpubloat.") == len(there)
    with pytest.raises(AttributeError, match=f"'gpubloat.{name}' has no attribute 'nonsense'"):
        print(getattr(gpubloat, name).nonsense)


def test_no_module_is_too_long() -> None:
    lengths = {p.relative_to(PACKAGE).as_posix(): len(p.read_text("utf-8").splitlines()) for p in PACKAGE.rglob("*.py")}
    assert not {name: n for name, n in lengths.items() if n > 500}


def test_import_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import gpubloat; print(time.perf_counter() - start);"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    times = []
    for _ in range(3):
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        times.append(float(out[0]))
        assert not set(out[1].split()) & (HEAVY | {"matplotlib", "pandas", "numpy", "pandera", "pyarrow", "typer"})
    assert min(times) < 0.1


@pytest.mark.parametrize(
    "words",
    [
        "--version", "--help", "libraries --help", "doctor", "memory report nosuch", "memory replay nosuch",
        "memory verify nosuch", "tensors stats nosuch", "tensors pack nosuch --out x", "tensors unpack nosuch",
        "libraries scan ./nosuch", "libraries debloat nosuch --out x", "libraries exec nosuch -- true",
        "libraries verify nosuch -- true", "libraries apply nosuch", "libraries restore nosuch",
        "report nosuch --html x.html",
    ],
)  # fmt: skip
def test_what_ends_at_once_loads_nothing_heavy(words: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['gpubloat', *{words.split()}]\n"
        "from gpubloat.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print('ended', end.code or 0, *sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    ended, status, *loaded = done.stdout.splitlines()[-1].split()
    assert (ended, status) == ("ended", "1" if "nosuch" in words else "0")
    heavy = HEAVY - {"pynvml"} | {"matplotlib", "pandas", "numpy", "pandera", "pyarrow", "numba"}  # doctor asks NVML
    assert not set(loaded) & heavy
