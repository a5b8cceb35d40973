"""Nothing that was measured is lost or half there: files are whole, journals survive a crash, a lock holds.

The crash is a process that ends with its line half-written, and one that is killed while it holds the lock.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tuning.store import BusyError, Journal, lock, write_json

FACTS = {"device": "a", "versions": {"torch": "1"}}


def test_a_file_has_its_innermost_objects_in_one_line(tmp_path: Path) -> None:
    data = {"a": [{"b": 1, "c": [2, 3]}, {"text": "  }\n{  x"}], "empty": {}, "d": {"e": {"f": "line\n  two"}}}
    write_json(tmp_path / "data.json", data)
    text = (tmp_path / "data.json").read_text()
    assert json.loads(text) == data
    assert '  { "b": 1, "c": [ 2, 3 ] },\n' in text


def test_a_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "made" / "journal"
    first = Journal(path, FACTS)
    assert first.get({"batch": 1}) is None
    first.add({"batch": 1, "layer": "x"}, {"us": 1.5})
    first.add({"batch": 2}, {"us": 2.5})
    again = Journal(path, dict(reversed(FACTS.items())))
    assert again.get({"layer": "x", "batch": 1}) == {"us": 1.5}
    assert again.get({"batch": 2}) == {"us": 2.5}
    assert again.get({"batch": 3}) is None
    assert again.unusable == 0
    again.remove()
    assert not path.exists()
    assert Journal(path, FACTS).get({"batch": 2}) is None


def test_a_torn_line_costs_its_own_piece_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for batch in (1, 2):
        Journal(path, FACTS).add({"batch": batch}, batch)
    path.write_text(path.read_text()[:-10])
    torn = Journal(path, FACTS)
    assert (torn.get({"batch": 1}), torn.get({"batch": 2}), torn.unusable) == (1, None, 1)
    torn.add({"batch": 3}, 3)
    assert [Journal(path, FACTS).get({"batch": batch}) for batch in (1, 2, 3)] == [1, None, 3]


def test_pieces_of_other_facts_are_not_taken_up(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", FACTS).add({"batch": 1}, 1)
    other = Journal(tmp_path / "journal", {**FACTS, "device": "b"})
    assert other.get({"batch": 1}) is None
    assert other.unusable == 1


def test_a_journal_in_memory() -> None:
    journal = Journal(None, FACTS)
    journal.add({"batch": 1}, 1)
    assert journal.get({"batch": 1}) == 1
    journal.remove()


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [found.name for found in path.parent.iterdir()] == ["a.json"]


HOLD = """
import sys, pathlib
from tuning.store import lock
with lock(pathlib.Path(sys.argv[1])):
    print(1, flush=True)
    input()
"""


def test_a_lock_holds_out_another_process_and_ends_with_it(tmp_path: Path, repository: Path) -> None:
    path = tmp_path / "tuned.json"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=repository) as other:
        assert other.stdout is not None and other.stdout.readline() == b"1\n"
        with pytest.raises(BusyError, match=f"process {other.pid}.*--out"), lock(path):
            pass
        with lock(tmp_path / "another.json"):
            pass
        other.kill()
    for _ in range(2):
        with lock(path):
            pass
