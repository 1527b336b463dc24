"""Loading FILE.py:function: what it finds, what it refuses in one sentence, what it leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpubloat.energy.workload import workload
from gpubloat.errors import GpubloatError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(text: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return file


def refused(spec: object) -> tuple[str, str]:
    before = list(sys.path), set(sys.modules)
    with pytest.raises(GpubloatError) as caught, workload(str(spec)):
        pass
    assert (list(sys.path), set(sys.modules)) == before
    assert "\n" not in caught.value.message
    assert not caught.value.message.endswith(".")
    return caught.value.message, caught.value.hint or ""


def test_a_function_and_its_inputs(write: Write) -> None:
    file = write("def inputs(seed):\n    return (seed, 2)\ndef f(a, b):\n    return a + b\ndef g(): return 7\n")
    with workload(f"{file}:f", seed=40) as work:
        assert work.fn(*work.args) == 42
        assert work.name == "model.py:f"
    with workload(f"{file}:g") as work:
        assert (work.args, work.fn()) == ((), 7)


def test_a_file_with_one_function_needs_no_name(write: Write) -> None:
    with workload(str(write("from math import sin\ndef inputs(seed): return (1,)\ndef f(a): return a\n"))) as work:
        assert work.name == "model.py:f"
        assert work.args == (1,)


def test_defaults_are_used_where_there_are_no_inputs(write: Write) -> None:
    with workload(f"{write('def f(a=3): return a')}:f") as work:
        assert work.fn(*work.args) == 3


def test_the_folder_is_on_the_path_while_it_runs_as_for_a_program(write: Write) -> None:
    write("VALUE = 5", "neighbour_of_model.py")
    file = write("def f():\n    import neighbour_of_model\n    return neighbour_of_model.VALUE, __name__\n")
    before = list(sys.path), set(sys.modules)
    with workload(f"{file}:f") as work:
        assert sys.path[0] == str(file.parent.resolve())
        value, name = work.fn()
    assert value == 5
    assert name != "__main__"
    assert (list(sys.path), set(sys.modules)) == before


def test_neighbours_of_the_same_name_are_not_mixed_up(tmp_path: Path, write: Write) -> None:
    for side in "ab":
        write(f"SIDE = {side!r}", f"{side}/neighbour.py")
        write("import neighbour\ndef f(): return neighbour.SIDE", f"{side}/model.py")
    with workload(f"{tmp_path}/a/model.py:f") as a, workload(f"{tmp_path}/b/model.py:f") as b:
        assert (a.fn(), b.fn()) == ("a", "b")
        with workload(f"{tmp_path}/a/model.py:f") as again:
            assert again.fn() == "a"
    assert "neighbour" not in sys.modules


def test_a_class_of_the_file_can_be_a_dataclass(write: Write) -> None:
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 1\n"
    with workload(f"{write(text + 'def f(): return C().x')}:f") as work:
        assert work.fn() == 1


def test_state_is_restored_when_the_block_raises(write: Write) -> None:
    before = list(sys.path), set(sys.modules)
    with pytest.raises(KeyboardInterrupt), workload(f"{write('def f(): pass')}:f"):
        raise KeyboardInterrupt
    assert (list(sys.path), set(sys.modules)) == before


@pytest.mark.parametrize(
    ("text", "spec", "sentence", "hint"),
    [
        ("def f(): pass", "other.py:f", "other.py does not exist", "FILE.py:function"),
        ("def f(): pass\ndef g(): pass", "model.py:h", "model.py has no function h", "it has f, g"),
        ("def f(): pass\ndef g(): pass", "model.py", "defines 2 functions", "it has f, g"),
        ("X = 1", "model.py", "defines 0 functions", "it defines no function"),
        ("X = 1", "model.py:X", "X is no function but a int", "no function"),
        ("import os\nimport nowhere_at_all", "model.py:f", "(line 2): ModuleNotFoundError: No module named", ""),
        ("def f(:", "model.py:f", "cannot be loaded (line 1): SyntaxError", ""),
        ("def g():\n    1 / 0\ng()", "model.py:f", "(line 2): ZeroDivisionError: division by zero", ""),
        ("import sys\nsys.exit(3)", "model.py:f", "ends the program when it is loaded", "__main__"),
        ("def f(a, b): pass", "model.py:f", "model.py:f needs arguments (a, b), and model.py has no inputs", "define"),
        ("def inputs(seed): return 5\ndef f(a): pass", "model.py:f", "inputs(0) returns a int", "tuple"),
        ("def inputs(seed): return (1, 2)\ndef f(a): pass", "model.py:f", "with the 2 arguments of inputs(0)", "(a)"),
        ("def inputs(seed):\n    raise OSError('gone')\ndef f(a): pass", "model.py:f", "inputs(0) failed (line 2)", ""),
        ("def inputs(): return (1,)\ndef f(a): pass", "model.py:f", "inputs(0) failed: TypeError", ""),
        ("def f():\n    yield 1", "model.py:f", "model.py:f is a generator or coroutine", "runs it"),
        ("async def f(): pass", "model.py:f", "is a generator or coroutine", ""),
        ("", ".", "is a folder", "FILE.py:function"),
        ("", "notes.txt", "is no Python file", "FILE.py:function"),
    ],
)
def test_what_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch, text: str, spec: str, sentence: str, hint: str
) -> None:
    monkeypatch.chdir(write(text).parent)
    write("", "notes.txt")
    told = refused(spec)
    assert sentence in told[0]
    assert hint in told[1]


def test_a_module_of_pytorch_is_a_function(write: Write) -> None:
    pytest.importorskip("torch")
    text = "import torch\nmodel = torch.nn.Linear(2, 2)\ndef inputs(seed): return (torch.ones(1, 2),)\n"
    with workload(f"{write(text)}:model") as work:
        assert tuple(work.fn(*work.args).shape) == (1, 2)
    sentence, _ = refused(f"{write('import torch' + chr(10) + 'model = torch.nn.Linear(2, 2)')}:model")
    assert "needs arguments (input)" in sentence
