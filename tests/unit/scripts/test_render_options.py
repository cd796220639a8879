"""docs/options.md is what the config classes say."""

from typing import Literal

from pydantic import BaseModel, Field

from scripts.render_options import PAGE, PARTS, render, section


class Shop(BaseModel):
    name: str = Field("corner", min_length=2)
    """Over the door | in
    gold."""
    clerks: int = Field(ge=1, le=9)
    """On duty."""
    open: bool = True
    """Now."""
    door: Literal["oak", "glass"] | None = None
    """At the front."""
    other: str = ""
    """Left out."""


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render()


def test_a_class_is_a_table_of_its_fields() -> None:
    assert section("Shop", Shop, "SHOP_", {"other"}).splitlines()[4:] == [
        r"| `SHOP_NAME` | `corner` | 2 characters or more | Over the door \| in gold. |",
        "| `SHOP_CLERKS` | required | >= 1, <= 9 | On duty. |",
        "| `SHOP_OPEN` | `true` |  | Now. |",
        "| `SHOP_DOOR` |  | `oak`, `glass` | At the front. |",
    ]


def test_every_field_of_a_part_is_there_or_an_option_of_the_service() -> None:
    page = render()
    for part, field in (("store", "lease_s"), ("worker", "max_batch"), ("api", "max_requests")):
        assert field in PARTS[part].model_fields
        assert f"`PADDLE_ROLLOUT_{part.upper()}__{field.upper()}`" in page
