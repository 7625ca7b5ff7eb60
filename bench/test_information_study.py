"""The study of mutual information, small: its table and its picture."""

from bench import mutual_information as study


def test_table_and_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(study, "INFORMATION", (1.0, 3.0))
    monkeypatch.setattr(study, "PAIRS", 32)
    monkeypatch.setattr(study, "CANDIDATES", 2048)
    monkeypatch.setattr("sys.argv", ["", "--seeds", "2", "--picture", str(tmp_path / "picture.png")])
    study.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 ", "| 3 "))]
    assert len(rows) == 2 * 7
    estimates = {(row[0], row[1]): float(row[2].split()[0]) for row in rows}
    for information in ("| 1", "| 3"):
        plain = estimates[information, "all (InfoNCE)"]
        assert estimates[information, "ball 90..100"] < plain < estimates[information, "far 0..50"]
    assert (tmp_path / "picture.png").stat().st_size > 10_000
