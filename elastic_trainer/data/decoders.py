"""Make values of the bytes of a sample's fields.

TarShards, ImageFolder → here

What always holds: nothing is unpickled. A field whose name says that it is a pickle is refused when
the dataset is made, not at its first sample.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from elastic_trainer.config import ConfigError

PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")
TEXTS = ("txt", "text", "transcript")
WHOLE_NUMBERS = ("cls", "cls2", "index", "inx", "id")
IMAGES = ("png", "jpg", "jpeg", "ppm", "pgm", "pbm", "pnm", "bmp", "webp", "gif", "tif", "tiff")
Decode = Callable[[bytes], Any]
KINDS = ("tensor", "pil", "bytes")


def decoders(fields: list[str], decode: str | Mapping[str, Decode]) -> dict[str, Decode]:
    """Return the decoder of each field: by its last extension, or by the mapping. Raises
    ConfigError."""
    if not isinstance(decode, Mapping) and decode not in KINDS:
        raise ConfigError(f"decode is {decode!r}. Use \"tensor\", \"pil\", \"bytes\", or a dict "
                          f"from a field to a function of its bytes.")
    own, kind = (decode, "tensor") if isinstance(decode, Mapping) else ({}, decode)
    if odd := sorted(set(own) - set(fields)):
        raise ConfigError(f"decode has the field {odd[0]!r}, and the samples have "
                          f"{', '.join(fields)}. Correct the name.")
    return {name: own[name] if name in own else _by_name(name, kind) for name in fields}


def _by_name(name: str, kind: str) -> Decode:
    last = name.rpartition(".")[2].lower()
    if kind == "bytes":
        return _bytes
    if last in PICKLES:
        raise ConfigError(
            f"the samples have the field {name!r}, which is a pickle: loading one runs the code "
            f"that its writer chose. Leave it out with fields=…, write it as npy or json, or read "
            f"its bytes with decode=\"bytes\" or decode={{{name!r}: function}}.")
    if last in IMAGES:
        require_pillow()
        return image_tensor if kind != "pil" else pil_image
    if last in TEXTS:
        return _text
    if last in WHOLE_NUMBERS:
        return int
    known: dict[str, Decode] = {"json": json.loads, "npy": npy}
    return known.get(last, _bytes)


def _bytes(data: bytes) -> bytes:
    return data


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def npy(data: bytes) -> numpy.ndarray:
    """Return the array of a .npy file. Raises ValueError for one of objects, which is a pickle."""
    array: numpy.ndarray = numpy.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array


def pil_image(data: bytes) -> Any:
    """Return an image in RGB, as Pillow has it."""
    image: Any = importlib.import_module("PIL.Image")
    with image.open(io.BytesIO(data)) as opened:
        return opened.convert("RGB")


def image_tensor(data: bytes) -> torch.Tensor:
    """Return an image as bytes of RGB, of shape (3, height, width)."""
    pixels = numpy.array(pil_image(data))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def require_pillow() -> None:
    """Raise ConfigError if Pillow is not installed."""
    try:
        importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("images need Pillow, which is not installed. Install it: pip install "
                          "'elastic-trainer[images]', or use decode=\"bytes\".") from error
