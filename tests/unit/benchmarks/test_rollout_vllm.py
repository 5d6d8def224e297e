"""How the rollout benchmark reads its cases, and talks to vLLM's process."""

import argparse
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

FAKE_VLLM = """
import types

__version__ = "0.fake"


class SamplingParams(types.SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, **options):
        assert options["max_model_len"] == 5 and options["max_num_seqs"] == 2 and options["skip_tokenizer_init"]
        scheduler = types.SimpleNamespace(max_num_running_reqs=options["max_num_seqs"])
        core = types.SimpleNamespace(engine_core=types.SimpleNamespace(scheduler=scheduler))
        self.llm_engine = types.SimpleNamespace(engine_core=core)
        self.scheduler = scheduler

    def generate(self, prompts, sampling, use_tqdm):
        assert sampling.ignore_eos and sampling.logprobs == 0
        print("a line of vLLM's log")
        if self.scheduler.max_num_running_reqs == 1 and len(prompts) == 2:
            raise ValueError("the case that fails")
        return [self._continue(prompt["prompt_token_ids"], sampling.max_tokens) for prompt in prompts]

    def _continue(self, ids, count):
        assert len(ids) == 2 and max(ids) < 10
        completion = types.SimpleNamespace(token_ids=[4] * count, logprobs=[-1.0] * count)
        return types.SimpleNamespace(outputs=[completion])
"""
CONFIG = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
}


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rollout_vllm

    return rollout_vllm


def job(peer, *texts):
    import dataclasses

    import rollout

    cases = [rollout.case_of(text) for text in texts]
    rows = [{**dataclasses.asdict(case), "end_tokens": case.end_tokens(10)} for case in cases]
    return peer.vllm_job(CONFIG, "bfloat16", rows, repeats=2, seconds=60.0)


def test_a_case_is_read_from_its_text(peer):
    import rollout

    ragged = rollout.case_of("2048/256x512+2048~500")
    assert (ragged.batch, ragged.slots, ragged.prompt_tokens, ragged.new_tokens) == (2048, 256, 512, 2048)
    assert len(ragged.end_tokens(1000)) == 2  # one of 500 ends a response
    equal = rollout.case_of("64x128+256")
    assert (equal.slots, equal.mean_tokens, equal.end_tokens(1000)) == (64, None, [])
    for wrong in ("64", "0x1+1", "64x128", "64x128+0", "a"):
        with pytest.raises(argparse.ArgumentTypeError, match="64x128"):
            rollout.case_of(wrong)


def test_vllm_gets_the_cache_that_its_largest_case_needs(peer):
    # Keys and values of 3 layers with one head of 4: 2 × 3 × 4 numbers of 2 bytes for a token; and an eighth more.
    assert peer.cache_bytes(CONFIG, 1000) == 48 * 1000 * 9 // 8
    described = job(peer, "1000000x10+30", "2000000/1000000x10+30~10")
    # Ragged ones are shorter on average.
    assert described["cache_bytes"] == peer.cache_bytes(CONFIG, 40 * 10**6)
    assert (described["slots"], described["max_tokens"]) == (10**6, 40)


def test_vllm_measures_in_its_own_process(peer, tmp_path, capsys):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    results, reason = peer.run_vllm(job(peer, "2x2+3", "2/1x2+3"), tmp_path)
    assert list(results) == ["2x2+3"]
    found = results["2x2+3"]
    assert (found["version"], found["mean_tokens"], len(found["rates"])) == ("0.fake", 3, 2)
    assert found["tokens_per_second"] > 0
    assert reason == "its process ended with status 1: ValueError: the case that fails"
    assert "Traceback" in capsys.readouterr().err


def test_vllm_that_cannot_be_imported_is_left_out_quietly(peer, tmp_path, capsys):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so is missing')")
    results, reason = peer.run_vllm(job(peer, "2x2+3"), tmp_path)
    assert results == {}
    assert reason == "vllm cannot be imported (libcudart.so is missing)"
    assert capsys.readouterr().err == ""


def test_results_are_found_in_the_log_of_a_process_that_was_stopped(peer):
    log = "\n".join(
        [
            "WARNING: something",
            peer.RESULT + json.dumps({"version": "1", "start_seconds": 65.0}),
            peer.RESULT + json.dumps({"case": "64x128+256", "rates": [1.0]}),
        ]
    )
    measured, reason = peer.read_results(log, "it did not finish in 300 s")
    wanted = {"version": "1", "start_seconds": 65.0, "case": "64x128+256", "rates": [1.0]}
    assert measured == {"64x128+256": wanted}
    assert reason == "it did not finish in 300 s"


def test_what_is_set_already_wins_over_the_environment_for_vllm(peer, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("PYTHONPATH", "ours")
    environment = peer.vllm_environment(Path("theirs"))
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"].split(":") == ["theirs", "ours"]
    assert peer.vllm_environment(None)["PYTHONPATH"] == "ours"


def test_a_rate_is_compared_with_the_engines_measured_before(peer, capsys):
    import rollout

    table, case = rollout.Table(None), rollout.case_of("64x128+256")
    table.add(rollout.case_of("1x1+1"), "vllm", [7.0])
    table.add(case, "vllm", [400.0])
    table.add(case, "reference", [100.0])
    table.add(case, "native", [500.0, 600.0, 900.0], gap_mean=0.0, gap_max=0.0)
    row = table.rows[-1]
    assert (row["times_stock"], row["times_reference"], row["times_vllm"]) == (None, 6.0, 1.5)


def test_torch_as_it_comes_is_left_as_it_was(peer, monkeypatch):
    import rollout

    monkeypatch.setattr(rollout.torch.backends.mkldnn, "enabled", False)
    threads = rollout.torch.get_num_threads()
    with rollout.stock_torch():
        assert rollout.torch.backends.mkldnn.enabled
    assert not rollout.torch.backends.mkldnn.enabled
    assert rollout.torch.get_num_threads() == threads
