"""``POST /d3tree/options``: change run-time options by name on a running server.

``/set_internal_state`` takes numbers only, so a policy cannot be named there; this route checks the values, answers 400
with a sentence, and hands numbers on.
"""

from __future__ import annotations

from typing import Any

from sglang_d3tree.config import OPTIONS, option_named

PATH = "/d3tree/options"


def add_routes(http_server: Any) -> None:
    """Add our route to SGLang's FastAPI application; harmless when it is there already.

    Args:
        http_server: the module ``sglang.srt.entrypoints.http_server``.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if any(getattr(route, "path", None) == PATH for route in http_server.app.routes):
        return

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def set_options(request: Request) -> JSONResponse:
        try:
            changes = await request.json()
            numbers = wire_values(changes)
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        manager = http_server._global_state.tokenizer_manager
        updated = await manager.set_internal_state(SetInternalStateReq(server_args=numbers))
        return JSONResponse({"updated": all(updated)}, status_code=200 if all(updated) else 400)

    # FastAPI looks annotations up in the module's globals when a route is added; a local import is not there.
    set_options.__annotations__["request"] = Request
    http_server.app.post(PATH)(set_options)


def wire_values(changes: Any) -> dict[str, int | float]:
    """Checked numbers by SGLang keyword for a JSON object of options by name.

    Raises:
        ValueError: one sentence, for anything that is not an object of run-time options within their limits.
    """
    runtime = ", ".join(option.name for option in OPTIONS if option.runtime)
    if not isinstance(changes, dict) or not changes:
        raise ValueError(f"{PATH} expects a JSON object with any of: {runtime}.")
    for name in changes:
        flag = option_named(name).flag
        if not option_named(name).runtime:
            raise ValueError(f"{flag} is fixed at start-up; changeable on a running server: {runtime}.")
    return {option_named(name).keyword: option_named(name).to_wire(value) for name, value in changes.items()}
