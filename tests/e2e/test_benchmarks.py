"""Benchmark reports, checked against numbers worked out by hand."""

import argparse
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_end_to_end_compares_medians_with_the_faster_of_trls_rows(tmp_path, capsys):
    import end_to_end

    def rounds(*rates):
        return [
            {"completions_per_second": rate, "tokens_per_second": 2 * rate, "ms_per_step": 1e3 / rate, "peak_gib": 1.0}
            for rate in rates
        ]

    results = {"coati-ppo": rounds(90.0, 120.0, 100.0), "trl-grpo": rounds(10.0), "trl-vllm": rounds(20.0)}
    end_to_end.report(results, argparse.Namespace(json=tmp_path / "found.json", device="cuda"))
    medians = json.loads((tmp_path / "found.json").read_text())["medians"]
    assert (medians["coati-ppo"]["completions_per_second"], medians["coati-ppo"]["times_trl"]) == (100.0, 5.0)
    assert medians["trl-grpo"]["times_trl"] == 0.5
    assert "5.00" in capsys.readouterr().out


def test_end_to_end_without_trl_has_rows_of_ours_only(tmp_path, capsys, monkeypatch):
    import end_to_end

    monkeypatch.setattr(end_to_end.importlib.util, "find_spec", lambda name: None)
    arguments = argparse.Namespace(device="cpu", competitors=None, json=tmp_path / "found.json")
    names = end_to_end.competitors(arguments, argparse.ArgumentParser())
    assert names == ["coati-grpo", "coati-ppo", "coati-grpo-lead3", "coati-lead2", "coati-lead3"]
    assert "TRL is not installed" in capsys.readouterr().out
    row = {"completions_per_second": 2.0, "tokens_per_second": 4.0, "ms_per_step": 500.0, "peak_gib": 0.0}
    end_to_end.report({"coati-ppo": [row]}, arguments)
    assert "NaN" not in arguments.json.read_text()
    assert capsys.readouterr().out.splitlines()[2].split() == ["coati-ppo", "2", "4", "500.0", "-", "-"]


def test_end_to_end_refuses_what_cannot_run_here(capsys):
    import end_to_end

    arguments = argparse.Namespace(device="cpu", competitors=["coati-ppo", "coati-vllm"])
    with pytest.raises(SystemExit):
        end_to_end.competitors(arguments, argparse.ArgumentParser())
    assert "coati-vllm cannot run with --device cpu" in capsys.readouterr().err


def test_end_to_end_counts_steps_after_the_warm_up(monkeypatch, capsys):
    import end_to_end

    monkeypatch.setattr(
        end_to_end, "run_coati", lambda _: (4.0, 25.0, {"maker-0 score": 0.8})
    )  # seconds of the counted steps, tokens
    end_to_end.run_one(argparse.Namespace(only="coati-ppo", steps=10, warmup=2, batch=64))
    result = json.loads(capsys.readouterr().out.strip().removeprefix(end_to_end.RESULT))
    assert result == {
        "completions_per_second": 128.0,  # 8 steps of 64 in 4 s
        "tokens_per_second": 3200.0,
        "ms_per_step": 500.0,
        "tokens_per_completion": 25.0,
        "ms of a step: maker-0 score": 100.0,
    }
    end_to_end.report({"coati-ppo": [result | {"peak_gib": 1.0}]}, argparse.Namespace(json=None, device="cuda"))
    assert "coati-ppo, ms of a step: maker-0 score 100" in capsys.readouterr().out


def test_time_spent_outside_the_counted_steps_does_not_count():
    from detached_runs import seconds_spent

    from coati.monitor.timeline import Span

    spans = [
        Span("score", 0.0, 2.0, 0),
        Span("train", 2.0, 3.0, 0),
        Span("score", 4.0, 9.0, 1),
        Span("send", 9.0, 9.5, 1),
    ]
    assert seconds_spent(spans, 1.0, 5.0) == {"score": 2.0, "train": 1.0}


def test_overlap_is_the_longer_half_over_the_wall_time():
    from detached_runs import Measured
    from overlap import row_of

    def measured(seconds, spent):
        return Measured(seconds=seconds, steps=10, samples=640, spent=spent)

    turns = measured(
        11.0, {"maker-0": {"generate": 3.0, "send": 1.0, "wait_weights": 7.0}, "trainer-0": {"train": 6.0}}
    )
    row = row_of(turns, measured(8.0, {"maker-0": {"wait_weights": 2.0}, "trainer-0": {"train": 7.0}}), machine=1.0)
    assert (row["generation_ms"], row["training_ms"], row["ideal_ms"]) == pytest.approx(
        (400.0, 600.0, 600.0)
    )  # waits are no work
    assert (row["detached_ms"], row["overlap"]) == pytest.approx((800.0, 0.75))
    assert row["gain_over_turns"] == pytest.approx(1.375)
    assert row["overlap_of_what_the_machine_allows"] == pytest.approx(1.25)  # one core: 1,000 ms a step
    assert row["maker-0, wait_weights"] == 0.25


