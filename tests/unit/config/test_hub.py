"""Without a network, hub names are looked up among the downloads at once."""

import os
import socket

import pytest

from coati.checks import avoid_hub_without_network
from coati.config import build_config


@pytest.fixture
def connected(monkeypatch):
    """The places that were connected to, without a network."""
    asked = []

    def refuse(place, timeout):
        asked.append(place)
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    yield asked
    os.environ.pop("HF_HUB_OFFLINE", None)


def config_of(model, prompts="./prompts.jsonl"):
    return build_config({"model": {"path": model}, "prompts": {"path": prompts}, "reward": {"function": "a:b"}})


@pytest.mark.parametrize("config", [config_of("owner/name"), config_of("./model", "owner/data")])
def test_hub_names_without_a_network_are_looked_up_offline(connected, caplog, config):
    avoid_hub_without_network(config)
    assert connected == [("huggingface.co", 443)]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "huggingface.co" in caplog.text


def test_local_paths_need_no_network(connected):
    avoid_hub_without_network(config_of("./model"))
    assert connected == []
    assert "HF_HUB_OFFLINE" not in os.environ


def test_a_proxy_or_a_setting_decides_itself(connected, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    avoid_hub_without_network(config_of("owner/name"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    avoid_hub_without_network(config_of("owner/name"))
    assert connected == []


def test_an_endpoint_of_another_name_and_port(connected, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror:8080")
    avoid_hub_without_network(config_of("owner/name"))
    assert connected == [("mirror", 8080)]
