"""The list of disruptions: each disturbs a running world for a while; some tell seconds until all is used again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from benchmarks.gateway_faults.clients import Clients
from benchmarks.gateway_faults.world import MODEL, Engine, Misbehaving, World
from mini_infer_contract.peer_auth import PEER_HEADER

Fault = Callable[[World, Clients], Awaitable[float | None]]


async def nothing(world: World, clients: Clients) -> None:
    await asyncio.sleep(5)


async def _back(engine: Engine, clients: Clients) -> float:
    """Starts an engine that ended; seconds from when it is ready until it is used."""
    await asyncio.sleep(1)
    await engine.start()
    return await clients.used_again(engine.name)


async def killed(world: World, clients: Clients) -> float:
    slowest = 0.0
    for engine in world.engines:
        await engine.kill()
        slowest = max(slowest, await _back(engine, clients))
        await asyncio.sleep(1)
    return slowest


async def core_killed(world: World, clients: Clients) -> float:
    engine = world.engines[0]
    engine.kill_core()
    await asyncio.sleep(0.5)
    await engine.kill()
    return await _back(engine, clients)


async def stopped_for_8_s(world: World, clients: Clients) -> float:
    engine = world.engines[0]
    engine.signal(signal.SIGSTOP)
    await asyncio.sleep(8)
    engine.signal(signal.SIGCONT)
    return await clients.used_again(engine.name)


async def hung(world: World, clients: Clients) -> float:
    """HTTP server and core of one engine stop for good; it is replaced later."""
    engine = world.engines[0]
    core = engine.core_pid
    engine.signal(signal.SIGSTOP)
    _signal(core, signal.SIGSTOP)
    await asyncio.sleep(12)
    _signal(core, signal.SIGKILL)
    await engine.kill()
    return await _back(engine, clients)


async def core_hung(world: World, clients: Clients) -> float:
    """Its core alone stops: the HTTP server still answers."""
    engine = world.engines[0]
    core = engine.core_pid
    _signal(core, signal.SIGSTOP)
    await asyncio.sleep(12)
    _signal(core, signal.SIGCONT)
    return await clients.used_again(engine.name)


async def terminated(world: World, clients: Clients) -> float:
    engine = world.engines[0]
    engine.signal(signal.SIGTERM)
    assert engine.process is not None
    await engine.process.wait()
    return await _back(engine, clients)


async def drained(world: World, clients: Clients) -> float:
    engine = world.engines[0]
    async with aiohttp.ClientSession() as client, client.post(engine.url + "/drain", headers={PEER_HEADER: "fault"}):
        await asyncio.sleep(5)
    await engine.kill()
    return await _back(engine, clients)


@asynccontextmanager
async def _odd(world: World, status: int) -> AsyncIterator[None]:
    server = Misbehaving(status)
    await server.start()
    world.write(server.endpoint)
    try:
        yield
    finally:
        world.write()
        server.stop()


def answers(status: int) -> Fault:
    async def fault(world: World, clients: Clients) -> None:
        async with _odd(world, status):
            await asyncio.sleep(8 if status else 15)

    return fault


async def events_cut(world: World, clients: Clients) -> None:
    for engine in world.engines:
        await engine.pipe.cut()
    await asyncio.sleep(5)
    for engine in world.engines:
        await engine.pipe.open()
    await asyncio.sleep(2)


async def file_broken(world: World, clients: Clients) -> None:
    for content in ("{", "", '{"endpoints": [{"name": "x", "url": "http://h:99999", "model": "dry"}]}'):
        world.file.write_text(content)
        await asyncio.sleep(1.5)
    world.file.unlink()
    await asyncio.sleep(1.5)
    world.write()
    await asyncio.sleep(1)


async def gateway_killed(world: World, clients: Clients) -> float:
    """One of two; clients leave it when it refuses them, as a Service does."""
    lost = clients.gateways[0]
    clients.gateways = [await world.add_gateway(), lost]
    await asyncio.sleep(2)
    began = asyncio.get_running_loop().time()
    await lost.kill()
    await asyncio.sleep(0.2)
    clients.gateways = [clients.gateways[0]]
    await lost.start()
    clients.gateways = [clients.gateways[0], lost]
    took_s = asyncio.get_running_loop().time() - began
    await asyncio.sleep(2)
    clients.gateways = [lost]
    return took_s


async def gateway_rolled(world: World, clients: Clients) -> None:
    """A new one is ready first; the old one is taken off the list while it still answers, as a rollout does."""
    old = clients.gateways[0]
    clients.gateways = [await world.add_gateway()]
    old.signal(signal.SIGTERM)
    assert old.process is not None
    await old.process.wait()
    await asyncio.sleep(1)


async def slow_readers(world: World, clients: Clients) -> None:
    """A hundred clients ask for streams and read nothing of them."""
    port = clients.gateways[0].port
    body = b'{"model":"%b","messages":[{"role":"user","content":"%b"}],"stream":true}' % (MODEL.encode(), b"x" * 4000)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    writers = []
    for _ in range(100):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(head % len(body) + body)
        writers.append(writer)
    await asyncio.sleep(6)
    for writer in writers:
        writer.transport.abort()


def disconnects(count: int) -> Fault:
    async def fault(world: World, clients: Clients) -> None:
        port = clients.gateways[0].port
        body = b'{"model":"%b","messages":[{"role":"user","content":"go on"}],"stream":true}' % MODEL.encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

        async def leave(share: int) -> None:
            for _ in range(share):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                await asyncio.sleep(0.01)
                writer.transport.abort()

        await asyncio.gather(*(leave(count // 50) for _ in range(50)))

    return fault


def _signal(pid: int, number: int) -> None:
    os.kill(pid, number)


def faults(disconnect_count: int) -> dict[str, Fault]:
    """Name -> what it does."""
    return {
        "nothing": nothing,
        "SIGKILL, back after 1 s (each engine once)": killed,
        "core process SIGKILLed": core_killed,
        "SIGSTOP for 8 s": stopped_for_8_s,
        "hung for good (SIGSTOP, both processes)": hung,
        "core hung, HTTP answers": core_hung,
        "SIGTERM, same address": terminated,
        "POST /drain": drained,
        "a pod answers 429": answers(429),
        "a pod answers 500": answers(500),
        "a pod answers 503": answers(503),
        "a pod accepts and never answers": answers(0),
        "events cut for 5 s": events_cut,
        "endpoints file broken, empty, wrong, gone": file_broken,
        "gateway SIGKILLed, two replicas": gateway_killed,
        "gateway rolled": gateway_rolled,
        "100 readers that never read": slow_readers,
        f"{disconnect_count} disconnects": disconnects(disconnect_count),
    }
