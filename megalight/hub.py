"""The Hugging Face Hub: names of models and tokenizers, and their folders in its cache.

``Qwen/Qwen3-0.6B`` is a name if no such path exists; ``hf://Qwen/Qwen3-0.6B`` always is. ``@v1.0`` behind it asks for a
branch, a tag or a commit. ``huggingface_hub`` downloads to its cache (``HF_HOME``, ``HF_HUB_CACHE``), resumes broken
downloads, and reads ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from megalight.errors import HubError
from megalight.first_rank import is_first
from megalight.imports import require

log = logging.getLogger(__name__)

PROTOCOL = "hf://"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    CONFIG,  # says which tokenizer, where no tokenizer_config.json does
)
MODEL_FILES = (
    *TOKENIZER_FILES,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    INDEX,
    WEIGHTS,
    "adapter_config.json",
    "adapter_model.safetensors",
)
"""What a model needs, beside the files that its index names. Weights in other formats are left in the Hub."""
DATA_FILES = tuple(f"*.{each}" for each in ("parquet", "jsonl", "json", "csv", "tsv", "txt", "jsonl.gz", "json.gz"))
"""Files of a data set that hold rows or text."""

Kind = Literal["model", "tokenizer", "dataset"]

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
_DATA = re.compile(r"hf://datasets/([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?")
_SHORT_NAME = re.compile(r"((?:[A-Za-z0-9][\w.-]*/)?[\w.-]+)(?:@([\w./-]+))?")


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub.

    Attributes:
        repository: its name, such as ``Qwen/Qwen3-0.6B``.
        revision: a branch, a tag or a commit. None: the default branch.
        given: what the user wrote, for messages.
    """

    repository: str
    revision: str | None
    given: str


def hub_name(path: str | os.PathLike[str]) -> HubName | None:
    """Return the repository that a path means, or None if it is a path.

    Raises:
        HubError: it begins with ``hf://``, and no name follows.
    """
    text = os.fspath(path)
    if text.startswith(PROTOCOL):
        if (found := _SHORT_NAME.fullmatch(text.removeprefix(PROTOCOL).strip("/"))) is None:
            raise HubError(
                f"{text} is no name of the Hugging Face Hub; names are hf://owner/name or hf://owner/name@v1."
            )
        return HubName(found[1], found[2], text)
    # A folder of that owner's name: a path with a mistake in its second part, not a name.
    if not isinstance(path, str) or (found := _NAME.fullmatch(text)) is None or os.path.exists(text.partition("/")[0]):
        return None
    return HubName(found[1], found[2], text)


def local(path: str | os.PathLike[str], kind: Literal["model", "tokenizer"] = "model") -> str | os.PathLike[str]:
    """Return the folder of a model or a tokenizer, which is downloaded if ``path`` is a name of the Hub.

    Any other path stays as it is. Only the files that are needed are downloaded: of weights, those in safetensors. Of
    several processes that call this on a node, one downloads, and the others wait.

    Args:
        path: a path, or a name: ``owner/name``, ``owner/name@revision`` or ``hf://owner/name``.
        kind: what is needed of it.

    Raises:
        HubError: the Hub has no such name or revision, asks for a token, or does not answer, and the cache lacks files;
            or the cache cannot be written.
        MissingPackageError: ``huggingface_hub`` is not installed.
    """
    name = hub_name(path)
    if name is None:
        return path
    require("huggingface_hub", f"nothing is at the path {name.given!r}; to read it as a name of the Hugging Face Hub")
    with _one_downloads(name), hub_errors(name, kind):
        folder = _download(name, MODEL_FILES if kind == "model" else TOKENIZER_FILES)
        if kind == "model":
            _add_weights(name, folder)
    return str(folder)


def local_data(given: str) -> str:
    """Return the path, or the glob, of files of a data set, which are downloaded if they are in the Hub.

    Any other path stays as it is.

    Args:
        given: ``hf://datasets/owner/name``, with ``@revision`` and a glob of files behind it
            (``hf://datasets/owner/name/data/train-*``); or ``owner/name`` without a dot, which would end a file's name,
            if no such path exists. Without a glob, all files of the data set that hold rows or text.

    Raises:
        HubError, MissingPackageError: see :func:`local`; or no file matches.
    """
    found = _DATA.fullmatch(given)
    name = HubName(found[1], found[2], given) if found else hub_name(given)
    if name is None or (not found and "." in name.repository):
        return given
    require("huggingface_hub", f"nothing is at the path {given!r}; to read it as a name of the Hugging Face Hub")
    pattern = found[3] if found else None
    with _one_downloads(name, "dataset"), hub_errors(name, "dataset"):
        folder = _download(name, (pattern,) if pattern else DATA_FILES, "dataset")
    if not any(each.is_file() for each in folder.rglob("*")):
        raise HubError(
            f"{given}: no file of the data set matches {pattern or ', '.join(DATA_FILES)}. Correct the name."
        )
    return str(folder / pattern) if pattern else str(folder)


def _download(name: HubName, files: tuple[str, ...], kind: Kind = "model") -> Path:
    """Download files of these names, as far as the repository has them, and return the folder of its commit."""
    from huggingface_hub import snapshot_download

    repo_type = "dataset" if kind == "dataset" else "model"
    return Path(
        snapshot_download(name.repository, revision=name.revision, allow_patterns=list(files), repo_type=repo_type)
    )


