"""What a checkpoint says about itself: the manifest, its JSON, and a parser that believes nothing.

The manifest is the one file that names the others, with sizes and hashes, and it carries a hash of itself,
because a flipped digit in the data cursor would be valid JSON and would train on other data. The parser sees
bytes that anyone may have written: length, JSON, types, ranges and file names are checked before anything is
believed, and whatever is wrong becomes a ``CheckpointRejected`` that names the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from instep.checkpoint.files import PLAIN_NAME
from instep.errors import CheckpointRejected

Scalar: TypeAlias = str | int | float | bool | None
Json: TypeAlias = Any  # Scalar | list[Json] | dict[str, Json]

FORMAT = "instep-checkpoint/1"
FORMAT_IN_PIECES = "instep-checkpoint/2"  # with ``pieces``, and otherwise the same
MANIFEST_FILE = "manifest.json"
MAX_BYTES = 16 << 20
MAX_VALUES = 1 << 20  # in one text: three bytes of it can become a hundred in memory
MAX_DEPTH = 32
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file of the checkpoint."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        _require_count("bytes", self.bytes)
        _require_sha256("sha256", self.sha256)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's description; a ValueError at construction names the field that cannot be written."""

    step: int  # optimizer steps done
    data_cursor: int  # global position of the sample stream at which the next step starts
    state_sha256: str  # of parameters, buffers and optimizer moments, whatever files hold them
    world_size: int  # of the run that wrote it; any other may read it
    numerical: Mapping[str, Scalar]  # the numerical configuration: see contract.py
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]  # plain names in the manifest's own directory
    extra: Mapping[str, Json]
    pieces: Json = None  # where each entry of a sharded state is: see state/stored.py

    def __post_init__(self) -> None:
        _require_count("step", self.step, below=10**8)
        _require_count("data_cursor", self.data_cursor)
        _require_sha256("state_sha256", self.state_sha256)
        _require_count("world_size", self.world_size, least=1)
        _require_mapping("numerical", self.numerical, Scalar, "text, a number, true, false or null")
        _require_mapping("versions", self.versions, str, "text")
        _require_mapping("files", self.files, FileRecord, "a size and a hash")
        for name in self.files:
            plain = PLAIN_NAME.fullmatch(name) and name != MANIFEST_FILE
            _require(bool(plain), "files", "plain names of A-Z a-z 0-9 . _ -, at most 64 long", name)
        _require_mapping("extra", self.extra, object, "JSON")
        require_json("numerical", self.numerical)
        require_json("extra", self.extra)
        require_json("pieces", self.pieces)
        _require_mapping("frozen", self.frozen, str, "text")

    @property
    def is_best(self) -> bool:
        """Whether a run has saved this one as its best so far (``run/best.py``)."""
        best = self.extra.get("best")
        return isinstance(best, list) and len(best) == 2 and best[1] == self.step

    @property
    def frozen(self) -> Mapping[str, str]:
        """The frozen parameters that were left out, each with 16 digits of its hash."""
        found: Mapping[str, str] = self.extra.get("frozen", {})
        return found

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``: indented JSON with sorted keys and a hash of all the rest."""
        body = {"format": FORMAT_IN_PIECES, **asdict(self)}
        if self.pieces is None:
            body["format"] = FORMAT
            del body["pieces"]
        body["sha256"] = hashlib.sha256(canonical(body)).hexdigest()
        data = json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
        _require(len(data) <= MAX_BYTES, "manifest", f"at most {MAX_BYTES} bytes", len(data))
        _require_few(data)
        return data


def canonical(value: Json) -> bytes:
    """The one JSON text of a value that hashes are taken of: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse(data: bytes, path: Path) -> Manifest:
    """The manifest that ``data``, read from ``path``, holds; CheckpointRejected if it is not exactly one."""
    try:
        body = parse_json(data, MAX_BYTES)
        _require(isinstance(body, dict), "manifest", "an object", body)
        found = body.get("format")
        known = (FORMAT, FORMAT_IN_PIECES)
        _require(found in known, "format", f"{FORMAT!r}, or another that this version of instep reads", found)
        names = {"format", *(field.name for field in fields(Manifest))}
        names -= {"pieces"} if found == FORMAT else set()
        digest = body.pop("sha256", None)
        _require(set(body) == names, "fields", ", ".join(sorted(names)), sorted(body))
        _require(digest == _digest(body), "sha256", "the hash of the other fields", digest)
        del body["format"]
        return _from_fields(body)
    except ValueError as error:
        raise CheckpointRejected(
            f"{path}: {error}: take another checkpoint, or restore this one from a copy"
        ) from error


