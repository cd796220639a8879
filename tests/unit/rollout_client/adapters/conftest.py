import pytest

from tests.unit.rollout_client.adapters.scripted import ScriptedPublisher


@pytest.fixture
def publishers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedPublisher]:
    """Every publisher that an adapter made."""
    made: list[ScriptedPublisher] = []

    def make(*args, **options):
        made.append(ScriptedPublisher(*args, **options))
        return made[-1]

    monkeypatch.setattr("rollout_client.adapters.push.WeightPublisher", make)
    return made
