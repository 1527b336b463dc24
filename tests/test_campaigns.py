"""The campaign scripts: they compile, say how they are called, and name what exists. None is run on a GPU here."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gpubloat.libraries import manifest
from gpubloat.libraries.locate import RANGE

ROOT = Path(__file__).resolve().parents[1]
CAMPAIGNS = ROOT / "campaigns"
SCRIPTS = sorted(CAMPAIGNS.rglob("*.py"))
LIBRARIES = CAMPAIGNS / "libraries"
WORKLOADS = LIBRARIES / "workloads"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SHARED = ast.parse((WORKLOADS / "common.py").read_text("utf-8"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), path.name)


def arguments(module: ast.Module) -> list[ast.Call]:
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [call for call in calls if call.func.attr == "add_argument"]  # type: ignore[attr-defined]


def options(module: ast.Module) -> set[str]:
    """All --options of a script's parsers, those of the shared one too."""
    shares = any(isinstance(node, ast.ImportFrom) and node.module == "common" for node in ast.walk(module))
    calls = arguments(module) + (arguments(SHARED) if shares else [])
    words = [word.value for call in calls for word in call.args if isinstance(word, ast.Constant)]
    return {word for word in words if word.startswith("--")}


def usage(module: ast.Module) -> str:
    """The lines of the docstring that begin with python, and those that go on with them."""
    found, goes_on = [], False
    for line in (ast.get_docstring(module) or "").splitlines():
        goes_on = line.lstrip().startswith("python ") or (goes_on and line.startswith(" ") and "[" in line)
        found += [line] if goes_on else []
    return "\n".join(found)


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"campaigns_{name}", LIBRARIES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(CAMPAIGNS)))
def test_a_script_compiles_and_says_what_it_is_for(path: Path) -> None:
    compile(path.read_text("utf-8"), path.name, "exec")
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize(
    "path", [p for p in SCRIPTS if options(tree(p))], ids=lambda path: str(path.relative_to(CAMPAIGNS))
)
def test_usage_names_this_script_and_options_that_it_has(path: Path) -> None:
    if path.name == "common.py":
        pytest.skip("the parser that the workloads share")
    lines = usage(tree(path))
    assert re.search(rf"python (campaigns/\w+/|campaigns/)?{path.name}\b", lines)
    assert set(OPTION.findall(lines)) <= options(tree(path)) | {"--help"}


@pytest.mark.parametrize(
    "path", [LIBRARIES / "debloat.py", *sorted(WORKLOADS.glob("*.py"))], ids=lambda path: path.name
)
def test_usage_names_every_option(path: Path) -> None:
    if path.name != "common.py":
        assert set(OPTION.findall(usage(tree(path)))) == options(tree(path))


def test_every_command_is_a_script_with_such_options() -> None:
    commands = loaded("campaign").COMMANDS
    assert len(commands) >= 10
    for words in commands.values():
        assert (WORKLOADS / words[0]).is_file()
        assert {word for word in words if word.startswith("--")} <= options(tree(WORKLOADS / words[0]))
    scripts = {path.name for path in WORKLOADS.glob("*.py")} - {
        "common.py",
        "jax_settings.py",
        "jax_weights.py",
        "tf_settings.py",
    }
    assert {words[0] for words in commands.values()} == scripts


def test_pairs_are_of_known_workloads_and_help_is_printed() -> None:
    found = subprocess.run(
        [sys.executable, str(LIBRARIES / "debloat.py"), "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    assert set(OPTION.findall(found)) >= options(tree(LIBRARIES / "debloat.py"))
    names = [node for node in tree(LIBRARIES / "debloat.py").body if isinstance(node, ast.Assign)]
    pairs = next(ast.literal_eval(n.value) for n in names if getattr(n.targets[0], "id", "") == "PAIRS")
    assert {name for pair in pairs for name in pair.split("-on-")} <= set(loaded("campaign").COMMANDS)


def test_a_workload_without_its_package_says_so_in_a_sentence() -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is here")
    found = subprocess.run([sys.executable, str(WORKLOADS / "vllm_llama.py")], capture_output=True, text=True)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    assert "vllm" in found.stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="TensorFlow is not installed")
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(
    "words",
    [
        ["tf_mobilenet.py", "--batch", "2", "--size", "32"],
        ["tf_transformer.py", "--batch", "2", "--length", "8", "--blocks", "1"],
    ],
    ids=lambda words: words[0],
)
def test_a_workload_of_tensorflow_prints_one_number_and_the_same_again(words: list[str], mode: str) -> None:
    script, *sizes = words
    command = [sys.executable, str(WORKLOADS / script), mode, "--steps", "3", *sizes]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout for _ in range(2)
    )
    assert math.isfinite(float(first))
    assert float(first) != 0
    assert second == first


def copies(folder: Path, originals: dict[str, tuple[bytes, bytes]]) -> None:
    """A debloated folder: path of the original -> its bytes and those of its copy."""
    entries = []
    for number, (path, (before, after)) in enumerate(originals.items()):
        names = (f"files{path}", f"ranges/{number}.npy")
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_bytes(after)
        np.save(folder / names[1], np.zeros(0, RANGE))
        digests = [hashlib.sha256(content).hexdigest() for content in (before, after)]
        entries.append(manifest.Entry(Path(path).name, path, names[0], *digests, len(before), "zeroed", "", names[1]))
    manifest.write(folder, manifest.Manifest("0", "", "runs", ["sm_90"], "", [], entries, []))


def test_the_largest_copies_alone_are_a_debloated_folder(tmp_path: Path) -> None:
    contents = {f"/lib{n}.so": (bytes(1000 * n), bytes(1000 * n)) for n in (3, 1, 4, 2)}
    copies(tmp_path / "all", contents)
    for _ in range(2):  # a folder of an earlier call is replaced
        names = loaded("campaign").restricted(tmp_path / "all", tmp_path / "some", 2)
    assert names == ["lib4.so", "lib3.so"]
    found = manifest.read(tmp_path / "some")
    assert [entry.library for entry in found.libraries] == names
    for entry in found.libraries:
        assert (tmp_path / "some" / entry.copy).stat().st_size == entry.bytes
        assert len(manifest.ranges(tmp_path / "some", entry)) == 0
    assert len(manifest.read(tmp_path / "all").libraries) == 4


def test_bytes_of_packages_with_and_without_copies(tmp_path: Path) -> None:
    root = tmp_path / "site"
    (root / "package").mkdir(parents=True)
    content = np.random.default_rng(0).bytes(1 << 20)
    (root / "package" / "a.so").write_bytes(content)
    (root / "package" / "b.py").write_bytes(b"pass\n")
    os.link(root / "package" / "a.so", root / "package" / "same.so")
    (root / "link.so").symlink_to("package/a.so")
    copies(tmp_path / "copies", {str(root / "package" / "a.so"): (content, bytes(len(content)))})
    sizes = loaded("site_packages")
    plain = sizes.size(root, {})
    assert (plain.n_files, plain.n_replaced) == (3, 0)  # two names of one file, and a link
    assert plain.logical_bytes == len(content) + 5 + len("package/a.so")
    assert plain.allocated_bytes >= len(content)
    assert len(content) < plain.zstd_bytes < plain.tar_bytes
    less = sizes.size(root, sizes.copies(tmp_path / "copies"))
    assert less.n_replaced == 1
    assert less.zstd_bytes < plain.zstd_bytes / 1.5
