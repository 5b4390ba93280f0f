"""An online service with FastAPI: POST /predict with a published model's arguments returns its outputs.

    python -m sparserow.deploy.examples.online_service --root models --serving 127.0.0.1:7100 --model ctr

    curl -d '{"arguments": [[[1, 2], [3, 4]]]}' -H 'Content-Type: application/json' 127.0.0.1:8000/predict

It needs ``pip install fastapi uvicorn``. The dense part runs here; rows come from the serving processes.
When the alias moves, the service takes over the new program together with its rows. Dense weights that training
publishes meanwhile are taken over alone. Replies name both versions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from ...proto.errors import InvalidArgument, NotFound, SparserowError
from ...serving.client.client import ServingClient
from ...serving.inference.inference import ServedModel

_REFRESH_SEC = 1.0
_MOST_BYTES = 4 << 20
_MOST_REQUESTS = 64


def make_app(model: ServedModel) -> FastAPI:
    """Returns the service around a model, which the caller closes."""

    async def keep_fresh() -> None:
        while True:
            await asyncio.sleep(_REFRESH_SEC)
            with contextlib.suppress(SparserowError):  # the loaded version stays; a failing call reports its own error
                await asyncio.to_thread(model.refresh)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        refreshing = asyncio.get_running_loop().create_task(keep_fresh())
        yield
        refreshing.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.middleware("http")
    async def bound_body(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not length.isdecimal():
            return JSONResponse({"detail": "Content-Length: the header is missing"}, 411)
        if len(length) > 18 or int(length) > _MOST_BYTES:
            return JSONResponse({"detail": f"Content-Length: allowed: [0, {_MOST_BYTES}]"}, 413)
        return await call_next(request)

    @app.get("/model")
    def describe() -> dict[str, Any]:
        inputs = [{"name": i.name, "dtype": str(i.dtype), "shape": i.shape} for i in model.inputs]
        return {"version": model.version, "dense_version": model.dense_version, "inputs": inputs}

    @app.post("/predict")
    def predict(body: dict[str, Any]) -> dict[str, Any]:
        try:
            prediction = model.predict(*_tensors(model, body.get("arguments")))
        except (InvalidArgument, NotFound) as error:
            raise HTTPException(400, str(error)) from error
        except SparserowError as error:
            raise HTTPException(
                503 if error.retryable or error.code == "DeadlineExceeded" else 500, str(error)
            ) from error
        return {
            "version": prediction.version,
            "dense_version": prediction.dense_version,
            "output": prediction.output.tolist(),
        }

    return app


def _tensors(model: ServedModel, arguments: object) -> list[torch.Tensor]:
    inputs = model.inputs
    if not isinstance(arguments, list) or len(arguments) != len(inputs):
        names = ", ".join(wanted.name for wanted in inputs)
        raise InvalidArgument(f"arguments: must be a list of {len(inputs)} arrays: {names}")
    tensors = []
    for wanted, value in zip(inputs, arguments, strict=True):
        try:
            tensor = torch.tensor(value, dtype=wanted.dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgument(f"arguments: {wanted.name}: {error}") from None
        if tensor.dim() != len(wanted.shape):
            raise InvalidArgument(
                f"arguments: {wanted.name}: {tensor.dim()} dimensions are not allowed; allowed: {len(wanted.shape)}"
            )
        tensors.append(tensor)
    return tensors


def main() -> None:
    """Runs the service."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", required=True, help="folder of published models")
    parser.add_argument("--serving", default="127.0.0.1:7100", help="HOST:PORT of serving processes, with commas")
    parser.add_argument("--model", default=None, help="NAME[@ALIAS]; the only one served when it is left out")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    with ServingClient(asked.serving, model=asked.model) as client, ServedModel(client, asked.root) as model:
        uvicorn.run(make_app(model), host="127.0.0.1", port=asked.port, limit_concurrency=_MOST_REQUESTS)


if __name__ == "__main__":
    main()
