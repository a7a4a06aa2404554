"""Images in a folder for each class, on a disk or in a store.

    ImageFolder("s3://bucket/train", transform=…, cache="/mnt/cache")

folder → the list of its images (in a store: an index, once) → here → (image, class)

What always holds:
1. Classes, their numbers and the order of the samples are those of torchvision's ImageFolder.
2. In a store, the list is an index that is built once. Files that were added, removed or changed
   after it are an error.

What it does not do: find classes of images quickly in a store with millions of objects. The store
lists 1000 of them with one request. TarShards reads archives of images.

Source: torchvision.datasets.folder (find_classes, make_dataset).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.data.blocks import BLOCK_BYTES, Blocks, Numbered, make_cache
from elastic_trainer.data.decoders import pil_image, raise_located, require_pillow
from elastic_trainer.data.files import Files, Source, is_remote
from elastic_trainer.data.index import Index, Kind, load, place_of, require_unchanged, store

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder(Numbered):
    """Images as `root/class/…/name.png`, as a dataset of (image, class) with `len` and `[i]`.

    It has the classes, the order and the attributes of torchvision's ImageFolder (`classes`,
    `class_to_idx`, `samples`, `targets`). An image is one of Pillow in RGB. `root` may be a URL:
    `cache`, `cache_bytes` and `index` are those of TarShards. `loader` is a function of a path, for
    a root on a disk.

    Raises ConfigError.
    """

    def __init__(self, root: str | os.PathLike[str], transform: Callable[[Any], Any] | None = None,
                 target_transform: Callable[[int], Any] | None = None,
                 loader: Callable[[str], Any] | None = None,
                 is_valid_file: Callable[[str], bool] | None = None, allow_empty: bool = False, *,
                 cache: str | os.PathLike[str] | None = None, cache_bytes: int = 10 << 30,
                 index: str | os.PathLike[str] | None = None,
                 storage_options: dict[str, Any] | None = None):
        self.root = os.fspath(root).rstrip("/")
        self.transform, self.target_transform, self.loader = transform, target_transform, loader
        if loader is None:
            require_pillow()
        elif is_remote(self.root):
            raise ConfigError(f"{self.root} is in a store, and loader is a function of a path. "
                              f"Leave it out, and make of the image what you need in transform.")
        is_valid = is_valid_file or _is_image
        files = Files(storage_options)
        found: Index | None = None
        if is_remote(self.root):
            found = index_images(files, self.root, index)
            names = [source.url[len(self.root) + 1:] for source in found.sources]
        else:
            names = _walked(self.root)
        self.classes = sorted({name.split("/")[0] for name in names if "/" in name})
        if not self.classes:
            raise ConfigError(f"{self.root} has no folder of a class. Put the images into "
                              f"{self.root}/CLASS/.")
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        chosen = [place for place, name in enumerate(names)
                  if not name.endswith("/") and "/" in name
                  and is_valid(f"{self.root}/{name}")]
        chosen.sort(key=lambda place: _order(names[place]))
        self.samples = [(f"{self.root}/{names[place]}",
                         self.class_to_idx[names[place].split("/")[0]]) for place in chosen]
        self.imgs = self.samples
        self.targets = [target for _, target in self.samples]
        empty = sorted(set(self.classes) - {self.classes[target] for target in set(self.targets)})
        if empty and not allow_empty:
            raise ConfigError(f"{self.root} has no image of the class {empty[0]} (names end with "
                              f"{', '.join(EXTENSIONS)}). Remove the folder, or use "
                              f"allow_empty=True.")
        sources = ([found.sources[place] for place in chosen] if found else
                   [Source(path, 0) for path, _ in self.samples])
        self.blocks = Blocks(files, sources, make_cache(cache, cache_bytes), BLOCK_BYTES)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return samples; those in a store are read in parallel."""
        if not is_remote(self.root):
            return [self._finished(number, self._opened(number)) for number in numbers]
        data = self.blocks.read([(number, 0, self.blocks.sources[number].size)
                                 for number in numbers])
        return [self._finished(number, self._image(number, one))
                for number, one in zip(numbers, data, strict=True)]

    def _opened(self, number: int) -> Any:
        path = self.samples[number][0]
        if self.loader:
            try:
                return self.loader(path)
            except Exception as error:
                raise_located(error, f"sample {number}, {path}", is_ours=False)
        with open(path, "rb") as file:
            return self._image(number, file.read())

    def _image(self, number: int, data: bytes) -> Any:
        try:
            return pil_image(data)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{self.samples[number][0]} is no image that Pillow reads: {error}. "
                             f"Replace the file, or leave it out with is_valid_file.") from error

    def _finished(self, number: int, image: Any) -> tuple[Any, Any]:
        target: Any = self.samples[number][1]
        try:
            if self.transform:
                image = self.transform(image)
            return image, self.target_transform(target) if self.target_transform else target
        except Exception as error:
            raise_located(error, f"sample {number}, {self.samples[number][0]}", is_ours=False)


def _is_image(path: str) -> bool:
    return path.lower().endswith(EXTENSIONS)


def _order(name: str) -> tuple[str, str, str]:
    """Return what torchvision sorts by: class, folder, name."""
    folder, _, last = name.rpartition("/")
    return name.split("/")[0], folder, last


def _walked(root: str) -> list[str]:
    """Return the files and the folders of classes below a root, relative to it."""
    if not os.path.isdir(root):
        raise ConfigError(f"{root} is no folder. Correct the root of ImageFolder.")
    found = [f"{entry.name}/" for entry in os.scandir(root) if entry.is_dir()]
    for folder, _, files in os.walk(root, followlinks=True):
        below = os.path.relpath(folder, root)
        if below != ".":
            found += [f"{below}/{name}" for name in files]
    return found


# --- the index ------------------------------------------------------------------------------------

def index_images(files: Files, root: str, where: Any, *, anew: bool = False) -> Index:
    """Return the list of the files below a root in a store; store it if there is none. Raises
    ConfigError."""
    listed = sorted((one for one in files.listing(root, is_deep=True)
                     if "/.elastic-trainer/" not in one.url), key=lambda one: one.url)
    if not listed:
        raise ConfigError(f"{root} has no files. Correct the root of ImageFolder.")
    place = place_of("images", [f"{root}/x"], where)
    index = Index("images", f"{root}/", listed)
    known = None if anew else load(files, place, index.folder, IMAGES)
    if known is None:
        store(files, place, index, replace=anew)
        known = load(files, place, index.folder, IMAGES) or index
    now = {one.url for one in listed}
    if odd := sorted({one.url for one in known.sources} ^ now):
        was = "added" if odd[0] in now else "removed"
        raise ConfigError(f"{odd[0]} was {was} after the index {place} was built, so the numbers "
                          f"of the samples would differ. Undo it, or build the index again "
                          f"(elastic-trainer index --rebuild {root}/) and start a new run.")
    return require_unchanged(known, place, listed)


IMAGES = Kind("images", {}, lambda index: "it has facts" if index.facts else "")
