"""The grid of views before and after SAIB, and the comparison of several runs."""

import matplotlib.image
import pytest
import torch
from torch import nn

from iecl_fast.engine.curves import draw_comparison, draw_curves
from iecl_fast.engine.figures import drawable, png_figure
from iecl_fast.engine.pictures import QueryViews, draw_views, tile

STANDARD = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


class Double(nn.Module):
    """What SAIB does to scale and level, and nothing else."""

    def forward(self, images):
        return 2 * images + 1


def views(count=12):
    """As ViewsDataset has them: the second view of each is the query."""
    generator = torch.Generator().manual_seed(0)
    return [([torch.zeros(3, 8, 8), torch.randn(3, 8, 8, generator=generator)], 0, i) for i in range(count)]


@pytest.mark.parametrize(("whole_batch", "held"), [(False, 8), (True, 16)])
def test_scale_and_level_are_not_shown(whole_batch, held):
    data = views()
    query_views = QueryViews(data, batch_size=16, whole_batch=whole_batch, **STANDARD)
    assert len(query_views.images) == held
    assert torch.equal(query_views.images[9 % held], data[9 % held][0][1])
    block = Double().train()
    rows = query_views.rows(block, torch.device("cpu"))
    assert rows.shape == (3, 8, 3, 8, 8)
    assert block.training
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in STANDARD.values())
    expected = data[0][0][1] * std + mean
    torch.testing.assert_close(rows[0, 0], expected.clamp(0, 1))
    torch.testing.assert_close(rows[1], rows[0])
    torch.testing.assert_close(rows[2], torch.full_like(rows[2], 0.5))


def test_tiles_lie_in_rows():
    rows = torch.arange(6.0).view(2, 3, 1, 1, 1).expand(2, 3, 3, 16, 16) / 6
    picture = tile(rows)
    assert picture.shape == (3, 2 * 18, 3 * 18)
    assert picture[0, 9, 9] == 0 and picture[0, 9, 9 + 18] == rows[0, 1, 0, 0, 0]
    assert picture[0, 9 + 18, 9] == rows[1, 0, 0, 0, 0]
    assert picture[0, 0, 0] == 1


def test_the_picture_shows_the_tiles(tmp_path):
    rows = torch.rand(3, 4, 3, 8, 8)
    draw_views(rows, tmp_path / "views.png", "title")
    picture = matplotlib.image.imread(tmp_path / "views.png")
    assert picture.shape[1] >= 1000
    assert picture[..., :3].std() > 0.1


CSV = "step,epoch,learning_rate,loss,entropy_anchor,entropy_query\n"


def test_a_comparison_draws_the_mean_of_the_seeds(tmp_path, monkeypatch):
    for number, values in enumerate([(1.0, 3.0), (3.0, 5.0), (7.0, 7.0)]):
        rows = [f"{step},1,0.1,{value},0.5,0.6\n" for step, value in enumerate(values, start=1)]
        (tmp_path / f"{number}.csv").write_text(CSV + "".join(rows) + ("3,1,0.1,9,9,9\n" if number == 0 else ""))
    drawn = {}
    monkeypatch.setattr("iecl_fast.engine.curves._draw", lambda panels, *_: drawn.update(panels))
    paths = [tmp_path / f"{number}.csv" for number in range(3)]
    draw_comparison({"a": paths[:2], "b": paths[2:], "none yet": []}, tmp_path / "out.png")
    assert list(drawn) == ["loss", "learning rate", "entropy anchor", "entropy query"]
    assert list(drawn["loss"]) == ["a", "b"]
    steps, values = drawn["loss"]["a"]
    assert steps.tolist() == [1, 2] and values.tolist() == [2.0, 4.0]

    drawn.clear()
    draw_curves(paths[0], tmp_path / "out.png")
    assert list(drawn) == ["loss", "learning rate", "entropy of the embeddings"]
    assert list(drawn["entropy of the embeddings"]) == ["without SAIB", "with SAIB"]


def test_without_rows_there_is_no_picture(tmp_path):
    (tmp_path / "metrics.csv").write_text(CSV)
    draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    draw_comparison({"a": [tmp_path / "metrics.csv"]}, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("name", ["$a{$", r"$\frac$", "\N{CJK UNIFIED IDEOGRAPH-65E5}", "\udce9", "a" * 300, "<b>|\n"])
def test_names_are_drawn_as_they_are(tmp_path, name, recwarn):
    with png_figure(tmp_path / "a.png", size=(8, 6), dpi=50) as figure:
        axes = figure.add_subplot()
        axes.set_title(drawable(name))
        axes.set_xticks([0, 1], [drawable(name)] * 2)
        axes.plot([0, 1], label=drawable(name))
        axes.legend()
    assert matplotlib.image.imread(tmp_path / "a.png")[..., :3].min() < 0.1  # black letters
    assert not recwarn
