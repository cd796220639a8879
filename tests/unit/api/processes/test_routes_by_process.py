"""Which routes an API process answers by itself, against the routes there are."""

from fastapi.routing import APIRoute

from api.app import ROUTERS
from api.processes.forwarding import GENERATE

NO_REQUEST = {"/v1/completions/render", "/v1/chat/completions/render", "/abort_request"}
"""Bodies with an id that start nothing under it."""


def test_every_route_that_starts_a_request_under_an_id_is_known() -> None:
    """Another process may be asked to abort it, or be sent the same id again."""
    found = set()
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and "POST" in route.methods and route.body_field is not None:
                fields = getattr(route.body_field.field_info.annotation, "model_fields", {})
                if {"request_id", "rid"} & fields.keys():
                    found.add(route.path)
    assert found - NO_REQUEST == GENERATE
    assert found >= NO_REQUEST
