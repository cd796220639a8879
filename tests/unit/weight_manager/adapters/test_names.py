"""What is said of a name that no adapter has."""

from types import SimpleNamespace

import pytest

from weight_manager.adapters.lines import Lines
from weight_manager.errors import PushRefused


@pytest.mark.parametrize(
    ("loaded", "says"),
    [
        ({}, "no adapter 'nope' is loaded, nor any other"),
        ({"b": None, "a": None}, "no adapter 'nope' is loaded; loaded: a, b"),
    ],
)
def test_a_name_that_is_not_loaded_is_told_those_that_are(loaded, says):
    with pytest.raises(PushRefused) as caught:
        Lines.find(SimpleNamespace(_lines=loaded), "nope")  # all of a store's lines that is read
    assert (caught.value.code, caught.value.message) == ("unknown_adapter", says)
