"""The manifest, a checkpoint's seal: written last, it lists every other file. A folder without one is not a checkpoint.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megalight.checkpoint.disk.address import Address
from megalight.checkpoint.disk.files import (
    FileRecord,
    PathLike,
    checked_count,
    checked_name,
    checksum,
    dump_json,
    located,
    parse_json,
    write_file,
)
from megalight.errors import CheckpointError, MissingCheckpointError, hub_hint

NAME = "manifest.json"
FORMAT = "megalight"
VERSION = 2
MAX_SIZE = 256 << 20

FULLY_RESHARDABLE = "fully_reshardable"
"""The scheme of canonical tensors; see :mod:`megalight.checkpoint.scheme`."""

DP_RESHARDABLE = "dp_reshardable"
"""The scheme of flat optimizer state; see there."""

FSDP_DTENSOR = "fsdp_dtensor"
"""The scheme of canonical tensors in files of torch's Distributed Checkpoint; see there."""

RUN = frozenset({"lightning_logs", "checkpoints", "hparams.yaml", "run.yaml"})
"""What the folder of a run may hold besides checkpoints."""
_SEAL = '{"checksum":"%s",\n'


@dataclass(frozen=True)
class Manifest:
    """What a finished checkpoint consists of.

    Attributes:
        files: every other file in the folder, by relative name.
        saved_at: nanoseconds since 1970, and later than that of any checkpoint that was in the same folder, even if
            the clock went back.
        world_size: ranks that saved it.
        versions: of the software that saved it.
        scheme: in which form tensors were written.
    """

    files: Mapping[str, FileRecord]
    saved_at: int
    world_size: int
    versions: Mapping[str, str]
    scheme: str

    def write(self, root: PathLike) -> None:
        """Seal the folder."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        # Sorted, so that the same content has the same bytes.
        content["files"] = {name: [record.size, record.checksum] for name, record in sorted(self.files.items())}
        # Without its first brace: the seal's line comes in front of it, and the whole is JSON again.
        body = dump_json(content)[1:]
        write_file(root / NAME, (_SEAL % checksum(body)).encode() + body)


def is_run(root: PathLike) -> bool:
    """Whether a folder is that of a run, and no checkpoint."""
    return not (root / NAME).exists() and any((root / name).exists() for name in RUN)


def read(root: PathLike) -> Manifest:
    """The manifest of a folder, itself verified; the files it lists are not looked at.

    Raises:
        CheckpointError: there is none, it is torn or malformed, or of a later version.
    """
    if not (root / NAME).exists():
        # A folder that is missing and one that is unfinished call for different steps.
        error = CheckpointError if root.exists() else MissingCheckpointError
        raise error(f"{root} is not a finished Megalight checkpoint: {_guess(root)}")
    path = located(root, NAME)
    try:
        # A damaged file of any size must not fill the memory.
        if path.stat().st_size > MAX_SIZE:
            raise CheckpointError(f"{path} is larger than any manifest ({MAX_SIZE} bytes).")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise MissingCheckpointError(f"{root} was removed while it was opened.") from error
    prefix, body = data[: len(_SEAL % ("0" * 16))], data[len(_SEAL % ("0" * 16)) :]
    # Before it is parsed: what a torn file says is worth nothing.
    if prefix != (_SEAL % checksum(body)).encode():
        raise CheckpointError(f"checkpoint {root} is torn: {NAME} differs from what was saved.")
    return _parse(parse_json(data, str(path)), str(path))


def _parse(value: Any, what: str) -> Manifest:
    try:
        # Versions are refused both ways, as neither knows what the other means.
        if value["format"] != FORMAT or value["version"] != VERSION:
            raise CheckpointError(
                f"{what} is of format {value['format']!r} version {value['version']!r}; this Megalight reads "
                f"{FORMAT!r} version {VERSION}. Use the Megalight that wrote it."
            )
        files = {}
        for name, (size, digest) in value["files"].items():
            files[checked_name(name)] = FileRecord(checked_count(size, what), str(digest))
        versions = {str(key): str(version) for key, version in value["versions"].items()}
        saved_at, world_size = (checked_count(value[key], what) for key in ("saved_at", "world_size"))
        return Manifest(files, saved_at, world_size, versions, str(value["scheme"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{what} is malformed: {type(error).__name__}: {error}.") from error


def check_files(root: PathLike, manifest: Manifest) -> None:
    """Every listed file is there with its size. Contents are verified where they are read.

    Raises:
        CheckpointError: one is missing, of another size, or no regular file.
    """
    # Sizes only: they show what was cut off. One listing of a store, or one call per file on a disk.
    listed = root.sizes() if isinstance(root, Address) else None
    for name, record in manifest.files.items():
        if listed is not None and name not in listed:
            raise CheckpointError(f"checkpoint {root} is torn: {name} is missing.")
        size = located(root, name).stat().st_size if listed is None else listed[name]
        if size != record.size:
            raise CheckpointError(f"checkpoint {root} is torn: {name} has {size} bytes, {record.size} were saved.")


def complete(root: PathLike) -> Manifest | None:
    """The manifest of a folder with all its files, or None. Read once: another process may remove the folder meanwhile.

    Raises:
        StorageError, OSError: its storage does not answer.
    """
    try:
        manifest = read(root)
        check_files(root, manifest)
    # Removed meanwhile, or of others. A disk that fails is neither: a run must not start from scratch for it.
    except (CheckpointError, FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return manifest


def _guess(root: PathLike) -> str:
    if not root.exists():
        return f"nothing is there.{hub_hint(root)}"
    if root.is_file():
        return (
            "it is a single file. If one of Lightning's own strategies wrote it, `megalight fit --ckpt_path` resumes "
            "from it in any layout, and saves a checkpoint of ours."
        )
    try:
        found = {entry.name for entry in root.iterdir()}
    except FileNotFoundError:  # another process has just removed it
        return "nothing is there."
    if found & {".zarray", ".zgroup"} or any((root / name / ".zarray").exists() for name in found):
        return (
            "it looks like a zarr folder of an old Megatron-LM, a format that is no longer read. Load it with the "
            "Megatron-LM that wrote it, save it again with --ckpt-format torch_dist, and export that to a folder of "
            "transformers (Megatron Bridge does), which megalight convert reads."
        )
    if ".metadata" in found:
        return (
            "it looks like a folder of torch Distributed Checkpoint. Load it with torch.distributed.checkpoint. Of "
            "Megatron-core's, megalight convert reads those of --ckpt-format torch_dist, which have a common.pt; save "
            "one of fsdp_dtensor again in that format."
        )
    if "config.json" in found:
        return "it looks like a folder of transformers. Start from it with weights=FOLDER, or use megalight convert."
    if "data" in found or "index.json" in found:
        return "it has no manifest, so the save never finished. Use another checkpoint."
    held = ", ".join(sorted(found)[:5]) or "nothing"
    return f"it has no manifest. It holds {held}. Give a checkpoint, or the folder of a run that has saved one."
