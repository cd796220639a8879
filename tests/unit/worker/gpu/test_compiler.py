"""Into which texts a model's kernels are put, and that each is compiled once. The compiler is a stand-in."""

import re
import threading

import pytest

from tests.disk_room import DiskRoom
from worker.gpu import compiler
from worker.gpu.driver import CudaError
from worker.gpu.products import Shape, instances

LINES = instances([Shape("STORE", 4096, 1024, True), Shape("GATE", 3072, 1024, True)], 132)


def _kernels(text):
    """What a text makes, but for what templates and macros make."""
    return re.findall(r"^KERNEL (?:__launch_bounds__\([^)]*\) )?(\w+)\(", text, re.MULTILINE)


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("sums", [True, False])
def test_every_kernel_is_in_one_text(experts, sums):
    texts = compiler.sources(LINES, experts=experts, sums=sums)
    made = [name for text in texts for name in _kernels(text)]
    assert len(made) == len(set(made)) > 10
    assert {"draw", "feed", "embed", "turn"} <= set(made)
    assert ("choose_experts" in made) == experts
    assert ("embed_part" in made) == sums
    found = [line for text in texts for line in text.splitlines() if line in LINES]
    assert sorted(found) == LINES


def test_a_model_without_products_of_its_own_has_no_text_for_them():
    assert not any("ONE_ROW" in text for text in compiler.sources([], experts=False))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the compiler was asked for."""
    found = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_begun", {})
    monkeypatch.setattr(compiler, "_compile", lambda text, options: found.append(text) or text.encode())
    return found


def test_texts_are_compiled_beside_each_other_and_kept(monkeypatch, asked):
    together = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(compiler, "_compile", lambda text, _: (together.wait(), asked.append(text), text.encode())[2])
    assert compiler.compiled_apart(["a", "b"], {}, (9, 0)) == [b"a", b"b"]
    assert compiler.compiled_apart(["b", "a"], {}, (9, 0)) == [b"b", b"a"]
    assert sorted(asked) == ["a", "b"]


def test_only_what_is_new_is_compiled(asked):
    compiler.compiled_apart(["a", "b"], {}, (9, 0))
    compiler.compiled_apart(["a", "c"], {}, (9, 0))
    assert sorted(asked) == ["a", "b", "c"]


def test_a_text_that_does_not_compile_is_said(monkeypatch, asked):
    def refuse(text, options):
        raise CudaError("the kernels do not compile for this device")

    monkeypatch.setattr(compiler, "_compile", refuse)
    with pytest.raises(CudaError, match="do not compile"):
        compiler.compiled_apart(["a", "b"], {}, (9, 0))


def test_a_cache_that_is_full_is_none_and_nothing_is_left_there(asked, monkeypatch, tmp_path):
    """Each start left as many files without a name that anybody knows, of what had room."""
    disk = DiskRoom()
    with monkeypatch.context() as patched:
        patched.setattr(compiler.os, "write", disk)
        patched.setattr(compiler.os, "fsync", lambda file: disk(file, b""))
        assert compiler.compiled("a", {}, (9, 0)) == b"a"
    assert not list((tmp_path / "paddle-rollout").iterdir())
    assert [compiler.compiled("a", {}, (9, 0)) for _ in range(2)] == [b"a", b"a"]
    assert asked == ["a", "a"], "the third is kept"


def test_what_others_could_have_written_is_not_run(asked, tmp_path):
    compiler.compiled("a", {}, (9, 0))
    (tmp_path / "paddle-rollout").chmod(0o777)
    compiler.compiled("a", {}, (9, 0))
    assert asked == ["a", "a"]


def test_what_was_begun_is_waited_for_and_not_compiled_again(monkeypatch, asked):
    goes_on = threading.Event()
    monkeypatch.setattr(compiler, "_compile", lambda text, _: (goes_on.wait(30), asked.append(text), text.encode())[2])
    first, second = compiler.begin(["a", "b"], {}, (9, 0))
    assert compiler.begin(["b"], {}, (9, 0)) == [second]
    assert not first.done()
    goes_on.set()
    assert compiler.compiled("a", {}, (9, 0)) == b"a"
    assert compiler.compiled_apart(["b", "a"], {}, (9, 0)) == [b"b", b"a"]
    assert sorted(asked) == ["a", "b"]


def test_of_what_was_begun_and_does_not_compile_whoever_asks_is_told(monkeypatch, asked):
    def refuse(text, options):
        raise CudaError("the kernels do not compile for this device")

    monkeypatch.setattr(compiler, "_compile", refuse)
    compiler.begin(["a"], {}, (9, 0))
    with pytest.raises(CudaError, match="do not compile"):
        compiler.compiled("a", {}, (9, 0))


def test_products_come_before_what_is_not_timed():
    """They are timed while the others are compiled; a norm and what joins gate and up are timed with them."""
    texts = compiler.sources(LINES, experts=True)
    at = {
        name: n
        for n, text in enumerate(texts)
        for name in ("gated", "rms_norm", "draw", "attend")
        if name in _kernels(text)
    }
    products = [n for n, text in enumerate(texts) if any(line in LINES for line in text.splitlines())]
    assert at["gated"] == at["rms_norm"] < min(products)
    assert max(products) < min(at["draw"], at["attend"])
