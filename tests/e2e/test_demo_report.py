import math
import struct
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from coati.demo.report import distinct_fraction, grammatical_fraction, plot_rewards, smooth
from coati.errors import DataError


def _png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_fractions_by_hand():
    texts = ["the film was good .", "the film was good . ", "the plot was bad .", "the the ."]
    assert distinct_fraction(texts) == 0.75
    assert grammatical_fraction(texts) == 0.75


@pytest.mark.parametrize("fraction", [distinct_fraction, grammatical_fraction])
def test_fractions_of_nothing_are_refused(fraction):
    with pytest.raises(DataError, match="at least one text"):
        fraction([])


def test_smooth_by_hand():
    # window 3: the first point stands alone, the middle ones average three, the last one averages two
    assert smooth([0.0, 3.0, 6.0, 0.0], window=3) == [0.0, 3.0, 3.0, 3.0]
    assert smooth([], window=3) == []


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that were saved, to look into."""
    saved: list[Figure] = []
    savefig = Figure.savefig

    def record(self: Figure, *args, **kwargs) -> None:
        saved.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", record)
    return saved


def test_plot_is_a_png_with_both_curves(tmp_path: Path, figures):
    rewards = [(step, 0.1 * step) for step in range(10)]
    kl = [(step, 0.3 * step) for step in range(10)]
    path = plot_rewards(tmp_path / "new" / "rewards.png", rewards, kl, title="A title")
    assert path == tmp_path / "new" / "rewards.png"
    assert _png_size(path) == (1200, 810)
    top, bottom = figures[0].axes
    assert top.get_title(loc="left") == "A title"
    assert "reward" in top.get_ylabel()
    assert "KL" in bottom.get_ylabel()
    assert bottom.get_xlabel() == "training step"
    raw, line = top.lines
    assert list(zip(raw.get_xdata(), raw.get_ydata(), strict=True)) == rewards
    assert list(line.get_ydata()) == smooth([reward for _, reward in rewards], window=3)
    assert list(bottom.lines[0].get_ydata()) == [value for _, value in kl]


def test_plot_without_kl_has_one_panel_and_no_pyplot(tmp_path: Path, figures, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    assert _png_size(plot_rewards(tmp_path / "one.png", [(1, 0.5)])) == (1200, 630)
    assert len(figures[0].axes) == 1
    assert "matplotlib.pyplot" not in sys.modules


def test_points_that_are_not_finite_are_left_out(tmp_path: Path, figures):
    plot_rewards(tmp_path / "a.png", [(1, 0.5), (2, math.nan), (3, math.inf), (4, 0.7)])
    assert list(figures[0].axes[0].lines[0].get_xdata()) == [1, 4]
    with pytest.raises(DataError, match="at least one finite point"):
        plot_rewards(tmp_path / "b.png", [(1, math.nan)])
    assert not (tmp_path / "b.png").exists()