def parse_json(data: bytes, max_bytes: int) -> Json:
    """``json.loads`` of at most ``max_bytes`` of unknown origin; every failure is a ValueError."""
    _require(len(data) <= max_bytes, "length", f"at most {max_bytes} bytes", len(data))
    _require_few(data)
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("expected JSON, got endless nesting") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"expected JSON, got something else from {where} on: damaged or cut off") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"expected text, got something else at byte {error.start}: damaged") from None


def _require_few(data: bytes) -> None:
    """Every value but the first follows one of these; in a text they count as well, and seldom matter."""
    values = sum(map(data.count, (b"[", b"{", b",", b":")))
    _require(values <= MAX_VALUES, "length", f"at most {MAX_VALUES} values", values)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    _require(len(found) == len(pairs), "keys", "each key once", [key for key, _ in pairs])
    return found


def _digest(body: dict[str, Json]) -> str:
    require_json("manifest", body)  # bounds the depth before json walks it, and lets no NaN in
    return hashlib.sha256(canonical(body)).hexdigest()


def _from_fields(body: dict[str, Json]) -> Manifest:
    _require_mapping("files", body["files"], dict, "objects")
    records = {}
    for name, record in body["files"].items():
        _require(set(record) == {"bytes", "sha256"}, "files", "bytes and sha256", record)
        records[name] = FileRecord(**record)
    return Manifest(**{**body, "files": records})


def _require(ok: bool, where: str, expected: str, got: object) -> None:
    if not ok:
        shown = reprlib.repr(got).encode("ascii", "backslashreplace").decode()
        raise ValueError(f"{where}: expected {expected}, got {shown}")


def _require_count(where: str, value: object, least: int = 0, below: int = 2**63) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and least <= value < below
    _require(ok, where, f"a whole number from {least} and below {below}", value)


def _require_sha256(where: str, value: object) -> None:
    ok = isinstance(value, str) and SHA256.fullmatch(value) is not None
    _require(ok, where, "64 hexadecimal digits in lower case", value)


def _require_mapping(where: str, value: object, kind: Any, expected: str) -> None:
    _require(isinstance(value, Mapping), where, "an object", value)
    assert isinstance(value, Mapping)
    for key, item in value.items():
        _require(isinstance(key, str), where, "text as keys", key)
        _require(isinstance(item, kind), f"{where}.{key}", expected, item)


def require_json(where: str, value: object, depth: int = 0) -> None:
    """Raise unless ``value`` survives a trip through JSON; tuples pass, and come back as lists."""
    _require(depth <= MAX_DEPTH, where, f"at most {MAX_DEPTH} levels", "more")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require(isinstance(key, str), where, "text as keys", key)
            require_json(f"{where}.{key}" if depth < 2 else where, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            require_json(where, item, depth + 1)
    elif isinstance(value, float):
        _require(math.isfinite(value), where, "a finite number", value)
    else:
        _require(
            isinstance(value, Scalar), where, "text, a number, true, false, null or lists of them", value
        )


# Two configurations side by side: which fields differ, and one hash for all of them.

ABSENT = "absent"


def fingerprint(fields: Mapping[str, Scalar]) -> str:
    """SHA-256 of the fields' canonical JSON: equal exactly when :func:`differences` is empty."""
    return hashlib.sha256(canonical(dict(fields))).hexdigest()


def differences(
    a: Mapping[str, Scalar], b: Mapping[str, Scalar], where: tuple[str, str] = ("in the checkpoint", "now")
) -> list[str]:
    """One line per field that differs, sorted: ``batch.micro_size: 4 in the checkpoint, 8 now``."""
    lines = []
    for name in sorted({*a, *b}):
        first, second = (json.dumps(fields[name]) if name in fields else ABSENT for fields in (a, b))
        if first != second:
            lines.append(f"{name}: {first} {where[0]}, {second} {where[1]}")
    return lines
