"""What a run prints, with a terminal and without one."""

import io

from rich.console import Console

import coati.monitor.live
from coati.monitor import RunSnapshot
from coati.monitor.live import LiveView


def shown(*snapshots):
    text = io.StringIO()
    with LiveView(Console(file=text, width=200)) as view:
        for fields in snapshots:
            view.show(RunSnapshot(total_steps=2, **fields))
    return text.getvalue().splitlines()


def test_the_last_line_shows_the_version_after_the_last_update():
    lines = shown({"step": 0, "version": 0, "message": "loading"}, {"step": 2, "version": 1}, {"step": 2, "version": 2})
    assert len(lines) == 2
    assert "version 2" in lines[-1]


def test_activity_after_the_last_step_is_shown():
    lines = shown({"step": 2, "version": 1}, {"step": 2, "version": 2, "message": "saving"})
    assert len(lines) == 1
    assert "version 2" in lines[0]
    assert "saving" in lines[0]


def test_a_message_is_printed_again_only_when_it_or_the_step_changes(monkeypatch):
    monkeypatch.setattr(coati.monitor.live, "_PLAIN_EVERY_SECONDS", 0.0)
    loading, stopping = {"message": "loading models"}, {"step": 1, "message": "stopping"}
    lines = shown(
        loading, loading, {"message": "starting"}, loading, loading, {"step": 1}, {"step": 1}, stopping, stopping
    )
    assert [line.partition(",")[0] for line in lines] == [
        *("loading models", "starting", "loading models"),
        *["step 1/2 (50%)"] * 3,
    ]


def test_a_terminal_shows_the_numbers():
    text = io.StringIO()
    with LiveView(Console(file=text, width=100, force_terminal=True)) as view:
        view.show(RunSnapshot(step=1, total_steps=2, version=1, message="[red] is no style"))
    for part in ("step 1/2 (50%)", "[red] is no style"):
        assert part in text.getvalue()
