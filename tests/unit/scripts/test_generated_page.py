"""A generated page is written, and --check tells a page that is current from one that is not."""

import sys

import pytest

from scripts.generated_page import write_or_check


@pytest.fixture
def page(tmp_path):
    return tmp_path / "page.md"


def run(monkeypatch, page, text, *words):
    monkeypatch.setattr(sys, "argv", ["render", *words])
    return write_or_check(page, lambda: text, "of a test")


def test_a_page_is_written_and_then_current(monkeypatch, page):
    assert run(monkeypatch, page, "one") == 0
    assert page.read_text() == "one"
    assert run(monkeypatch, page, "one", "--check") == 0


def test_a_check_finds_another_text_or_none_and_writes_nothing(monkeypatch, page, capsys):
    assert run(monkeypatch, page, "one", "--check") == 1
    assert not page.exists()
    page.write_text("old")
    assert run(monkeypatch, page, "new", "--check") == 1
    assert page.read_text() == "old"
    assert "make format" in capsys.readouterr().err
