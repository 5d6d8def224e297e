"""Reports of run folders, from totals of spans computed by hand to the printed text."""

import doctest
import io
import json
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

import coati.monitor.report
from coati.cli.report import report, time_table
from coati.errors import ConfigError, DataError
from coati.monitor.report import (
    chart,
    chosen_samples,
    curves,
    first_and_last,
    headline,
    held_out_scores,
    read_run,
    run_times,
    sparkline,
)
from coati.monitor.timeline import Span


def work(what, start, end, version=0):
    return Span(what, start, end, version)


def shares(**actors):
    """The times of actors that spent 10 s on the given activities, in order."""
    found = {}
    for actor, seconds in actors.items():
        now = 0.0
        found[actor] = []
        for what, length in seconds.items():
            found[actor].append(work(what, now, now + length))
            now += length
    return run_times(found)


# Seconds. Maker: start-up until 100, then generate 2, score 1, send 0.5, wait for room 0.5, wait for weights 1.5,
# commit 0.5, generate 4. Trainer: wait 4, train 4, publish 2.
SPANS = {
    "maker-0": [
        work("wait_weights", 90.0, 100.0),
        work("generate", 100.0, 102.0),
        work("score", 102.0, 103.0),
        work("send", 103.0, 103.5),
        work("wait_room", 103.5, 104.0),
        work("wait_weights", 104.0, 105.5),
        work("commit", 105.5, 106.0, 1),
        work("generate", 106.0, 110.0, 1),
    ],
    "trainer-0": [
        work("wait_data", 100.0, 104.0),
        work("train", 104.0, 108.0),
        work("publish", 108.0, 110.0, 1),
    ],
}


