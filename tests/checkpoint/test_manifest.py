"""The manifest and its JSON: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.checkpoint.manifest import MAX_BYTES, FileRecord, Manifest, canonical, parse
from instep.errors import CheckpointRejected

WHERE = Path("run/step-00000003/manifest.json")
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | FINITE | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3)
)
MANIFEST = Manifest(
    step=3,
    data_cursor=24,
    state_sha256="a" * 64,
    world_size=2,
    numerical={"batch.micro_size": 4},
    versions={"torch": "2"},
    files={"model.safetensors": FileRecord(10, "b" * 64)},
    extra={"note": [1, 2.5, None]},
)


def signed(body: Any) -> bytes:
    """A manifest with the hash it should have, so that the checks behind the hash are reached."""
    if isinstance(body, dict):
        body = {key: value for key, value in body.items() if key != "sha256"}
        body["sha256"] = hashlib.sha256(
            json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
    return json.dumps(body).encode()


def changed(**fields: Any) -> bytes:
    return signed({**json.loads(MANIFEST.to_bytes()), **fields})


@given(
    numerical=st.dictionaries(st.text(max_size=8), SCALARS, max_size=4),
    extra=st.dictionaries(st.text(max_size=8), JSON, max_size=4),
    step=st.integers(0, 10**8 - 1),
    cursor=st.integers(0, 2**63 - 1),
)
@settings(max_examples=50, deadline=None)
def test_a_manifest_comes_back_as_it_was(numerical: Any, extra: Any, step: int, cursor: int) -> None:
    manifest = replace(MANIFEST, numerical=numerical, extra=extra, step=step, data_cursor=cursor)
    again = parse(manifest.to_bytes(), WHERE)
    assert again == manifest
    assert again.to_bytes() == manifest.to_bytes()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_is_rejected_or_changes_nothing(data: st.DataObject) -> None:
    content = bytearray(MANIFEST.to_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(CheckpointRejected):
        assert parse(bytes(content), WHERE) == MANIFEST


@pytest.mark.parametrize("digit", ["data_cursor", "state_sha256", "world_size"])
def test_an_edited_field_does_not_pass_for_the_original(digit: str) -> None:
    body = json.loads(MANIFEST.to_bytes())
    body[digit] = "c" * 64 if digit == "state_sha256" else body[digit] + 1
    with pytest.raises(CheckpointRejected, match="sha256: expected the hash of the other fields"):
        parse(json.dumps(body).encode(), WHERE)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 0


RECORD = {"bytes": 1, "sha256": "b" * 64}
NAMES = (
    "../model",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "..",
    ".",
    "",
    ".hidden",
    "a\n",
    "a\0",
    "ä",
    "x" * 65,
    "manifest.json",
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(({"step": step}, "step") for step in (True, -1, 1.0, 10**8, "3")),
        *(({"data_cursor": cursor}, "data_cursor") for cursor in (None, 2**63)),
        ({"world_size": 0}, "world_size"),
        *(({"state_sha256": told}, "state_sha256") for told in ("A" * 64, "a" * 63, "a" * 64 + "\n")),
        *(({"numerical": told}, "numerical") for told in ([], {"a": []})),
        ({"versions": {"torch": 2}}, "versions"),
        *(({"files": {"a": told}}, "files") for told in ({"bytes": 1}, {**RECORD, "url": "x"}, None)),
        ({"files": {"a": {**RECORD, "bytes": -1}}}, "bytes"),
        *(({"files": {name: RECORD}}, "plain names") for name in NAMES),
        ({"extra": None}, "extra"),
        ({"extra": {"a": nested(200)}}, "at most 32 levels"),
        ({"more": 1}, "more"),
        (
            {"format": "instep-checkpoint/3"},
            r"format: expected 'instep-checkpoint/1'.* got 'instep-checkpoint/3'",
        ),
    ],
)
def test_a_field_of_another_type_or_range_is_rejected_even_with_the_right_hash(
    fields: dict[str, Any], words: str
) -> None:
    assert parse(changed(), WHERE) == MANIFEST
    with pytest.raises(CheckpointRejected, match=rf"run/step-00000003/manifest\.json: .*{words}"):
        parse(changed(**fields), WHERE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b" " * (MAX_BYTES + 1),
        b'{"step": 1' + b"0" * 5000 + b"}",
        MANIFEST.to_bytes().replace(b'"step": 3', b'"step": 3, "step": 3'),
        MANIFEST.to_bytes().replace(b'"step": 3', b'"step": NaN'),
        MANIFEST.to_bytes().replace(b'"step": 3', b'"step": 1e999'),
        MANIFEST.to_bytes()[:-3],
        MANIFEST.to_bytes() + b"{}",
    ],
    ids=lambda data: data[:12].decode("latin1") + f" ({len(data)} bytes)",
)
def test_json_with_a_trick_in_it_is_rejected(data: bytes) -> None:
    with pytest.raises(CheckpointRejected):
        parse(data, WHERE)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"numerical": {"lr": float("nan")}}, r"numerical\.lr"),
        ({"extra": {"rng": object()}}, r"extra\.rng"),
        ({"extra": {"a": {1: 2}}}, r"extra\.a"),
        ({"step": -1}, "step"),
        ({"extra": {"a": "x" * MAX_BYTES}}, "at most 16777216 bytes"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(MANIFEST, **fields).to_bytes()


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert (
        canonical({"b": 1, "a": [1.5, None]})
        == canonical({"a": [1.5, None], "b": 1})
        == b'{"a":[1.5,null],"b":1}'
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda data: data.replace(b'"', b"?", 3),
            r"expected JSON, got something else from line 2, column 2 on",
        ),
        (
            lambda data: data[: len(data) // 2],
            r"expected JSON, got something else from line \d+, column \d+ on",
        ),
        (lambda data: data[:7] + b"\xff" + data[7:], "expected text, got something else at byte 7"),
    ],
)
def test_what_is_no_json_is_refused_with_its_place_and_not_in_the_words_of_a_parser(damage, words) -> None:
    with pytest.raises(CheckpointRejected, match=words) as caught:
        parse(damage(MANIFEST.to_bytes()), Path("m.json"))
    said = str(caught.value)
    assert said.startswith("m.json: ") and "Expecting" not in said and "codec" not in said
    assert said.endswith(": take another checkpoint, or restore this one from a copy")
