"""The order to finish is a file; running streams get their time, then they are overdue."""

from __future__ import annotations

from angelspec_backend.triton.drain import DRAIN_FILE, RUN_DIR_ENV, Drain


def test_without_a_run_folder_nothing_drains(monkeypatch):
    monkeypatch.delenv(RUN_DIR_ENV, raising=False)
    drain = Drain(timeout=0)
    assert not drain.active
    assert not drain.overdue()


def test_the_time_of_running_streams_begins_with_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    now = [100.0]
    monkeypatch.setattr("angelspec_backend.triton.drain.time.monotonic", lambda: now[0])
    drain = Drain(timeout=5)
    assert not drain.active
    (tmp_path / DRAIN_FILE).touch()
    assert drain.active
    assert not drain.overdue()
    now[0] += 4
    assert not drain.overdue()
    now[0] += 1
    assert drain.overdue()
    (tmp_path / DRAIN_FILE).unlink()  # called off
    assert not drain.overdue()
    (tmp_path / DRAIN_FILE).touch()
    assert not drain.overdue()
