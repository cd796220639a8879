"""/docs: the interactive reference, from files that this service has itself: no page of it asks another host.

Swagger UI comes with the package fastapi-offline, of which nothing but its files is used. The policy of the page lets
the browser load and call this server only, whatever the files hold.
"""

import json
from importlib.resources import as_file, files

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, HTMLResponse, Response

from api.errors import NotFound

router = APIRouter(include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>paddle-rollout</title>
<link rel="stylesheet" href="{root}/docs/swagger-ui.css">
<link rel="icon" href="{root}/docs/favicon.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="{root}/docs/swagger-ui-bundle.js"></script>
<script src="{root}/docs/start.js"></script>
</body>
</html>
"""


@router.get("/docs")
async def page(request: Request) -> Response:
    """The interactive reference, for a browser."""
    return HTMLResponse(PAGE.format(root=_root(request)), headers=HEADERS)


@router.get("/docs/start.js")
async def start(request: Request) -> Response:
    """Opens the reference. validatorUrl: on a named host Swagger UI would ask swagger.io what it thinks of it."""
    options = {
        "url": f"{_root(request)}/openapi.json",
        "dom_id": "#swagger-ui",
        "deepLinking": True,
        "docExpansion": "none",
        "validatorUrl": None,
    }
    return Response(f"SwaggerUIBundle({json.dumps(options)});\n", media_type="text/javascript", headers=HEADERS)


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    """One of Swagger UI's own files."""
    if name not in ASSETS:
        raise NotFound(f"no such file: {name[:80]}")
    with as_file(files("fastapi_offline") / "static" / name) as path:
        return FileResponse(path, media_type=ASSETS[name], headers=HEADERS | {"cache-control": "max-age=86400"})


def _root(request: Request) -> str:
    """Under which path a proxy has put the service."""
    return str(request.scope.get("root_path", "")).rstrip("/")
