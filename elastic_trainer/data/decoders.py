"""Make values of the bytes of a sample's fields.

TarShards, ImageFolder → here

What always holds:
1. Nothing is unpickled. A field whose name says that it is a pickle is refused when the dataset is
   made, not at its first sample.
2. An image is one of FORMATS, whatever its name says, so no other program is started: Pillow opens
   PostScript with Ghostscript.
3. An image becomes RGB of 8 bits by the range of its values. Where that range is not known, it is
   refused by its mode. Alpha is left out, an animation is its first picture, and the orientation of
   EXIF is not applied, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy
import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.data.batches import add_note

PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")
TEXTS = ("txt", "text", "transcript")
WHOLE_NUMBERS = ("cls", "cls2", "index", "inx", "id")
IMAGES = ("png", "jpg", "jpeg", "ppm", "pgm", "pbm", "pnm", "bmp", "webp", "gif", "tif", "tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "PPM", "BMP", "DIB", "GIF", "TIFF")
"""Those of Pillow that a field of IMAGES may have. Real datasets have PNG files called .jpg, so
each may have all. Pillow reads them without another program."""
PLUGINS = ("Jpeg", "Png", "WebP", "Ppm", "Bmp", "Gif", "Tiff")
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_SAMPLE_FORMAT = 258, 262, 339
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
    if wrong := [name for name, how in own.items() if not callable(how)]:
        raise ConfigError(f"decode has {own[wrong[0]]!r} for the field {wrong[0]!r}. Use a "
                          f"function of its bytes.")
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


def raise_located(error: Exception, where: str, *, is_ours: bool) -> NoReturn:
    """Raise the exception for a sample that cannot be made: it names where the sample lies.

    `is_ours`: a decoder of this module has raised. An exception of the user's code keeps its type,
    and so does one of the machine (no memory).
    """
    if is_ours and not isinstance(error, MemoryError):
        raise ValueError(f"{where}, cannot be decoded: {type(error).__qualname__}: {error}. "
                         f"Replace it, leave it out, or give decode a function for it.") from error
    add_note(error, f"elastic-trainer read {where}.")
    raise error


def _bytes(data: bytes) -> bytes:
    return data


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def npy(data: bytes) -> numpy.ndarray:
    """Return the array of a .npy file. Raises ValueError for one of objects, which is a pickle."""
    array: numpy.ndarray = numpy.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array


def pil_image(data: bytes) -> Any:
    """Return an image in RGB, as Pillow has it. Raises ValueError and Pillow's errors."""
    pillow: Any = importlib.import_module("PIL")
    image: Any = importlib.import_module("PIL.Image")
    try:
        found = image.open(io.BytesIO(data), formats=FORMATS)
    except pillow.UnidentifiedImageError as error:
        raise ValueError(f"the {len(data)} bytes are none of {', '.join(FORMATS)}") from error
    with found as opened:
        if opened.mode.startswith(("I", "F")):
            return image.fromarray(_eight_bits(opened)).convert("RGB")
        return opened.convert("RGB")


def _eight_bits(opened: Any) -> numpy.ndarray:
    """Return the values of a gray image with more than 8 bits as the highest 8 of them. Raises
    ValueError where their range is not known."""
    bits = 0
    if opened.format == "TIFF":
        tags = opened.tag_v2
        is_plain = tags.get(TIFF_PHOTOMETRIC) == 1 and tags.get(TIFF_SAMPLE_FORMAT, (1,))[0] == 1
        bits = tags.get(TIFF_BITS, (0,))[0] if is_plain and opened.mode != "F" else 0
    elif opened.format in ("PNG", "PPM") and opened.mode != "F":
        bits = 16  # Pillow has scaled the values to 16 bits
    if not 8 <= bits <= 16:
        raise ValueError(f"the image is a {opened.format} in the mode {opened.mode}, whose range "
                         f"of values is not known. Give decode a function that scales them")
    values = numpy.asarray(opened).astype(numpy.int64)
    return (values >> bits - 8).clip(0, 255).astype(numpy.uint8)


def image_tensor(data: bytes) -> torch.Tensor:
    """Return an image as bytes of RGB, of shape (3, height, width)."""
    pixels = numpy.array(pil_image(data))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def require_pillow() -> None:
    """Raise ConfigError if Pillow is not installed."""
    try:
        for name in PLUGINS:  # else Pillow imports all that it has at the first image
            importlib.import_module(f"PIL.{name}ImagePlugin")
    except ImportError as error:
        raise ConfigError("images need Pillow, which is not installed. Install it: pip install "
                          "'elastic-trainer[images]', or use decode=\"bytes\".") from error
