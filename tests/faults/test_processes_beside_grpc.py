"""A process whose threads are inside gRPC starts others, as a coordinator does with its shards: each one lives."""

from __future__ import annotations

import subprocess
import sys

_STARTS = 150

_PROGRAM = f"""
import asyncio
import sparserow.proto
import grpc, uvloop
from grpc import aio

async def call_on(channel):
    while True:
        try:
            await channel.unary_unary("/no.Service/Call")(b"", timeout=1)
        except grpc.RpcError:
            pass

async def main():
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calls = [asyncio.create_task(call_on(aio.insecure_channel(f"127.0.0.1:{{port}}"))) for _ in range(3)]
    codes = []
    for _ in range({_STARTS}):
        child = await asyncio.create_subprocess_exec("true", start_new_session=True)
        codes.append(await child.wait())
    for call in calls:
        call.cancel()
    await server.stop(0)
    print(codes.count(0), set(codes))

uvloop.run(main())
"""


def test_a_process_started_beside_calls_in_flight_lives() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split(maxsplit=1) == [str(_STARTS), "{0}\n"]
