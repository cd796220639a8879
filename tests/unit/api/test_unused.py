import pytest

from api.cli.serve_command import chosen
from api.cli.unused import unused
from api.config import compose


def said(model_dir, settings, **options):
    wanted = chosen({"model": model_dir, **options}, {}, settings)
    return unused(wanted, compose(wanted))


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("fleet.fan_out=3", "without --ray"),
        ("store.relay_window=2000000", "without store.upstream"),
        ("store.relay_lease_s=3", "without store.relay_endpoint"),
        ("store.relay_quorum=2", "relay_policy"),
        ("worker.heartbeat_s=2", "one rank"),
        ("worker.engine_options={}", "has none"),
    ],
)
def test_a_setting_of_another_mode_is_told_of(model_dir, setting, why):
    assert any(
        one.startswith(f"{setting.partition('=')[0]} is ignored: ") and why in one for one in said(model_dir, [setting])
    )


def test_settings_of_adapters_are_told_of_where_there_are_none(model_dir):
    settings = ["store.max_adapters=0", "store.adapter_bytes=2000000"]
    assert said(model_dir, settings) == [
        "store.adapter_bytes is ignored: with store.max_adapters=0 there are no adapters"
    ]
    assert said(model_dir, settings[1:]) == []


def test_steps_are_given_up_by_one_rank_on_a_cpu(model_dir):
    assert said(model_dir, ["worker.give_up_steps=false"]) == []
    assert len(said(model_dir, ["worker.give_up_steps=false"], tp=2)) == 1


def test_the_address_of_a_cluster_is_told_of_without_ray(model_dir):
    assert said(model_dir, [], address="10.0.0.1:6379") == ["--address is ignored: without --ray there is no cluster"]
    assert said(model_dir, []) == []