@pytest.fixture
def folder(tmp_path):
    """The folder of a short run."""
    rows = [{"actor": actor, **span._asdict()} for actor, spans in SPANS.items() for span in spans]
    (tmp_path / "spans.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {"step": 1, "version": 0, "time": 104.0, "policy/entropy": None},
        {
            "step": 2,
            "version": 0,
            "time": 108.0,
            "reward/mean": 0.25,
            "maker/samples": 8.0,
            "reward/term_brevity": 5.12e-7,
        },
        {
            "step": 3,
            "version": 1,
            "time": 109.0,
            "reward/mean": 0.75,
            "maker/samples": 12.0,
            "reward/term_brevity": 1e-7,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    samples = [
        {"version": version, "prompt": "the <b>film</b>", "response": f" number {index} \x1b[31m& more", "reward": 0.5}
        for version in range(3)
        for index in range(5)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    settings = '[run]\nname = "film"\n[algorithm]\nname = "ppo"\n[topology]\nmakers = 1\ntrainers = 1\n'
    (tmp_path / "config.toml").write_text(settings)
    return tmp_path


def test_times_of_both_actors_by_hand():
    times = run_times(SPANS)
    assert times.elapsed == 10.0  # without start-up
    maker, trainer = times.actors.values()
    own = {"generate": 0.6, "score": 0.1, "send": 0.05, "commit": 0.05, "wait_weights": 0.15, "wait_room": 0.05}
    assert maker == pytest.approx({**own, "worked": 0.8, "waited": 0.2, "absent": 0.0, "other": 0.0})
    own = {"train": 0.4, "publish": 0.2, "wait_data": 0.4}
    assert trainer == pytest.approx({**own, "worked": 0.6, "waited": 0.4, "absent": 0.0, "other": 0.0})
    assert times.verdict().startswith("maker-0 worked 80%")


def test_the_gap_before_a_resume_does_not_count_as_run_time():
    later = [work("generate", 1000, 1008), work("wait_weights", 1008, 1010)]
    spans = {
        "maker-0": [work("generate", 0, 8), work("wait_weights", 8, 10), *later],
        "trainer-0": [work("wait_data", 0, 1), work("train", 1, 10), work("wait_data", 1001, 1002)],
    }
    times = run_times(spans)
    assert times.elapsed == 20.0
    assert times.actors["maker-0"]["generate"] == pytest.approx(0.8)
    assert times.actors["trainer-0"]["absent"] == pytest.approx(0.4), "it ended before the maker, and started later"


@pytest.mark.parametrize(
    ("maker", "trainer", "says"),
    [
        ({"generate": 5, "wait_weights": 5}, {"train": 5, "wait_data": 5}, r"turns.*data \(50%\).*weights \(50%\)"),
        ({"generate": 10}, {"train": 6, "wait_data": 4}, r"Generation is the bottleneck.*data \(40%\)"),
        ({"generate": 6, "wait_rewards": 4}, {"train": 5, "wait_data": 5}, r"reward functions \(40%\)"),
        ({"generate": 4, "wait_weights": 6}, {"train": 10}, r"Training is the bottleneck.*weights \(60%\)"),
        ({"generate": 7, "wait_room": 3}, {"train": 10}, r"room in the buffer \(30%\)"),
        ({"generate": 9, "wait_weights": 1}, {"train": 9, "wait_data": 1}, "in balance"),
        ({"generate": 5}, {"train": 10}, r"Training is the bottleneck.*finished.* \(50%\)"),
    ],
)
def test_the_verdict_names_what_limits_the_run(maker, trainer, says):
    times = shares(**{"maker-0": maker, "trainer-0": trainer})
    assert re.search(says, times.verdict())


def test_an_actor_is_absent_before_its_first_and_after_its_last_span():
    # Of 100 s: maker-0 works all the time, maker-1 leaves after 10, maker-2 is present from 80 to 90 and works for 9 s
    # of that, maker-3 is present from 50 to 70.
    spans = {
        "maker-0": [work("generate", 0, 100)],
        "maker-1": [work("generate", 0, 10)],
        "maker-2": [work("generate", 80, 88), work("score", 89, 90)],
        "maker-3": [work("generate", 50, 70)],
        "trainer-0": [work("wait_data", 0, 10), work("train", 10, 100)],
    }
    times = run_times(spans)
    assert [shares["worked"] for shares in times.actors.values()] == pytest.approx([1.0, 0.1, 0.09, 0.2, 0.9])
    assert [shares["absent"] for shares in times.actors.values()] == pytest.approx([0.0, 0.9, 0.9, 0.8, 0.0])
    assert [shares["other"] for shares in times.actors.values()] == pytest.approx([0.0, 0.0, 0.01, 0.0, 0.0])
    assert times.verdict().startswith("maker-0 worked 100%")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(time_table(times))
    text = console.export_text()
    assert re.search(r"absent\W+0%\W+90%\W+90%\W+80%\W+0%", text)
    assert re.search(r"other\W+0%\W+0%\W+1%\W+0%\W+0%", text)


def test_makers_that_have_left_or_joined_late_do_not_count_while_they_are_absent():
    # Trainers wait for data half of the time. maker-1 leaves after 10 of 100 s, of which it waits for room for 1 s.
    spans = {
        "maker-0": [work("generate", 0, 95), work("wait_room", 95, 100)],
        "maker-1": [work("generate", 0, 9), work("wait_room", 9, 10)],
        "maker-2": [work("generate", 80, 100)],
        "trainer-0": [work("wait_data", 0, 50), work("train", 50, 100)],
    }
    assert "Generation is the bottleneck: trainers waited for data (50%)" in run_times(spans).verdict()
    spans["maker-1"] = [work("generate", 0, 4), work("wait_room", 4, 90)]
    assert "makers waited for room in the buffer (43%)" in run_times(spans).verdict()  # 5 + 86 of 100 + 90 + 20 s


def test_turns_are_no_finding_about_a_synchronous_run(folder, capsys):
    assert not read_run(folder).is_sync
    (folder / ".coati-run").write_text('{"is_sync": true}')
    report(folder)
    assert "took turns, as always with --sync:" in " ".join(capsys.readouterr().out.split())


def test_actors_are_in_natural_order_and_many_are_averaged_by_kind():
    names = [f"maker-{index}" for index in range(12)]
    makers = {name: {"generate": 8, "wait_weights": 2} for name in names}
    times = shares(**{"trainer-0": {"train": 10}}, **makers)
    assert list(times.actors) == [*names, "trainer-0"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(time_table(times))
    text = console.export_text()
    assert "maker, mean of 12" in text
    assert "maker-3" not in text
    assert "80%" in text


def test_spans_without_work_have_no_times():
    assert run_times({"maker-0": [work("wait_weights", 0, 1)]}) is None


def test_sparklines_are_scaled_and_long_series_are_averaged():
    assert doctest.testmod(coati.monitor.report).failed == 0
    assert sparkline([0.5, 0.5]) == "▁▁"
    long = sparkline([step % 2 for step in range(3000)] + [9.0] * 1000)
    assert len(long) == 24
    assert set(long) == {"▁", "█"}  # the first bars are means of as many zeros as ones


def test_metrics_with_two_points_have_a_curve(folder):
    assert {title: points for title, (points, _) in curves(read_run(folder)).items()} == {
        "mean reward": [(2.0, 0.25), (3.0, 0.75)],
        "reward term: brevity": [(2.0, 5.12e-07), (3.0, 1e-07)],
    }


EVALUATIONS = [
    {"step": step, "version": step, "name": "held-out", "avg@8": 0.1 * (step + 1), "avg@8_low": 0.0, "avg@8_high": 1.0}
    for step in range(9)
]


def test_evaluations_are_compared_with_the_first_not_with_a_mean(folder):
    rows = [{"step": row["step"], **{f"eval/held-out/{name}": row[name] for name in row}} for row in EVALUATIONS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = curves(read_run(folder))
    assert next(iter(found)) == "held-out avg@8"
    assert found["held-out avg@8"][1] == "0.1 → 0.9", "means of a quarter are 0.15 and 0.85"
    assert "held-out avg@8_low" not in found


@pytest.mark.parametrize(
    ("evaluations", "final_version", "line"),
    [
        (EVALUATIONS, 8, "held-out avg@8: 0.100 → 0.900 (before → after training)"),
        (EVALUATIONS[:5], 8, "held-out avg@8: 0.100 → 0.500 (before → version 4)"),
        (EVALUATIONS[2:], 8, "held-out avg@8: 0.300 → 0.900 (version 2 → after training)"),
        (EVALUATIONS[-1:], 8, "held-out avg@8: 0.900 (after training)"),
        (EVALUATIONS[:1], None, "held-out avg@8: 0.100 (before training)"),
    ],
)
def test_held_out_scores_say_which_versions_they_compare(tmp_path, evaluations, final_version, line):
    unscored = {"step": 0, "version": 0, "name": "unscored"}
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [unscored, *evaluations]))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/coati.json").write_text(json.dumps({"version": final_version}))
    assert held_out_scores(tmp_path) == [line]


def test_a_chart_fills_its_frame_labels_its_ends_and_has_few_points():
    drawn = ElementTree.fromstring(chart("a <b> & c", [(10.0, 2.0), (15.0, 1.0), (30.0, 3.0)]))
    texts = [text.text for text in drawn.iter("text")]
    assert texts == ["a <b> & c", "3", "1", "step 10", "30"]
    points = [tuple(map(float, point.split(","))) for point in drawn.find("polyline").get("points").split()]
    assert points == [(0.0, 50.0), (100.0, 96.0), (400.0, 4.0)]  # y goes down
    long = ElementTree.fromstring(chart("steps", [(float(step), 1.0) for step in range(9999)]))
    assert len(long.find("polyline").get("points").split()) <= 400


def test_first_and_last_are_means_of_a_quarter_at_most_ten():
    assert first_and_last([3.0]) == (3.0, 3.0)
    assert first_and_last([0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 4.0, 6.0]) == (1.0, 5.0)
    assert first_and_last([1.0] * 10 + [5.0] * 80 + [2.0] * 10) == (1.0, 2.0)


def test_restarts_are_counted(folder):
    run = read_run(folder)
    assert not [name for name, _ in headline(run, None) if "restarts" in name]
    for row, number in zip(run.metrics, (0, 2, 2), strict=True):
        row |= {"restarts/makers": 0.0, "restarts/trainers": float(number)}
    facts = dict(headline(run, None))
    assert facts["trainer restarts"] == "2", "the latest count, not a sum over steps"
    assert "maker restarts" not in facts


def test_samples_are_of_the_first_and_the_last_version(folder):
    chosen = chosen_samples(read_run(folder).samples)
    assert [sample["version"] for sample in chosen] == [0, 0, 0, 2, 2, 2]


def test_the_command_prints_figures_curves_samples_and_times(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    report(folder)
    printed = capsys.readouterr().out
    for part in (
        folder.name,
        "0.250 → 0.750",
        "0.25 → 0.75",
        "▁█",
        "the <b>film</b> number 0 [31m& more",
        "wait for data",
        "40%",
    ):
        assert part in printed
    assert "\x1b" not in printed  # samples cannot control the terminal
    page = (folder / "report.html").read_text()
    for part in (
        "mean reward: 0.25 → 0.75",
        "the &lt;b&gt;film&lt;/b&gt;",
        " number 0 [31m&amp; more",
        "wait for data",
        "40%",
    ):
        assert part in page
    assert "<b>film</b>" not in page
    assert page.count("<polyline") == 2
    assert "<script" not in page
    assert "http" not in page
    assert "▁" not in page, "charts show the same"
    assert f"<title>{folder.name} - coati report</title>" in page
    parts = ("maker-0 worked 80%", "<polyline", "prompt and response", "Where the time went")
    assert sorted(parts, key=page.index) == list(parts)
    assert max(map(len, re.sub("<[^>]*>", "", page[page.index("</svg>") :]).splitlines())) <= 120, "about 940 pixels"


def test_a_run_without_spans_or_samples_has_a_report(folder, tmp_path, capsys):
    for name in ("spans.jsonl", "samples.jsonl"):
        (folder / name).unlink()
    report(folder, html=tmp_path / "page.html")
    assert "no spans" in (tmp_path / "page.html").read_text()
    assert "no spans" in capsys.readouterr().out


def test_the_report_of_a_run_that_failed_says_why(folder, tmp_path, capsys):
    (folder / "error.txt").write_text("the judge [404] is gone\n")
    report(folder)
    assert "the judge [404] is gone" in capsys.readouterr().out
    for name in ("metrics.jsonl", "spans.jsonl", "samples.jsonl"):  # it failed before the first step
        (folder / name).unlink()
    report(folder)
    assert "the judge [404] is gone" in capsys.readouterr().out


def test_folders_without_a_run_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"neither metrics.jsonl nor spans.jsonl"):
        read_run(tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        read_run(file)
    with pytest.raises(ConfigError, match="has written nothing yet"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("spans.jsonl", '{"actor": "a"}\n', r"spans.jsonl cannot be read.*missing"),
        ("metrics.jsonl", "no json\n{}\n", r"metrics.jsonl, line 1: every line must be a JSON object"),
    ],
)
def test_the_error_names_the_damaged_file(folder, file, content, message):
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=message):
        read_run(folder)


def test_a_line_that_is_still_being_written_is_ignored(folder):
    with (folder / "spans.jsonl").open("a") as file:
        file.write('{"actor": "maker-0", "la')
    assert read_run(folder).spans == SPANS


def test_the_error_says_that_the_page_cannot_be_written(folder):
    with pytest.raises(ConfigError, match="cannot be written"):
        report(folder, html=folder / "no" / "page.html")
