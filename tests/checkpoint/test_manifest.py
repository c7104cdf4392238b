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


def test_the_helper_of_these_tests_signs_like_the_writer() -> None:
    assert parse(changed(), WHERE) == MANIFEST


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(CheckpointRejected, match=r"manifest\.json"):
        parse(data, WHERE)


@given(st.sampled_from(sorted(json.loads(MANIFEST.to_bytes()))), JSON)
@settings(max_examples=200, deadline=None)
def test_a_field_with_any_other_content_is_rejected_or_valid(field: str, value: Any) -> None:
    try:
        manifest = parse(changed(**{field: value}), WHERE)
    except CheckpointRejected:
        return
    assert parse(manifest.to_bytes(), WHERE) == manifest


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


@pytest.mark.parametrize(
    "name",
    [
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
    ],
)
def test_a_file_name_that_leaves_the_directory_is_rejected(name: str) -> None:
    record = {"bytes": 1, "sha256": "b" * 64}
    with pytest.raises(CheckpointRejected, match="plain names"):
        parse(changed(files={name: record}), WHERE)


@pytest.mark.parametrize(
    "fields",
    [
        {"step": True},
        {"step": -1},
        {"step": 1.0},
        {"step": 10**8},
        {"step": "3"},
        {"data_cursor": None},
        {"data_cursor": 2**63},
        {"world_size": 0},
        {"state_sha256": "A" * 64},
        {"state_sha256": "a" * 63},
        {"state_sha256": "a" * 64 + "\n"},
        {"numerical": []},
        {"numerical": {"a": []}},
        {"versions": {"torch": 2}},
        {"files": {"a": {"bytes": -1, "sha256": "b" * 64}}},
        {"files": {"a": {"bytes": 1}}},
        {"files": {"a": {"bytes": 1, "sha256": "b" * 64, "url": "x"}}},
        {"files": {"a": None}},
        {"extra": None},
        {"more": 1},
    ],
)
def test_a_field_of_another_type_or_range_is_rejected_even_with_the_right_hash(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(CheckpointRejected, match=r"run/step-00000003/manifest\.json: "):
        parse(changed(**fields), WHERE)


def test_an_unknown_format_is_rejected_and_said_to_be_one() -> None:
    with pytest.raises(
        CheckpointRejected, match=r"format: expected 'instep-checkpoint/1'.* got 'instep-checkpoint/3'"
    ):
        parse(changed(format="instep-checkpoint/3"), WHERE)


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


def test_nesting_beyond_the_bound_is_rejected() -> None:
    nested: Any = 0
    for _ in range(200):
        nested = [nested]
    with pytest.raises(CheckpointRejected, match="at most 32 levels"):
        parse(changed(extra={"a": nested}), WHERE)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"numerical": {"lr": float("nan")}}, r"numerical\.lr"),
        ({"extra": {"rng": object()}}, r"extra\.rng"),
        ({"extra": {"a": {1: 2}}}, r"extra\.a"),
        ({"step": -1}, "step"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(MANIFEST, **fields)


def test_a_manifest_too_long_to_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="at most 16777216 bytes"):
        replace(MANIFEST, extra={"a": "x" * MAX_BYTES}).to_bytes()


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
