"""Files that are damaged, lie, or were made to do harm: rejected by name, for the older checkpoint.

Most of them carry the right hashes, because whoever can write the files can write the manifest, too. None
needs memory to speak of, and none runs code.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pickle
import py_compile
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.checkpoint.load import newest, verify
from instep.checkpoint.manifest import MAX_BYTES, canonical, parse
from instep.checkpoint.save import MODEL_FILE, OPTIMIZER_FILE
from instep.checkpoint.shorthand import load as load_newest
from instep.checkpoint.shorthand import save
from instep.errors import CheckpointRejected
from tests.checkpoint.elsewhere import Elsewhere
from tests.checkpoint.nets import made, named, train, whole_hash
from tests.checkpoint.no_pickle import WAYS, Unpickled, forbidden
from tests.checkpoint.states import layout_of, save_steps
from tests.training_state import training_state

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
MB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The only checkpoint of a directory, of a trained module and its optimizer."""
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    return save(tmp_path, step=1, model=model, optimizer=optimizer)


def signed(path: Path, change: Callable[[Any], None] = lambda body: None) -> None:
    """Make the manifest fit the files as they are now, then ``change`` its body and sign it."""
    body = json.loads((path / "manifest.json").read_bytes())
    for name in body["files"]:
        data = (path / name).read_bytes()
        body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(body)
    body.pop("sha256")
    body["sha256"] = hashlib.sha256(canonical(body)).hexdigest()
    (path / "manifest.json").write_text(json.dumps(body))


def assert_rejected(path: Path) -> None:
    """Neither the module nor the optimizer is given anything of the directory that ``path`` is in."""
    model, optimizer = made(1)
    before = whole_hash(model, optimizer)
    with pytest.raises(CheckpointRejected):
        load_newest(path.parent, model=model, optimizer=optimizer)
    assert whole_hash(model, optimizer) == before


def file_of(*entries: str, data: int = 8, header: bytes = b"") -> bytes:
    header = header or ("{" + ",".join(entries) + "}").encode()
    return len(header).to_bytes(8, "little") + header + bytes(data)


HEADERS = {
    "two of one name": file_of(f'"x":{ENTRY}', f'"x":{ENTRY}'),
    "two of one name elsewhere": file_of('"x":' + ENTRY.replace("[0,8]", "[8,16]"), f'"x":{ENTRY}'),
    "overlapping": file_of(f'"x":{ENTRY}', f'"y":{ENTRY}'),
    "a hole": file_of(f'"x":{ENTRY}', '"y":' + ENTRY.replace("[0,8]", "[16,24]"), data=24),
    "out of range": file_of('"x":' + ENTRY.replace("[0,8]", "[0,16]").replace("[2]", "[4]")),
    "empty and endless": file_of(
        '"x":' + ENTRY.replace("[2]", f"[0,{2**62},{2**62}]").replace("[0,8]", "[0,0]"), data=0
    ),
    "empty and unsigned": file_of(
        '"x":' + ENTRY.replace("[2]", f"[{2**64 - 1},0]").replace("[0,8]", "[0,0]"), data=0
    ),
    "product that wraps": file_of('"x":' + ENTRY.replace("[2]", f"[{2**63},4]").replace("[0,8]", "[0,0]")),
    "a hundred dimensions": file_of('"x":' + ENTRY.replace("[2]", str([1] * 100 + [2]))),
    "another dtype": file_of('"x":' + ENTRY.replace("F32", "PICKLE")),
    "half bytes": file_of('"x":' + ENTRY.replace("F32", "F4").replace("[2]", "[16]")),
    "dtype of another size": file_of('"x":' + ENTRY.replace("F32", "F64")),
    "a path for a name": file_of(f'"../../x":{ENTRY}'),
    "no name": file_of(f'"":{ENTRY}'),
    "a zero byte in a name": file_of(f'"first.weight\\u0000":{ENTRY}'),
    "half a character": file_of(f'"\\ud800":{ENTRY}'),
    "metadata that is a list": file_of('"__metadata__":[1]', f'"x":{ENTRY}'),
    "ties to nowhere": file_of('"__metadata__":{"x":"y","y":"x"}', data=0),
    "nesting": file_of(header=b'{"x":' * 20_000),
    "bytes after the header's end": file_of(header=f'{{"x":{ENTRY}}} {{}}'.encode()),
    "a pickle": pickle.dumps({"x": torch.ones(2)}),
    "endless length": (2**63 - 1).to_bytes(8, "little") + bytes(100),
}