def test_a_training_step_asks_for_three_forward_passes_of_real_tokens():
    from train_step import Shape

    shape = Shape(layers=1, width=4, heads=2, kv_heads=1, intermediate=6, vocabulary=10)
    # Weights: queries and output 2 × 16, keys and values 2 × 4 × 2, MLP 3 × 24. A multiply-add is two operations.
    weights = 32 + 16 + 72
    # Scores and sums over values take 2 × 4 operations for each pair of tokens, of which causal attention needs half.
    attention = {3: 2 * 4 * 9, 2: 2 * 4 * 4}
    assert shape.step_flops([3], 2) == 3 * (2 * weights * 3 + attention[3] + 2 * 10 * 4 * 2)
    assert shape.step_flops([3, 2], 1) == 3 * (2 * weights * 5 + attention[3] + attention[2] + 2 * 10 * 4)


@pytest.mark.parametrize("kind", ["ragged", "full", "groups", "32"])
def test_a_batch_of_the_training_step_has_the_tokens_it_says(kind):
    from train_step import SAMPLES_PER_PROMPT, TINY, make_batch

    experience, lengths, num_scored = make_batch(TINY, kind, seed=0)
    assert experience.attention_mask.sum(dim=1).tolist() == lengths
    assert int(experience.action_mask.sum()) == num_scored
    if kind == "32":
        assert (set(lengths), sum(lengths)) == ({32}, TINY.micro_batch_tokens)
    if kind == "groups":
        prompts = experience.sequences[:, : TINY.group_prompt]
        assert torch.equal(prompts[0], prompts[SAMPLES_PER_PROMPT - 1])
        assert not torch.equal(prompts[0], prompts[SAMPLES_PER_PROMPT])


def test_what_goes_through_the_buffer_are_the_bytes_that_go_through_ray():
    from buffer import make_items

    from coati.experience_buffer.utils import make_experience_batch

    items = make_items(4, prompt=3, response=2, seed=0)
    batch = make_experience_batch(items)
    assert batch.sequences.shape == (4, 5)
    assert batch.sample_ids.tolist() == [0, 1, 2, 3]
    again = make_experience_batch(make_items(4, prompt=3, response=2, seed=0))
    assert all(torch.equal(tensor, dict(again.tensors())[name]) for name, tensor in batch.tensors())


@pytest.mark.parametrize(
    ("check", "right", "wrong", "says"),
    [
        ("one_or_more", {"1": 1, "64": 64}, ["0", "-1", "1.5", "x", ""], "whole number, 1 or more"),
        ("zero_or_more", {"0": 0, "3": 3}, ["-1", "x"], "whole number, 0 or more"),
        ("below_one", {"0.5": 0.5}, ["0", "1", "nan", "x"], "above 0 and below 1"),
    ],
)
def test_arguments_are_checked_with_a_sentence(check, right, wrong, says):
    import checked

    assert {text: getattr(checked, check)(text) for text in right} == right
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=f"{says}, got '{text}'"):
            getattr(checked, check)(text)


def test_two_counts_no_gpu_and_too_many_warmups_are_refused(capsys, monkeypatch):
    import checked

    assert checked.two_counts("x")("2x10") == "2x10"
    for text in ("2", "2x", "0x1", "2x1x1", "2+1"):
        with pytest.raises(argparse.ArgumentTypeError, match="two numbers above 0 with 'x' between"):
            checked.two_counts("x")(text)
    parser = argparse.ArgumentParser()
    checked.check_device(parser, "cpu")
    checked.check_warmup(parser, steps=2, warmup=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for refused in (
        lambda: checked.check_device(parser, "cuda"),
        lambda: checked.check_warmup(parser, steps=2, warmup=2),
    ):
        with pytest.raises(SystemExit):
            refused()
    said = capsys.readouterr().err
    assert "--device cuda needs a GPU" in said
    assert "--steps must be above --warmup (2), which are not counted, got 2" in said


def test_evaluation_compares_medians_of_seconds_for_each_step(capsys):
    import evaluation
    from detached_runs import Measured

    def run(seconds, evaluating=0.0):
        return Measured(
            seconds=seconds, steps=10, samples=10, spent={"maker-0": {"evaluate": evaluating}, "trainer-0": {}}
        )

    found = {"without": [run(10.0), run(30.0), run(20.0)], "with": [run(21.0, 2.1), run(20.0, 4.0), run(60.0, 6.0)]}
    numbers = evaluation.report(found, 3)
    # medians 2.0 and 2.1 s; shares 0.1, 0.2 and 0.1
    assert (numbers["without"], numbers["with"]) == (2.0, 2.1)
    assert (numbers["cost"], numbers["evaluating"]) == (pytest.approx(0.05), pytest.approx(0.1))
    assert "+5.0%" in capsys.readouterr().out
