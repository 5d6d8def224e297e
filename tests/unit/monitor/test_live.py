"""What a run prints where there is no terminal."""

import io

from rich.console import Console

from coati.monitor import RunSnapshot
from coati.monitor.live import LiveView


def shown(*snapshots):
    text = io.StringIO()
    with LiveView(Console(file=text, width=200)) as view:
        for fields in snapshots:
            view.show(RunSnapshot(total_steps=2, **fields))
    return text.getvalue().splitlines()


def test_the_last_line_has_the_version_after_the_last_update():
    lines = shown({"step": 0, "version": 0, "message": "loading"}, {"step": 2, "version": 1}, {"step": 2, "version": 2})
    assert len(lines) == 2
    assert "version 2" in lines[-1]


def test_what_happens_after_the_last_step_is_shown():
    lines = shown({"step": 2, "version": 1}, {"step": 2, "version": 2, "message": "saving"})
    assert len(lines) == 1
    assert "version 2" in lines[0]
    assert "saving" in lines[0]