def _add_weights(name: HubName, folder: Path) -> None:
    """Download the files that the index names, if the weights are in several.

    Raises:
        HubError: the repository has no weights in safetensors, or the cache has only a part of them.
    """
    if (folder / WEIGHTS).is_file() or (folder / "adapter_model.safetensors").is_file():
        return
    if not (folder / INDEX).is_file():
        missing = CONFIG if not (folder / CONFIG).is_file() else WEIGHTS
        raise HubError(
            f"{name.given} holds no {missing}; models are read from {CONFIG} and safetensors. Name a repository that "
            "has them, or load this one with transformers and save it again with save_pretrained."
        )
    try:
        parts = sorted(map(str, set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{name.given}: {INDEX} names no files ({error}). Name another revision.") from error
    if not all((folder / part).is_file() for part in parts):
        # The commit of the index: the branch may have moved since.
        _download(HubName(name.repository, folder.name, name.given), tuple(parts))
    if lacking := [part for part in parts if not (folder / part).is_file()]:
        raise HubError(f"{name.given}: {INDEX} names {lacking[0]}, which is not there. Name another revision.")


def commit_of(name: HubName, kind: Kind) -> str:
    """Return the commit that a revision is now; without network, the last one that the cache knows.

    Raises:
        HubError: as :func:`local`.
    """
    require("huggingface_hub", f"reading {name.given!r}, a name of the Hugging Face Hub,")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if name.revision is not None and re.fullmatch(r"[0-9a-f]{40}", name.revision):
        return name.revision
    kind_of_hub = "dataset" if kind == "dataset" else "model"
    with hub_errors(name, kind):
        try:
            return str(HfApi().repo_info(name.repository, revision=name.revision, repo_type=kind_of_hub).sha)
        except (OfflineModeIsEnabled, ConnectionError):
            kept = Path(constants.HF_HUB_CACHE, _cache_folder(name, kind), "refs", name.revision or "main")
            if not kept.is_file():
                raise
            return kept.read_text().strip()


def _cache_folder(name: HubName, kind: Kind) -> str:
    return f"{'datasets' if kind == 'dataset' else 'models'}--{name.repository.replace('/', '--')}"


@contextmanager
def _one_downloads(name: HubName, kind: Kind = "model") -> Iterator[None]:
    """Let one process of a node at a time download a repository; the others find its files in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    folder = _cache_folder(name, kind)
    cache = Path(constants.HF_HUB_CACHE)
    lock = cache / ".locks" / folder / "megalight.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock)
        try:
            held.acquire(timeout=0)
        except Timeout:
            log.info("another process of this node downloads %s; this one waits", name.given)
            held.acquire()
    except OSError:
        # A cache that nobody writes to: nothing can be downloaded, so nobody need wait.
        yield
        return
    # Bars of one process: of the first rank, or of the one that downloads.
    silent = not is_first() and (cache / folder).exists() and not are_progress_bars_disabled()
    if silent:
        disable_progress_bars()
    try:
        yield
    finally:
        held.release()
        if silent:
            enable_progress_bars()


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def hub_errors(name: HubName, kind: Kind) -> Iterator[None]:
    """Turn errors of ``huggingface_hub``, and of the disk, into one message.

    Raises:
        HubError: with the name, what is wrong, and the next step.
    """
    import httpx
    from huggingface_hub import constants, errors

    where = "data set" if kind == "dataset" else "model"
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name.repository}"
    login = "give a token (hf auth login, or HF_TOKEN)"
    try:
        yield
        return
    except errors.GatedRepoError as error:
        cause: BaseException = error
        problem = f"access to it must be granted. Ask for it at {page}, and {login} of the account that has it."
    except errors.RepositoryNotFoundError as error:
        cause = error
        problem = (
            f"nothing is at this path, and {constants.ENDPOINT} has no {where} of this name, or it is private. Correct "
            f"the name, or {login}."
        )
    except errors.RevisionNotFoundError as error:
        cause = error
        problem = f"{name.repository} has no revision {name.revision!r}; give a branch, a tag or a commit of {page}."
    except errors.HFValidationError as error:
        cause = error
        problem = f"it is no path and no name of the Hub ({error}). Names are owner/name or owner/name@revision."
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.TransportError) as error:
        cause = error
        problem = _unreachable(error, kind, name)
    except errors.HfHubHTTPError as error:
        cause = error
        status = getattr(error.response, "status_code", None)
        problem = f"{constants.ENDPOINT} answers {status}. " + (
            f"Check the token, and that it may read {page}." if status in (401, 403) else "Try again later."
        )
    except OSError as error:
        cause = error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = (
            f"its files cannot be written to the cache {constants.HF_HUB_CACHE} "
            f"({'the disk is full' if full else error.strerror or error}). Free space there, or name another folder "
            "with HF_HOME, and run the command again: it resumes the download."
        )
    raise HubError(f"{name.given}: {problem}") from cause


def _unreachable(error: BaseException, kind: Kind, name: HubName) -> str:
    from huggingface_hub import constants

    lacks = f"and the cache {constants.HF_HUB_CACHE} lacks it or a part of it"
    if _offline() and kind == "dataset":
        return (
            f"HF_HUB_OFFLINE is set, {lacks}; streams always need the network. Download the files (hf download "
            f"{name.repository} --repo-type dataset --local-dir FOLDER), and give the folder."
        )
    if _offline():
        return (
            f"HF_HUB_OFFLINE is set, {lacks}. Run once without HF_HUB_OFFLINE, copy the cache of another machine, or "
            "give the path of a folder."
        )
    first: Any = error
    while first.__cause__ is not None:
        first = first.__cause__
    reason = str(first).partition("\n")[0] or type(first).__name__
    return (
        f"nothing is at this path, and {constants.ENDPOINT} does not answer ({reason}), {lacks}. Check the network or "
        "HF_ENDPOINT and run the command again, which resumes the download; or give the path of a folder."
    )
