"""A reward server that is slow, wrong, down and back again: the run continues, and no failure becomes a score."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
from http_server import LocalServer

from coati.config import load_config
from coati.ledger.audit import audit_run
from coati.monitor import read_jsonl
from coati.rewards.library import remote


@pytest.fixture
def server(monkeypatch):
    """Scores a completion by 1 + its length, so that no score is 0; some requests find it in trouble."""
    is_over, requests = threading.Event(), []

    def answer(body, handler):
        requests.append(body)
        match len(requests):
            case 2:  # slow
                is_over.wait(60)
            case 4:  # wrong
                return {"scores": []}
            case 6:
                raise ConnectionError
            case 8:
                return 503, "busy", {"Retry-After": "0"}
        scores = [{"score": 1.0 + len(text), "seen": text[:20]} for text in body["completions"]]
        return {
            "scores": [
                {"error": "cannot say"} if len(text) % 5 == 0 else one
                for text, one in zip(body["completions"], scores, strict=True)
            ]
        }

    server = LocalServer(answer)
    server.num_pauses = 0

    def sleep(seconds):
        """Pauses take no time. At the second one the server goes down, and two later it is back."""
        server.num_pauses += 1
        if server.num_pauses == 2:
            server.down()
        if server.num_pauses == 4:
            server.up()

    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield server
    is_over.set()
    server.down()


def test_the_run_goes_on_the_account_closes_and_no_failure_became_a_score(film_run, coati_here, server):
    options = {"url": server.url, "batch_size": 8, "concurrency": 1, "request_seconds": 0.5}
    text = film_run.read_text().replace('function = "film_rewards:kind"', "")
    terms = '{ function = "http" }, { function = "length", weight = 0, options = { maximum = 16 } }'
    film_run.write_text(text.replace("[reward]", f"[reward]\nterms = [{terms}]\nmax_quarantined = 10000"))
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    film_run.write_text(
        film_run.read_text().replace('{ function = "http" }', f'{{ function = "http", options = {{ {table} }} }}')
    )
    found = coati_here("train", film_run, "--sync", "--set", "logging.samples_kept=24")
    assert found.returncode == 0, found.stderr
    assert server.num_pauses >= 4
    config = load_config(film_run)
    folder = config.output_folder
    account = audit_run(folder)
    assert account.problems == []
    assert account.num_trained == config.train.total_steps * config.train.batch_size
    quarantined = [row for row in account.table() if row[0] == "quarantined"]
    assert sum(row[2] for row in quarantined) == len(read_jsonl(folder / "quarantine.jsonl")) > 0
    assert {row[1] for row in quarantined} == {"Reward function 'http' returned an error"}
    samples = read_jsonl(folder / "samples.jsonl")
    assert len(samples) > 24
    for sample in samples:
        assert len(sample["response"]) % 5
        assert sample["reward"] == sample["terms"]["http"] == 1.0 + len(sample["response"])
        assert sample["details"]["http"] == {"seen": sample["response"][:20]}
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "reward/min" in row]
    assert min(row["reward/min"] for row in rows) >= 2.0
    assert sum(row.get("reward/retries", 0) for row in rows) > 0