@pytest.mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE])
def test_hostile_headers_behind_the_right_hash_are_rejected_and_take_no_memory(
    checkpoint: Path, file: str
) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = peak_bytes()
    for header in HEADERS.values():
        (checkpoint / file).write_bytes(header)
        signed(checkpoint)
        with forbidden():
            assert_rejected(checkpoint)
    assert peak_bytes() - before < 64 * MB


def peak_bytes() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE])
@pytest.mark.parametrize("region", ["length", "header", "data"])
def test_a_tensor_file_cut_or_flipped_anywhere_is_rejected(checkpoint: Path, file: str, region: str) -> None:
    path = checkpoint / file
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    first, end = {"length": (0, 8), "header": (8, begin), "data": (begin, len(whole))}[region]
    for position in range(first, end, max((end - first) // 16, 1)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        for damaged in (bytes(flipped), whole[:position]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointRejected, match=file):
                verify(checkpoint)


@given(data=st.data())
@QUIET
def test_a_changed_tensor_file_behind_the_right_hash_is_rejected(
    checkpoint: Path, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from([MODEL_FILE, OPTIMIZER_FILE]))
    path = checkpoint / file
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    position = data.draw(st.integers(0, begin - 1))
    middle = data.draw(st.binary(max_size=4))
    path.write_bytes(whole[:position] + middle + whole[position + data.draw(st.integers(0, 4)) :])
    changed = path.read_bytes() != whole
    signed(checkpoint)
    model, optimizer = made(1)
    try:
        load_newest(checkpoint.parent, model=model, optimizer=optimizer)
        original, _ = made(0)  # e.g. a space in the header was another one
        assert layout_of(model.state_dict()) == layout_of(original.state_dict())
    except CheckpointRejected:
        assert changed
    finally:
        path.write_bytes(whole)
        signed(checkpoint)


@pytest.mark.parametrize("file", [MODEL_FILE, OPTIMIZER_FILE])
def test_other_values_behind_the_right_file_hash_do_not_have_the_hash_of_the_state(
    checkpoint: Path, file: str
) -> None:
    data = bytearray((checkpoint / file).read_bytes())
    data[-1] ^= 1
    (checkpoint / file).write_bytes(data)
    signed(checkpoint)
    assert verify(checkpoint).step == 1
    with pytest.raises(CheckpointRejected, match="expected a state of hash"):
        load_newest(checkpoint.parent, **named(*made(1)))
    assert_rejected(checkpoint)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
)


def places(body: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value that can hold another one: (container, key)."""
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [place for key, value in items for place in ((body, key), *places(value))]


@given(data=st.data())
@QUIET
def test_any_value_of_a_manifest_replaced_and_signed_is_rejected_or_loads(
    checkpoint: Path, data: st.DataObject
) -> None:
    whole = (checkpoint / "manifest.json").read_bytes()
    trained, trained_optimizer = made(0)
    train(trained, trained_optimizer, range(1))
    loaded = whole_hash(trained, trained_optimizer)

    def change(body: Any) -> None:
        container, key = data.draw(st.sampled_from(places(body)))
        container[key] = data.draw(JSON)

    model, optimizer = made(1)
    try:
        signed(checkpoint, change)
        load_newest(checkpoint.parent, model=model, optimizer=optimizer)
        assert whole_hash(model, optimizer) == loaded  # what is no tensor may be another, e.g. a rate
    except CheckpointRejected:
        pass
    finally:
        (checkpoint / "manifest.json").write_bytes(whole)


def test_a_file_that_the_manifest_does_not_name_is_not_read(checkpoint: Path) -> None:
    signed(checkpoint, lambda body: body["files"].pop(MODEL_FILE))
    assert verify(checkpoint).step == 1
    assert_rejected(checkpoint)


@given(st.sampled_from([b"[", b"{", b'{"a":', b"[[],", b"{},", b'"",', b"0,", b"\\u0000", b"\xff", b" "]))
@settings(max_examples=12, deadline=None)
def test_a_manifest_of_the_greatest_length_takes_little_memory(piece: bytes) -> None:
    data = b"[" + piece * ((MAX_BYTES - 2) // len(piece)) + b"]"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointRejected):
            parse(data, Path("manifest.json"))
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_saving_loading_and_taking_a_state_from_elsewhere_unpickle_nothing(tmp_path: Path) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    with forbidden():
        save(tmp_path, step=1, model=model, optimizer=optimizer)
        other, fresh = made(1)
        load_newest(tmp_path, model=other, optimizer=fresh)
        there = Elsewhere.of(training_state(other, fresh))
        assert there.layout() == Elsewhere.of(training_state(model, optimizer)).layout()
        there.restore(training_state(*made(2)))
        save_steps(tmp_path / "more", 1, 2)
    assert whole_hash(other, fresh) == whole_hash(model, optimizer)


@pytest.mark.parametrize(("module", "name"), WAYS)
def test_the_trap_for_picklers_catches_each_way_and_goes_away(module: Any, name: str) -> None:
    before = getattr(module, name)
    with forbidden(), pytest.raises(Unpickled, match=name):
        getattr(module, name)(b"N.")
    assert getattr(module, name) is before


def test_the_trap_for_picklers_lets_imports_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_imported_before.py").write_text("value = 7")
    py_compile.compile(str(tmp_path / "never_imported_before.py"))
    monkeypatch.syspath_prepend(tmp_path)
    with forbidden():
        assert importlib.import_module("never_imported_before").value == 7
    del sys.modules["never_imported_before"]


FILES = [MODEL_FILE, OPTIMIZER_FILE, "manifest.json"]


def flip_last(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])


def to_link(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "flipped": flip_last,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 2),  # of a manifest, the newline and more
    "empty": lambda path: os.truncate(path, 0),
    "a link": to_link,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_steps(tmp_path, 1, 2)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(run: Path, file: str, damage: str) -> None:
    damaged = run / "step-00000002" / file
    size = damaged.stat().st_size
    DAMAGES[damage](damaged)
    found = newest(run)
    assert found is not None and found.path == run / "step-00000001"
    ((path, reason),) = found.rejected
    assert path == run / "step-00000002" and str(damaged) in reason
    if (file, damage) == (MODEL_FILE, "cut"):
        assert f"expected {size} bytes, got {size - 2}" in reason


def test_a_checkpoint_renamed_to_another_step_is_rejected_and_to_another_name_is_not(run: Path) -> None:
    (run / "step-00000001").rename(run / "step-00000003")
    with pytest.raises(CheckpointRejected, match="expected step 3 by its name, got 1"):
        verify(run / "step-00000003")
    (run / "step-00000003").rename(run / "best")
    assert verify(run / "best").step == 1


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") is None
    (tmp_path / "step-7").mkdir()
    assert newest(tmp_path) is None


def test_when_none_verifies_every_reason_is_given(run: Path) -> None:
    (run / "step-00000001" / MODEL_FILE).unlink()
    (run / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointRejected) as caught:
        newest(run)
    text = str(caught.value)
    assert "got 2 that do not" in text
    assert re.search(
        r"step-00000002/manifest\.json: cannot be read.*\n.*step-00000001/model\.safetensors", text
    )
