"""How the rollout benchmark reads log-probs off `generate`, and talks to vLLM's process."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

FAKE_VLLM = """
import types

__version__ = "0.fake"


class SamplingParams(types.SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, **options):
        assert options["max_model_len"] == 5 and options["max_num_seqs"] == 2 and options["skip_tokenizer_init"]

    def generate(self, prompts, sampling, use_tqdm):
        assert sampling.ignore_eos and sampling.logprobs == 0 and sampling.stop_token_ids == [7]
        print("a line of vLLM's log")
        return [self._continue(prompt["prompt_token_ids"], sampling.max_tokens) for prompt in prompts]

    def _continue(self, ids, count):
        if ids[0] == 99:
            raise ValueError("the prompt of a batch that fails")
        tokens = [ids[-1] + step + 1 for step in range(count)]
        flat = types.SimpleNamespace(logprobs=[-token / 8 for token in tokens])
        return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens, logprobs=flat)])
"""


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rollout_peers

    return rollout_peers


def requests(*batches):
    options = SimpleNamespace(eos_token_id=[7], sampling_temperature=1.0)
    return [SimpleNamespace(input_ids=torch.tensor(ids), max_new_tokens=3, options=options) for ids in batches]


def fake_model():
    return SimpleNamespace(dtype=torch.bfloat16, save_pretrained=lambda folder: None)


def test_drawn_log_probs_by_hand(peers):
    # Odds 1 : 3 and 1 : 1 in the first step, 3 : 1 and 7 : 1 in the second; drawn: tokens 1, 0 and then 0, 1.
    drawn = peers._DrawnLogProbs()
    first = torch.tensor([[1.0, 3.0], [2.0, 2.0]]).log()
    second = torch.tensor([[3.0, 1.0], [7.0, 1.0]]).log()
    assert drawn(torch.tensor([[5], [6]]), first) is first
    drawn(torch.tensor([[5, 1], [6, 0]]), second)
    log_probs = drawn.finish(torch.tensor([[5, 1, 0], [6, 0, 1]]))
    expected = [[math.log(3 / 4), math.log(3 / 4)], [math.log(1 / 2), math.log(1 / 8)]]
    torch.testing.assert_close(log_probs, torch.tensor(expected))


def test_vllm_continues_the_same_prompts_in_its_own_process(peers, tmp_path, capsys):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    # Batch sizes 1 and 2; the first prompts are the warm-up; the last batch of size 2 fails.
    by_batch = {1: requests([[3, 4]], [[5, 6]]), 2: requests([[1, 2], [3, 4]], [[99, 1], [1, 2]])}
    results, reason = peers.run_vllm(fake_model(), by_batch, 2, tmp_path)
    assert list(results) == [1]
    rate, rollout, start = results[1]
    assert rate > 0
    assert start["version"] == "0.fake"
    assert rollout.sequences.tolist() == [[5, 6, 7, 8, 9]]
    assert rollout.action_log_probs.tolist() == [[-7 / 8, -1.0, -9 / 8]]
    assert reason == "its process ended with status 1: ValueError: the prompt of a batch that fails"
    assert "Traceback" in capsys.readouterr().err


def test_vllm_that_cannot_be_imported_is_left_out_quietly(peers, tmp_path, capsys):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so is missing')")
    results, reason = peers.run_vllm(fake_model(), {1: requests([[3, 4]], [[5, 6]])}, 2, tmp_path)
    assert results == {}
    assert reason == "vllm cannot be imported (libcudart.so is missing)"
    assert capsys.readouterr().err == ""


def test_results_are_found_in_the_log_of_a_process_that_was_stopped(peers):
    log = "\n".join(
        [
            "WARNING: something",
            peers.RESULT + json.dumps({"version": "1", "start_seconds": 65.0}),
            peers.RESULT + json.dumps({"batch": 64, "seconds": [1.0]}),
        ]
    )
    measured, reason = peers.read_results(log, "it did not finish in 300 s")
    assert measured == {64: {"version": "1", "start_seconds": 65.0, "batch": 64, "seconds": [1.0]}}
    assert reason == "it did not finish in 300 s"


def test_what_is_set_already_wins_over_the_environment_for_vllm(peers, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("PYTHONPATH", "ours")
    environment = peers.vllm_environment(Path("theirs"))
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"].split(":") == ["theirs", "ours"]
    assert peers.vllm_environment(None)["PYTHONPATH"] == "ours"


def test_a_rate_is_compared_with_the_engines_measured_before(peers):
    import rollout

    assert rollout.times_others(600.0, {"reference": 100.0, "vllm": 400.0}) == {
        "times_stock": None,
        "times_reference": 6.0,
        "times_static": None,
        "times_vllm": 1.5,
    }


def test_torch_as_it_comes_is_left_as_it_was(peers, monkeypatch):
    import rollout

    monkeypatch.setattr(rollout.torch.backends.mkldnn, "enabled", False)
    threads = rollout.torch.get_num_threads()
    with rollout.stock_torch():
        assert rollout.torch.backends.mkldnn.enabled
    assert not rollout.torch.backends.mkldnn.enabled
    assert rollout.torch.get_num_threads() == threads
