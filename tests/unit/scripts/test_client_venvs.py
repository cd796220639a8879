import pytest

from scripts.client_venvs import REQUIREMENTS, clients, steps, wanted


def test_blank_lines_and_no_deps_part_the_steps():
    text = "a==1\n\n# why\nb c\nd\n# no-deps\ne==2\n\nf\n"
    assert steps(text) == [(True, ["a==1"]), (True, ["b c", "d"]), (False, ["e==2"]), (True, ["f"])]


def test_every_client_has_something_to_install():
    assert clients()
    for client in clients():
        assert all(requirements for _, requirements in steps((REQUIREMENTS / f"{client}.txt").read_text()))


def test_torch_comes_first_wherever_it_is_needed():
    for client in ("areal", "trl"):
        assert steps((REQUIREMENTS / f"{client}.txt").read_text())[0] == (True, ["torch==2.13.0"])


def test_all_clients_unless_some_are_named(capsys):
    assert wanted([]) == clients()
    assert wanted(["trl", "openai"]) == ["trl", "openai"]
    with pytest.raises(SystemExit):
        wanted(["trl", "nobody"])
    assert "no client is called nobody" in capsys.readouterr().err
