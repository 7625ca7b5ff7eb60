"""metrics.csv: exact numbers, whole rows, cut back to a checkpoint's step; the picture drawn from it."""

import struct

import pytest

from iecl_fast.engine import curves
from iecl_fast.engine.curves import draw_curves
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.logging import MetricsFile, read_metrics


def written(path, steps, **options):
    metrics = MetricsFile(path, **options)
    for step in steps:
        metrics.write({"step": step, "epoch": 1, "loss": 1 / (step + 2), "rate": 0.1})
    metrics.close()
    return path.read_text()


def test_numbers_come_back_bit_for_bit(tmp_path):
    written(tmp_path / "metrics.csv", range(1, 20))
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["loss"] for row in rows] == [1 / (step + 2) for step in range(1, 20)]
    assert rows[0].keys() == {"step", "epoch", "loss", "rate"}
    assert all(type(row["step"]) is int for row in rows)


def test_resumed_file_is_the_uninterrupted_one(tmp_path):
    whole = written(tmp_path / "whole.csv", range(1, 11))
    path = tmp_path / "resumed.csv"
    written(path, range(1, 8))
    with open(path, "a") as file:
        file.write("8,1,0.1")  # what a kill in the middle of a line leaves
    assert written(path, range(5, 11), last_step=4) == whole


def test_columns_that_an_older_version_did_not_write(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,0.5\n2,0.25\n")
    for _ in range(2):  # also when they are there
        metrics = MetricsFile(path, last_step=2, added={"unreadable_images": 0, "skipped_steps": 0})
        metrics.close()
        assert path.read_text() == "step,loss,unreadable_images,skipped_steps\n1,0.5,0,0\n2,0.25,0,0\n"
    metrics = MetricsFile(path, last_step=2)
    metrics.write({"step": 3, "loss": 0.125, "unreadable_images": 1, "skipped_steps": 0})
    metrics.close()
    assert read_metrics(path)[-1] == {"step": 3, "loss": 0.125, "unreadable_images": 1, "skipped_steps": 0}


def test_counts_have_a_panel_only_where_there_is_something_to_count(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(curves, "_draw", lambda panels, *_: drawn.update(panels))
    (tmp_path / "metrics.csv").write_text("step,loss,unreadable_images,skipped_steps\n1,0.5,0,0\n2,0.25,0,3\n")
    curves.draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    assert list(drawn) == ["loss", "skipped steps"]


def test_a_new_run_begins_an_empty_file(tmp_path):
    path = tmp_path / "metrics.csv"
    written(path, range(1, 4))
    assert written(path, [1]) == "step,epoch,loss,rate\n1,1,0.3333333333333333,0.1\n"


def test_a_row_with_other_keys_is_refused(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.csv")
    metrics.write({"step": 1, "loss": 0.5})
    with pytest.raises(ValueError, match="columns"):
        metrics.write({"step": 2, "los": 0.5})
    metrics.close()


@pytest.mark.parametrize("damage", [b"hello,1\n", b"1,\n", b"1\n", b"1,2,3\n", b"\xff\xfe\n"])
def test_a_damaged_file_is_said(tmp_path, damage):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,loss\n" + damage)
    with pytest.raises(UsageError, match=r"metrics\.csv is damaged"):
        MetricsFile(path, last_step=3)


@pytest.mark.parametrize(("rows", "panels"), [(1, 2), (60, 2)])
def test_curves_is_a_picture_of_the_right_size(tmp_path, rows, panels):
    written(tmp_path / "metrics.csv", range(1, rows + 1))
    draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png", "title")
    data = (tmp_path / "curves.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (540 * panels, 360)


def test_no_rows_no_picture(tmp_path):
    (tmp_path / "metrics.csv").write_text("")
    draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
