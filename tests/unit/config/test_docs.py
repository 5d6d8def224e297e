"""The pages that are made from the code say what the code says."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from coati.config import RunSettings

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(maker):
    stale = [path.name for path, _ in maker.outdated()]

    assert stale == [], "run python docs/make_configuration.py"


def test_rendering_is_repeatable(maker):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    once = maker.render("configuration.md", text)

    assert maker.render("configuration.md", once) == once


def test_a_changed_page_is_noticed(maker):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    changed = text.replace("| `batch_size` |", "| `batch_sise` |")

    assert changed != text
    assert maker.render("configuration.md", changed) == text


def test_every_setting_is_described():
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = [key for field in RunSettings.model_fields.values() for key in field.annotation.model_fields]

    assert [key for key in keys if f"| `{key}` |" not in configuration] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]

    assert [target for target in targets if target and not (page.parent / target).exists()] == []
